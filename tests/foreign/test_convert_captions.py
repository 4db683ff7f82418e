"""Captions and prompts of other trainers' configs: settings above the data sets count where none of these can be read,
and prompts are read with the options behind them."""

import json
from pathlib import Path

import pytest
import recipe_values
from test_convert_config import said

from daguerre.cli import main
from daguerre.foreign import peers

KOHYA = {"pretrained_model_name_or_path": "m.safetensors", "train_data_dir": "sets", "shuffle_caption": True,
         "keep_tokens": 2, "caption_dropout_rate": 0.1}  # fmt: skip
KOHYAS = {"captions.shuffle_tags": True, "captions.keep_tags": 2, "caption_dropout": 0.1}
TUNER = {"model_family": "sdxl", "model_type": "lora", "data_backend_config": "sets.json", "instance_prompt": "sks"}
TOOLKIT = {"type": "sd_trainer", "model": {"name_or_path": "a/b"}, "network": {"type": "lora", "linear": 8},
           "train": {"steps": 5}, "trigger_word": "sks"}  # fmt: skip
ONETRAINER = {"model_type": "STABLE_DIFFUSION_15", "base_model_name": "a/b", "training_method": "FINE_TUNE"}


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Converts a mapping: our values by path, {key: (kind, text)}."""
    monkeypatch.chdir(tmp_path)

    def run(tree: dict) -> tuple[dict, dict]:
        if "type" in tree:
            tree = {"job": "extension", "config": {"name": "n", "process": [tree]}}
        is_tuner = "model_family" in tree
        name, text = "theirs.json", json.dumps(tree)
        if not is_tuner and "config" not in tree and "LoRA_type" not in tree and "model_type" not in tree:
            name, text = "theirs.toml", "\n".join(f"{key} = {json.dumps(value)}" for key, value in tree.items())
        Path(name).write_text(text, encoding="utf-8")
        assert main.run(["convert", "config", name, "out=ours.yaml", "--all"]) == 0
        found = recipe_values.values(Path("ours.yaml")), said(capsys.readouterr().out)
        Path("ours.yaml").unlink()
        return found

    return run


@pytest.mark.parametrize(("given", "expected"), [
    (KOHYA, KOHYAS),
    (KOHYA | {"caption_prefix": "x", "caption_separator": ";"},
     KOHYAS | {"captions.prefix": "x ", "captions.tag_separator": ";"}),
    (KOHYA | {"LoRA_type": "Standard", "max_resolution": "512", "keep_tokens": "2"}, KOHYAS),
    (TUNER | {"caption_strategy": "instanceprompt"}, {"captions.text": "sks"}),
    (TUNER | {"caption_strategy": "textfile", "prepend_instance_prompt": True},
     {"captions.prefix": "sks ", "captions.lines": "drawn"}),
    (TUNER, {"captions.text": None, "captions_from": None}),
    (TOOLKIT, {"captions.prefix": "sks "}),
])  # fmt: skip
def test_settings_of_all_captions_count_where_no_data_set_is_here(convert, given, expected):
    values, _ = convert(given)
    assert {name: values.get(f"data.{name}") for name in expected} == expected


def test_captions_that_say_trigger_are_told(convert, tmp_path):
    (tmp_path / "cats").mkdir()
    for name, text in {"a": "[trigger] on a hill", "b": "sks", "c": "a [name]"}.items():
        (tmp_path / f"cats/{name}.jpg").write_bytes(b"")
        (tmp_path / f"cats/{name}.txt").write_text(text)
    values, lines = convert(TOOLKIT | {"datasets": [{"folder_path": "cats"}]})
    kind, text = lines["config.process.0.datasets.0.folder_path"]
    assert kind == "refused"
    assert "2 of its caption files say [name] or [trigger]" in text
    assert values["data.path"] == "cats"


@pytest.mark.parametrize("listed", [False, True])
def test_prompts_of_ai_toolkit_have_the_word_in_them_and_options_behind_them(convert, listed):
    texts = ["[trigger] runs --w 640 --ctrl_img x.png", "a [name] --w 640 --n ugly"]
    sample = {"samples": [{"prompt": text} for text in texts]} if listed else {"prompts": texts}
    values, lines = convert(TOOLKIT | {"sample": {"width": 512, **sample}})
    assert values["sampling.prompts"] == ["sks runs", "a sks"]
    assert values["sampling.width"] == 640
    said_of = lines["config.process.0.sample." + ("samples.0.prompt" if listed else "prompts")][1]
    assert "left out --ctrl_img, --n" in said_of


@pytest.mark.parametrize(("lines", "values", "left_out"), [
    (["a --n b --w abc", "c --n b --h 1e999"], {"prompts": ["a", "c"], "negative_prompt": "b"}, "--h, --w"),
    (["a --d 4 --l 7.5 --s 20", "c --d 4 --l 7.5 --s 20"],
     {"prompts": ["a", "c"], "seed": 4, "guidance_scale": 7.5, "num_inference_steps": 20}, ""),
    (["a -- b", "well--known --w", ""], {"prompts": ["a -- b", "well--known", ""]}, "--w"),
])  # fmt: skip
def test_options_behind_prompts(lines, values, left_out):
    found, why = peers.prompts(lines)
    assert {key.removeprefix("sampling."): value for key, value in found.items()} == values
    assert left_out in why
    assert bool(why) == bool(left_out)


def test_samples_of_onetrainer_that_are_off_are_left_out(convert):
    samples = [{"enabled": False, "prompt": "off", "seed": 1}, {"enabled": True, "prompt": "on", "seed": 4}]
    values, lines = convert(ONETRAINER | {"samples": samples})
    assert (values["sampling.prompts"], values["sampling.seed"]) == (["on"], 4)
    assert lines["samples.0.prompt"] == ("notice", "this sample is switched off")


@pytest.mark.parametrize(("given", "expected"), [
    (KOHYA | {"shuffle_caption": False, "caption_tag_dropout_rate": 0.2, "secondary_separator": ";;;"},
     {"shuffle_tags": False, "tag_dropout": 0.2, "keep_tags": 2, "tag_group": ";;;", "lines": "first"}),
    (KOHYA | {"enable_wildcard": True}, {"wildcards": True, "lines": "drawn", "tag_dropout": None}),
])  # fmt: skip
def test_tags_and_alternatives_of_sd_scripts(convert, given, expected):
    values, lines = convert(given)
    assert {name: values.get(f"data.captions.{name}") for name in expected} == expected
    assert not any(kind == "refused" and "caption" in key for key, (kind, _) in lines.items())


@pytest.mark.parametrize(("mode", "kept"), [("RANDOM", True), ("FULL", False)])
def test_onetrainers_tag_dropout_is_read_where_each_tag_is_drawn(convert, mode, kept):
    text = {"prompt_source": "sample", "tag_dropout_enable": True, "tag_dropout_mode": mode}
    text |= {"tag_dropout_probability": 0.3, "keep_tags_count": 1, "tag_delimiter": ","}
    values, lines = convert(ONETRAINER | {"concepts": [{"name": "cats", "path": "images/cats", "text": text}]})
    assert values.get("data.captions.tag_dropout") == (0.3 if kept else None)
    assert values.get("data.captions.keep_tags") == (1 if kept else None)
    assert (lines["concepts.0.text.tag_dropout_enable"][0] == "refused") is not kept
