"""`daguerre generate` on a run folder made by hand: what is drawn, what is written beside it, what is refused."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import tiny_drawings
import torch
from PIL import Image
from tiny_drawings import documents, drawn, generate, weights

from daguerre.assembly import parts
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.generation import generate as generation_generate
from daguerre.samplers.draw import initial_noise
from daguerre.types import Prompt

PROMPT = "a small green star: on a white background"


@pytest.fixture(scope="module")
def recipe(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drawings.write_recipe(tmp_path_factory.mktemp("recipe"), tiny_sd)


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    return tiny_drawings.write_run(recipe)


def draw(run: Path, out: Path, *given: str) -> np.ndarray:
    assert main.run(["generate", str(run), f"prompt={PROMPT}", f"out={out}", *given]) == 0
    return drawn(out)


@pytest.mark.long
def test_what_only_serves_training_is_left_out(run, tmp_path, monkeypatch):
    """A run that was compiled on a GPU, with kernels of its own, draws on a machine that has neither."""
    wanted = draw(run, tmp_path / "wanted")
    shutil.copytree(run, tmp_path / "there")
    recorded = configs.load(str(run)).config
    training = {"compile": "blocks", "kernels": "triton", "gradient_checkpointing": True}
    there = recorded.model_copy(update={"training": recorded.training.model_copy(update=training)})
    (tmp_path / "there" / "config.yaml").write_text(configs.dump(there))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert np.array_equal(draw(tmp_path / "there", tmp_path / "found"), wanted)


def test_images_and_how_they_were_made(run, tmp_path, capsys):
    assert draw(run, tmp_path / "out", "num_images=3", "seed=7").shape == (3, 64, 64, 3)
    files = [f"{number}.{suffix}" for number in ("000", "001", "002") for suffix in ("json", "png")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*files, "contact-sheet.html", "request.json"]
    listing = documents(tmp_path / "out")
    assert [entry["seed"] for entry in listing] == [7, 8, 9]
    expected = {
        "file": "001.png",
        "prompt": PROMPT,
        "negative_prompt": "",
        "sampler": "ddim",
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "guidance_rescale": 0.0,
        "height": 64,
        "width": 64,
        "precision": "fp32",
        "checkpoint": "step-00000002",
        "step": 2,
        "weights": "ema",
        "run": str(run),
        "initial_noise_sha256": sha256(initial_noise([8], (4, 32, 32)).numpy().tobytes()).hexdigest(),
    }
    assert expected.items() <= listing[1].items()
    assert "code_version" in listing[1]
    assert "step-00000002" in capsys.readouterr().out


def test_an_image_depends_on_its_seed_alone(run, tmp_path):
    """Noise equal to the bit, pixels within 1/255, whatever the batch size and the place in the list."""
    small = ("height=32", "width=32")
    together = draw(run, tmp_path / "a", "num_images=4", "seed=7", *small)
    pairs = draw(run, tmp_path / "b", "num_images=4", "seed=7", "batch_size=2", *small)
    later = draw(run, tmp_path / "c", "num_images=2", "seed=9", *small)
    assert np.abs(together - pairs).max() <= 1
    assert np.abs(together[2:] - later).max() <= 1
    digests = [{e["seed"]: e["initial_noise_sha256"] for e in documents(tmp_path / name)} for name in "abc"]
    assert digests[0] == digests[1]
    assert digests[2].items() <= digests[0].items()
    assert len(set(digests[0].values())) == 4
    assert np.abs(together[0] - together[1]).mean() > 5


@pytest.mark.long
def test_the_newest_averaged_weights_are_used(run, recipe, tmp_path):
    config = configs.load(str(recipe), ["sampling.num_images=1"]).config
    built = parts.build(config)
    built.net.load_state_dict(weights(-0.02, built))
    built.net.eval()
    prompt, scale = Prompt(PROMPT, config.sampling.negative_prompt), config.sampling.guidance_scale
    asked = [generation_generate.ImageRequest(0, prompt, 7, (64, 64), scale)]
    expected = [image.pixels_HWC for image in generation_generate.generate(built, config.sampling, asked)]
    assert np.array_equal(draw(run, tmp_path / "a", "seed=7"), np.stack(expected))
    older = draw(run, tmp_path / "b", "seed=7", "resume_from_checkpoint=step-00000001")
    assert not np.array_equal(older, np.stack(expected))


@pytest.mark.long  # of the quick tests, samplers/
def test_a_shift_of_the_levels_that_are_visited(run, tmp_path, capsys):
    plain, same, other = (draw(run, tmp_path / f"{i}", *own) for i, own in enumerate(([], ["shift=1"], ["shift=2"])))
    assert np.array_equal(plain, same)
    assert not np.array_equal(plain, other)
    assert [document.get("shift") for i in range(3) for document in documents(tmp_path / f"{i}")] == [None, 1, 2]
    assert main.run(["generate", str(run), f"prompt={PROMPT}", f"out={tmp_path / '2'}"]) != 0
    assert "shift" in capsys.readouterr().err


@pytest.mark.long
def test_a_recipe_stands_for_its_run(run, recipe, tmp_path):
    by_folder = draw(run, tmp_path / "a")
    assert np.array_equal(by_folder, draw(recipe, tmp_path / "b"))
    assert np.array_equal(by_folder, draw(recipe, tmp_path / "c", f"output_dir={run.parent}", "--run_name", "tiny"))


def test_the_same_command_finds_its_images_and_another_never_overwrites_them(run, tmp_path, capsys):
    home = run / "generated"
    shutil.rmtree(home, ignore_errors=True)
    for seed in (0, 0, 1):
        assert generate(run, f"prompt={PROMPT}", f"seed={seed}") == 0
    slug = "a-small-green-star-on-a-white-background"
    assert {path.name for path in home.iterdir()} == {slug, f"{slug}-2"}
    assert "1 of 1 images already exist and are complete: kept" in capsys.readouterr().out

    draw(run, tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert generate(run, f"prompt={PROMPT}", f"out={tmp_path / 'out'}", "seed=5", "sampler=euler") == 2
    said = capsys.readouterr().err
    assert "seed: 0 -> 5" in said
    assert 'sampler: "ddim" -> "euler"' in said
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    assert generate(run, f"prompt={PROMPT}", "-o", tmp_path / "full") == 2
    assert "never mixed with other files" in capsys.readouterr().err


@pytest.mark.long
def test_the_raw_weights_of_a_checkpoint(run, tmp_path):
    averaged, raw = draw(run, tmp_path / "a"), draw(run, tmp_path / "b", "weights=raw")
    assert np.array_equal(averaged, draw(run, tmp_path / "c", "weights=ema"))
    assert not np.array_equal(averaged, raw)
    assert documents(tmp_path / "b")[0]["weights"] == "raw"


def test_what_is_not_finite_is_no_image(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generation_generate, "draw", lambda *given, **named: torch.full((1, 4, 16, 16), torch.nan))
    assert main.run(["generate", str(run), "prompt=a", "num_images=1", f"out={tmp_path / 'out'}", "seed=3"]) == 2
    assert "image 0 (seed 3) has NaN or infinity in place of a picture" in capsys.readouterr().err
    assert not [*(tmp_path / "out").glob("*.png")]


def test_a_size_of_its_own(run, tmp_path):
    assert draw(run, tmp_path / "a", "height=32", "width=48").shape == (1, 32, 48, 3)
    assert draw(run, tmp_path / "b", "resolution=32").shape == (1, 32, 32, 3)
    assert documents(tmp_path / "a")[0]["width"] == 48


def test_guidance_of_nought_and_of_one_are_none(run, tmp_path):
    one = draw(run, tmp_path / "a", "guidance_scale=1")
    assert np.array_equal(one, draw(run, tmp_path / "b", "guidance_scale=0"))
    assert not np.array_equal(one, draw(run, tmp_path / "c", "guidance_scale=1.5"))


@pytest.mark.parametrize(("verb", "own"), [("evaluate", "metrics"), ("compare", "strengths"), ("generate", "prompt")])
def test_each_verb_names_the_settings_that_it_takes(run, verb, own, capsys):
    assert main.run([verb, str(run), "validation.num_samples=4", *["prompt=a"] * (verb == "generate")]) == 2
    said = capsys.readouterr().err
    assert f"validation.num_samples: fixed when {run} was trained" in said
    assert f"`{verb}` accepts" in said
    assert own in said.partition("accepts ")[2].split(", ")


@pytest.mark.parametrize(("format", "suffix"), [pytest.param("jpeg", "jpg", marks=pytest.mark.long), ("webp", "webp")])
def test_other_formats(run, tmp_path, format, suffix):
    draw(run, tmp_path / "png")
    assert generate(run, f"prompt={PROMPT}", f"format={format}", "quality=98", f"out={tmp_path / 'o'}") == 0
    with Image.open(tmp_path / "png" / "000.png") as exact, Image.open(tmp_path / "o" / f"000.{suffix}") as opened:
        assert opened.format == format.upper()
        grey, expected = (np.asarray(image.convert("L")).astype(int) for image in (opened, exact))
        assert np.abs(grey - expected).mean() < 3


def test_names_of_other_trainers(run, tmp_path, capsys):
    """What MaxDiffusion's training command says does not stop drawing; what it means for images is done."""
    plain = draw(run, tmp_path / "a")
    given = ["per_device_batch_size=2", "activations_dtype=float32", "learning_rate=1e-5", "max_train_steps=9"]
    assert np.array_equal(plain, draw(run, tmp_path / "b", *given, "snr_gamma=5", "precision=HIGHEST"))
    said = capsys.readouterr().out
    for name in ("learning_rate", "max_train_steps", "snr_gamma"):
        assert said.count(f"{name} only affects training") == 1


def test_the_negative_prompt_counts(run, tmp_path):
    plain, dark = draw(run, tmp_path / "a"), draw(run, tmp_path / "b", "negative_prompt=dark")
    assert not np.array_equal(plain, dark)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no prompt given"),
        (["prompt=a", "prompts_file=b"], "choose one"),
        (["prompts_file=missing.txt"], "cannot be read"),
        (["prompt=a", "objective.name=x0"], "fixed when"),
        (["prompt=a", "optimizer.learning_rate=1"], "no effect on images"),
        (["prompt=a", "num_images=0"], "nothing to generate"),
        (["prompt=a", "sampler=dim"], "ddim"),
        (["prompt=a", "guidance=3"], "no such setting"),
        (["prompt=a", "cfg=3"], "sampling.guidance_scale is the scale of guidance"),
        (["prompt=a", "seed=99999999999999999999"], "a whole number from 0 to"),
        (["prompt=a", "strength=0.5"], "acts on requests that have image=FILE"),
        (["prompt=a", "resume_from_checkpoint=step-00000009"], "it has: step-00000001, step-00000002"),
        (["prompt=a", "run_name=other"], "would have no effect"),
        (["promt=a"], "did you mean prompt?"),
        (["prompt=a", "lora=style.safetensors"], "use='{style.safetensors: 1}' adds a LoRA"),
        (["prompt=a", "shards=1/2"], "did you mean shard?"),
        (["prompt=a", "out=s3://bucket/images"], "a local folder"),
        (["prompt=a", f"out={__file__}"], "is a file, and images go into a folder"),
        (["prompt=a", f"out={__file__}/images"], "is a file, and images go into a folder"),
        (["prompt=a", "quality=50"], "PNG is lossless"),
        (["prompt=a", "shard_samples=5"], "only with format=webdataset"),
        (["prompt=a", "height=33"], "33"),
        (["prompt=a", "guidance_scale=0.5"], "0 and 1 are no guidance"),
        (["prompt=a", "weights=best"], "raw"),
        (["prompt=a", "shard=0/2"], "counted from 1"),
        (["prompt=a", "batch_size=0"], "batch_size"),
        (["prompt=a", "base=true"], "model.unet starts from random weights"),
    ],
)
def test_what_cannot_be_done_is_refused(run, capsys, given, said):
    assert main.run(["generate", str(run), *given]) == 2
    assert said in capsys.readouterr().err


def test_places_without_a_run_are_refused(recipe, tmp_path, capsys):
    assert main.run(["generate", str(recipe), "prompt=a", "run_name=none"]) == 2
    said = capsys.readouterr().err
    assert "daguerre train" in said
    assert "base=true" in said
    assert main.run(["generate", str(tmp_path), "prompt=a"]) == 2
    assert "neither a run folder" in capsys.readouterr().err
    assert main.run(["generate"]) == 2
    assert "no run given" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_says_so(run, tmp_path, capsys):
    young = RunFolder(tmp_path / "young")
    young.path.mkdir()
    young.config.write_text((run / "config.yaml").read_text())
    assert main.run(["generate", str(young.path), "prompt=a"]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / "checkpoints" / "step-00000002" / "ema.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    draw(copy, tmp_path / "out")
    assert documents(tmp_path / "out")[0]["step"] == 1
    assert "ema.safetensors" in capsys.readouterr().out
