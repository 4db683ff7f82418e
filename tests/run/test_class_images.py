"""Class images: drawn by the model that training starts from, once, kept and counted; what is refused, and why."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_runs
from PIL import Image
from safetensors.torch import load_file
from tiny_models import write_sd

from daguerre import errors
from daguerre.assembly.parts import build
from daguerre.cli import main
from daguerre.config import config
from daguerre.errors import UserError
from daguerre.run import class_images

PROMPT = "a photo of a dog"
SHORT = [
    "data.resolution=16",
    "num_class_images=5",
    "sampling.num_inference_steps=2",
    "sampling.batch_size=2",
    "sampling.num_images=0",
    "training.duration=2 steps",
    "checkpoint.every=1 steps",
    "checkpoint.export=false",
    "loader.num_workers=0",
    "logging.tensorboard=false",
]


def image(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_sd(tmp_path_factory.mktemp("base") / "sd")


@pytest.fixture
def given(base, tmp_path):
    """Arguments for a run in `tmp_path` on four images without captions."""
    for i in range(4):
        image(tmp_path / "instance" / f"{i}.png", i)
    return [
        f"pretrained_model_name_or_path={base}",
        f"instance_data_dir={tmp_path / 'instance'}",
        f"class_data_dir={tmp_path / 'class'}",
        f"output_dir={tmp_path / 'out'}",
        *SHORT,
    ]


def draw(given, *more, stop=lambda: 0):
    loaded = config.load("sd15_dreambooth", [*given, *more]).config
    return class_images.generate_missing(loaded, build(loaded), stop)


def train(given, *more):
    return main.run(["train", "sd15_dreambooth", *given, *more])


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"))}


def test_what_is_missing_is_drawn_of_the_class_prompt_from_seeds_that_are_on_record(given, base, tmp_path):
    (said,) = draw(given)
    assert said.startswith(f"data.sources.class.generate: generated 5 images of '{PROMPT}' (seed 0) in ")
    assert list(contents(tmp_path / "class")) == [f"drawn-0000{i}.png" for i in range(5)]
    for i in range(5):
        about = json.loads((tmp_path / "class" / f"drawn-0000{i}.json").read_bytes())
        assert (about["prompt"], about["seed"], about["height"], about["width"]) == (PROMPT, i, 16, 16)
        assert about["base"].endswith("sd")
    assert draw(given) == []
    assert draw([*given, f"pretrained_model_name_or_path={os.path.relpath(base)}"]) == []
    drawn = contents(tmp_path / "class")
    (said,) = draw(given, "num_class_images=7")
    assert "generated 2 images" in said
    assert {name: content for name, content in contents(tmp_path / "class").items() if name in drawn} == drawn


def test_images_of_ones_own_count(given, tmp_path):
    for i in range(3):
        image(tmp_path / "class" / f"rex {i}.jpg", i)
    (said,) = draw(given)
    assert "generated 2 images" in said
    assert len(list((tmp_path / "class").glob("*.png"))) == 2


@pytest.mark.long  # of the quick tests, test_class_images_fill.py stops
def test_drawing_is_stopped_between_batches_and_goes_on_from_there(given, tmp_path):
    whole = tmp_path / "whole"
    draw([*given, f"class_data_dir={whole}"])
    asked = iter([0, 0, 143, 143])
    with pytest.raises(class_images.Stopped, match=r"class has 4 of 5; run the same command again") as error:
        draw(given, stop=lambda: next(asked))
    assert error.value.exit_code == errors.TERMINATED
    (tmp_path / "class" / "drawn-00001.json").unlink()  # as a kill between the two files leaves it
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "class").glob("*.png")}
    draw(given)
    assert contents(tmp_path / "class") == contents(whole)
    again = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "class").glob("*.png")}
    assert {name for name in before if again[name] != before[name]} <= {"drawn-00001.png"}


@pytest.mark.long
def test_a_run_draws_before_its_first_update_only(given, tmp_path, capsys):
    """By the base's weights; a run that goes on draws nothing, and misses images that are gone."""
    expected = tmp_path / "expected"
    draw([*given, f"class_data_dir={expected}"])
    assert train(given, "optimizer.learning_rate=0.1") == errors.DONE
    assert "generated 5 images" in capsys.readouterr().out
    assert contents(tmp_path / "class") == contents(expected)
    assert train(given, "optimizer.learning_rate=0.1", "training.duration=3 steps") == errors.DONE
    assert "class.generate: generat" not in capsys.readouterr().out
    (tmp_path / "class" / "drawn-00004.png").unlink()
    assert train(given, "optimizer.learning_rate=0.1", "training.duration=4 steps") == errors.REFUSED
    assert "the data set has changed since this run was started" in capsys.readouterr().err
    assert len(contents(tmp_path / "class")) == 4
    for name in ("step-00000002", "step-00000003"):
        weights = load_file(tmp_path / "out" / "sd15_dreambooth" / "checkpoints" / name / "model.safetensors")
        assert all(name.startswith("unet.") for name in weights)


@pytest.mark.long  # of the quick tests, drawing is stopped and goes on
def test_a_run_goes_on_as_if_it_had_not_been_stopped(given, tmp_path):
    weighed = ["prior_loss_weight=0.3", "checkpoint.every=4 steps"]
    for name, lengths in (("whole", [5]), ("parts", [2, 5])):
        for length in lengths:
            assert train(given, *weighed, f"run_name={name}", f"training.duration={length} steps") == errors.DONE
    states = [tmp_path / "out" / name / "checkpoints" / "step-00000005" for name in ("whole", "parts")]
    for file in ("model.safetensors", "optimizer.safetensors", "loading.json"):
        assert states[0].joinpath(file).read_bytes() == states[1].joinpath(file).read_bytes(), file


@pytest.mark.long  # of the quick tests, those of another init_from
def test_networks_from_elsewhere_draw_other_images(given, tmp_path):
    other = write_sd(tmp_path / "other", seed=1)
    draw(given, f"model.vae={other}")
    assert draw(given, f"model.vae={other}") == []
    for more, told in (
        ([], "vae '.*/other', now None"),
        ([f"model.vae={other / 'vae'}"], "vae '.*/other', now '.*/vae'"),
    ):
        with pytest.raises(UserError, match=rf"generated with other settings \({told}\)"):
            draw(given, *more)


@pytest.mark.long  # of the quick tests, networks from elsewhere draw
def test_a_run_that_starts_from_anothers_weights_draws_with_these(given, tmp_path):
    assert train(given, "optimizer.learning_rate=0.1", "ema.enabled=false") == errors.DONE
    begun = [f"init_from={tmp_path / 'out' / 'sd15_dreambooth'}", "run_name=second"]
    assert train(given, *begun, f"class_data_dir={tmp_path / 'later'}") == errors.DONE
    first, later = (contents(tmp_path / name) for name in ("class", "later"))
    assert first.keys() == later.keys()
    assert all(first[name] != later[name] for name in first)


@pytest.mark.long  # of the quick tests, those of another prompt
def test_images_of_other_lists_of_prompts_are_not_taken_for_these(given, capsys):
    """Shorter and longer lists, and others, are noticed."""
    prompts = "data.sources.class.generate.prompt=[{}]".format
    first = prompts("a red dog, a blue dog, a dog")
    assert "images of 'a red dog' and 2 more prompts into" in " ".join(draw(given, first)) + capsys.readouterr().out
    assert draw(given, first) == []
    for other, told in (
        ("a red dog, a blue dog", "prompt 'a dog', now 'a red dog'"),
        ("a red dog, a blue dog, a dog, a cat", "prompt 'a red dog', now 'a cat'"),
        ("a red dog, a cat, a dog", "prompt 'a blue dog', now 'a cat'"),
    ):
        with pytest.raises(UserError, match=rf"generated with other settings \({told}\)"):
            draw(given, prompts(other))


@pytest.mark.parametrize("prompt", ["[]", "['a dog', ' ']", " "])
def test_a_prompt_that_says_nothing_is_refused(given, prompt):
    with pytest.raises(config.ConfigError, match="a prompt is empty"):
        config.load("sd15_dreambooth", [*given, f"data.sources.class.generate.prompt={prompt}"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["class_prompt=a cat"], "prompt 'a photo of a dog', now 'a cat'"),
        pytest.param(["data.resolution=32"], "height 16, now 32, width 16, now 32", marks=pytest.mark.long),
        (["init_from=elsewhere"], "init_from None, now 'elsewhere'"),
    ],
)
def test_images_that_were_drawn_otherwise_are_not_taken_for_these(given, more, told):
    draw(given)
    with pytest.raises(
        UserError, match=rf"class were generated with other settings \({told}\)\. Choose another folder, delete this"
    ):
        draw(given, *more)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["model.unet=null"], r"class images cannot be generated: model\.unet starts from random weights"),
        (
            ["objective.schedule.beta_end=0.02"],
            r"differs from the one of the pretrained weights \(the pretrained network was",
        ),
    ],
)
def test_a_model_that_cannot_draw_yet_is_asked_for_nothing(given, tmp_path, more, told):
    with pytest.raises(UserError, match=told + r".*Put 5 images into .*class, or remove the setting"):
        draw(given, *more)
    assert not (tmp_path / "class").exists()


def test_other_sources_are_opened_before_minutes_are_spent_on_drawing(given, tmp_path):
    with pytest.raises(UserError, match="'nowhere' does not exist"):
        draw(given, "instance_data_dir=nowhere")
    assert not (tmp_path / "class").exists()


def test_a_dry_run_says_what_will_be_drawn_and_draws_nothing(given, tmp_path, capsys):
    assert train(given, "--dry-run") == errors.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert f"data.sources.class.generate: 5 images of '{PROMPT}' are generated into {tmp_path}/class before" in said
    assert not (tmp_path / "class").exists()
    draw(given)
    assert train(given, "--dry-run") == errors.DONE
    said = capsys.readouterr().out
    assert "folder: 9 samples of 2 sources" in said
    assert "are generated into" not in said


def test_tools_of_the_data_say_that_there_is_nothing_yet(given, capsys):
    of_data = [setting for setting in given if setting.startswith(("instance", "class", "num_class", "data."))]
    assert main.run(["data", "stats", "sd15_dreambooth", *of_data]) == errors.REFUSED
    assert "does not exist yet: `daguerre train` generates 5 images into it before it trains" in capsys.readouterr().err


@pytest.mark.long  # of the quick tests, test_class_images_fill.py draws and trains
def test_a_lone_folder_can_be_drawn_as_well(given, tmp_path, capsys):
    lone = ["data.source=folder", f"data.path={tmp_path / 'lone'}", "data.generate.count=3", "data.generate.seed=9"]
    lone += ["data.captions.text=a red cat", "data.held_out_fraction=0"]
    own = [g for g in given if "instance" not in g and "class" not in g]
    own += ["training.global_batch_size=2", "training.per_device_batch_size=2", "lr_scheduler.warmup=0 steps"]
    assert main.run(["train", "sd15", *own, *lone, "validation.every=null"]) == errors.DONE
    assert "data.generate: generated 3 images of 'a red cat' (seed 9)" in capsys.readouterr().out
    assert json.loads((tmp_path / "lone" / "drawn-00002.json").read_bytes())["seed"] == 11


def test_what_is_drawn_must_be_said(given):
    unsaid = ["data.source=folder", "data.path=x", "data.generate.count=3"]
    with pytest.raises(config.ConfigError, match=r"generate needs a prompt: set generate\.prompt, or captions\.text"):
        config.load("sd15", unsaid)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_while_it_draws_goes_on(given, tmp_path, number):
    command = [sys.executable, "-m", "daguerre", "train", "sd15_dreambooth", *given, "num_class_images=200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    tiny_runs.wait_for(tmp_path / "class" / "drawn-00006.json", 120)
    process.send_signal(number)
    said, _ = process.communicate()
    assert process.returncode == (errors.TERMINATED if number == signal.SIGTERM else -number)
    assert ("stopped while class images were generated" in said) == (number == signal.SIGTERM)
    there = {path.name: path.stat().st_mtime_ns for path in Path(tmp_path / "class").glob("drawn-*.png")}
    assert 6 < len(there) < 200
    time.sleep(0.01)
    draw(given, "num_class_images=200")
    now = {path.name: path.stat().st_mtime_ns for path in Path(tmp_path / "class").glob("drawn-*.png")}
    assert len(now) == 200
    assert sum(now[name] != moment for name, moment in there.items()) <= 1, "one can have been in the making"
