"""What is said of prompts, positive and negative alike: those that are cut, new tokens, marks of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_drawings
import torch
from safetensors.torch import save_file
from tiny_drawings import documents, generate
from tiny_models import write_sd

from daguerre.config import config as configs
from daguerre.generation import prompt_syntax
from daguerre.run import samples

LONG = " ".join(["bad hands"] * 60)
SMALL = ("height=16", "width=16", "num_inference_steps=1", "training.device=cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_sd(folder / "sd")
    save_file({"<ugly>": torch.randn(1, 48)}, folder / "ugly.safetensors")
    return folder


def test_a_negative_prompt_that_is_cut_is_told(base, tmp_path, capsys):
    assert generate(base / "sd", *SMALL, "prompt=a", f"negative_prompt={LONG}", f"out={tmp_path / 'a'}") == 0
    assert "one negative prompt is too long, and cut to 24 tokens: image 0" in capsys.readouterr().out
    (document,) = documents(tmp_path / "a")
    assert (document.get("prompt_was"), document["negative_prompt_was"]) == (None, "cut to 24 tokens")
    assert generate(base / "sd", *SMALL, f"prompt={LONG}", f"negative_prompt={LONG}", f"out={tmp_path / 'b'}") == 0
    said = capsys.readouterr().out
    assert "one prompt is too long" in said
    assert "one negative prompt is too long" in said


def test_a_negative_prompt_without_guidance_is_not_told_as_cut(base, tmp_path, capsys):
    (tmp_path / "list.jsonl").write_text('{"prompt": "a", "guidance_scale": 1}\n', encoding="utf-8")
    given = ("prompts_file=" + str(tmp_path / "list.jsonl"), f"negative_prompt={LONG}", f"out={tmp_path / 'a'}")
    assert generate(base / "sd", *SMALL, *given) == 0
    assert "too long" not in capsys.readouterr().out


def test_a_new_token_in_the_negative_prompt_is_one_in_a_prompt(base, tmp_path, capsys):
    use = f"use={{{base / 'ugly.safetensors'}: 1}}"
    assert generate(base / "sd", *SMALL, use, "prompt=a", "negative_prompt=<ugly>", f"out={tmp_path / 'a'}") == 0
    assert "no prompt has the new token" not in capsys.readouterr().out
    assert generate(base / "sd", *SMALL, use, "prompt=a", "negative_prompt=b", f"out={tmp_path / 'b'}") == 0
    assert "no prompt has the new token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a (red:1.4) car", "(red:1.4) sets no weight"),
        ("a (red:.5) car", "(red:.5) sets no weight"),
        ("a ((red)) car", "brackets are text"),
        ("a [red] car", "[red] sets no weight and chooses nothing"),
        ("a [red|blue] car", "[red|blue]"),
        ("a car <lora:fast:0.8>", "<lora:fast:0.8> loads nothing: use='{FILE: 0.8}'"),
        ("embedding:easynegative", "reads a file of tokens"),
        (r"miku \(vocaloid\)", "the backslash"),
        ('[a, "b, c"]', """[a, "b, c"] is one prompt: sampling.prompts='[...]' takes a list"""),
        ("[red star,blue star]", "[red star,blue star] is one prompt"),
        ("a cat BREAK a dog", "BREAK begins no new window"),
    ],
)
def test_marks_of_other_programs_are_told(prompt, said):
    (line,) = prompt_syntax.notices(["a dog", prompt])
    assert said in line
    assert repr(prompt) in line


@pytest.mark.parametrize("prompt", ["a <toy> dog", "a dog (small), 1:2, at 12:30", "10 < 20 > 5", "a (very) small dog"])
def test_plain_words_are_not(prompt):
    assert prompt_syntax.notices([prompt]) == []


def test_generate_and_runs_tell_of_marks_on_both_sides(base, tmp_path, capsys):
    given = ("prompt=a (red:1.4) car", "negative_prompt=[ugly]", f"out={tmp_path / 'a'}")
    assert generate(base / "sd", *SMALL, *given) == 0
    said = capsys.readouterr().out
    assert "(red:1.4) sets no weight; [ugly] sets no weight" in said
    (tmp_path / "list.jsonl").write_text('{"prompt": "a", "negative_prompt": "<lora:x:1>"}\n', encoding="utf-8")
    assert generate(base / "sd", *SMALL, f"prompts_file={tmp_path / 'list.jsonl'}", f"out={tmp_path / 'b'}") == 0
    assert "<lora:x:1> loads nothing" in capsys.readouterr().out


def test_a_run_tells_of_its_own_prompts(tiny_sd, tmp_path):
    recipe = tiny_drawings.write_recipe(tmp_path, tiny_sd)
    loaded = configs.load(str(recipe), ["sampling.prompts=[a dog]", "sampling.negative_prompt=(bad:1.2)"])
    assert any("(bad:1.2) sets no weight" in line for line in samples.prompt_notices(loaded.config))
