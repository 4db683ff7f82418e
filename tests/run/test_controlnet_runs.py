"""Runs with `adapter.name=controlnet` from end to end: what a checkpoint holds, going on, other meshes, the samples."""

from __future__ import annotations

import json
import shutil

import forked_runs
import numpy as np
import pytest
import tiny_feature_networks
import torch
from adapter_runs import MESHES, Place, assert_equal
from diffusers import ControlNetModel
from PIL import Image
from safetensors.torch import load_file

from daguerre import errors
from daguerre.cli import main

RECIPE = """
run_name: controlnet
model: {family: KIND}
objective: {name: eps}
adapters: {outline: {name: controlnet, conditioning_dropout: 0.2}}
data: {source: folder, resolution: 16, random_flip: true, held_out_fraction: 0.2}
training: {duration: "4 steps", global_batch_size: 6}
optimizer: {learning_rate: 1e-3, epsilon: 1e-5}
lr_scheduler: {warmup: "0 steps"}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 2, num_inference_steps: 2}
validation: {every: "2 steps", num_samples: 2, num_levels: 2}
"""


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def place(request, tmp_path_factory):
    """With the run `whole`, which was never stopped."""
    made = Place(tmp_path_factory.mktemp(request.param), request.param, RECIPE, controls=True)
    assert made.train("whole") == errors.DONE
    return made


def test_a_checkpoint_holds_the_controlnet_alone_and_it_is_exported(place):
    model, averaged = place.tensors("whole"), place.tensors("whole", "ema")
    assert all(name.startswith("controlnet.") for name in model)
    assert {t.dtype for t in model.values()} == {torch.float32}
    first = place.tensors("whole", step=2)
    assert not any(torch.equal(first[name], model[name]) for name in model)
    network = ControlNetModel.from_pretrained(place.folder / "whole" / "adapter", low_cpu_mem_usage=False)
    assert_equal({f"controlnet.{name}": value for name, value in network.state_dict().items()}, averaged)
    assert not (place.folder / "whole" / "pipeline").exists()
    assert len(place.numbers("whole", "validation/loss")) == 2


def test_samples_are_of_held_out_pictures(place):
    folder = place.folder / "whole" / "samples" / "step-00000004"
    listed = json.loads((folder / "samples.json").read_text())
    assert len(listed) == 2
    assert len({one["prompt"] for one in listed}) == 2


def test_the_page_shows_control_images_beside_samples_and_several_strengths(place, tmp_path):
    """At 0 the images are the base's, at 1 the newest samples."""
    run = place.folder / "whole"
    samples, strengths = run / "samples" / "step-00000004", run / "samples" / "strengths"
    listed = json.loads((samples / "samples.json").read_text())[0]
    assert listed["control_files"] == {"control": "000.control.png"}
    number = int(listed["prompt"].split()[-1])
    with Image.open(place.folder / "images" / f"{number:02}.control.png") as image:
        control = np.asarray(image.crop((0, 2, 16, 18)))  # the frame of training: the middle
    assert np.array_equal(np.asarray(Image.open(samples / "000.control.png"))[:, :, :3], control)
    images = {path.parent.name: np.asarray(Image.open(path)) for path in strengths.glob("*/000.png")}
    assert images.keys() == {"0", "0.5", "1"}
    assert np.array_equal(images["1"], np.asarray(Image.open(samples / "000.png")))
    given = ["base=true", f"prompt={listed['prompt']}", f"seed={listed['seed']}", "height=16", "width=16"]
    assert main.run(["generate", str(run), *given, f"out={tmp_path / 'base'}"]) == errors.DONE
    base = np.asarray(Image.open(tmp_path / "base" / "000.png"))
    assert np.abs(images["0"].astype(int) - base).max() <= 1
    page = (run / "report.html").read_text()
    assert page.count("<figcaption>control</figcaption>") == 2 * len(json.loads((samples / "samples.json").read_text()))
    assert page.index("strength 0<") < page.index("strength 0.5<") < page.index("strength 1<")


@pytest.mark.long  # of the quick tests, test_lora_runs.py stops and kills
def test_stopped_and_killed_runs_end_equal_to_the_bit(place):
    assert place.train("short", "training.duration=2 steps") == errors.DONE
    assert place.train("short", "training.duration=4 steps") == errors.DONE
    shutil.copytree(place.folder / "whole", place.folder / "killed")  # as a kill behind the first save leaves it
    shutil.rmtree(place.folder / "killed/checkpoints/step-00000004")
    (place.folder / "killed/status.json").unlink()
    assert place.train("killed") == errors.DONE
    for name in ("short", "killed"):
        for group in ("model", "ema", "optimizer"):
            assert_equal(place.tensors(name, group), place.tensors("whole", group))
        assert place.numbers(name, "learning/loss") == place.numbers("whole", "learning/loss")


@pytest.mark.long
def test_killed_at_random_moments_it_ends_equal_to_the_bit(place):
    place.assert_kills_change_nothing()


@pytest.mark.long  # of the quick tests, test_lora_runs.py starts from another run
def test_a_run_is_where_another_one_starts(place):
    one = f"adapters.outline.controlnet_model_name_or_path={place.folder / 'whole'}"
    assert place.train("further", one, "training.duration=1 steps", "checkpoint.every=1 steps") == errors.DONE
    found, before = place.tensors("further", step=1), place.tensors("whole", "ema")
    assert all((found[name] - before[name]).abs().max() < 2e-3 for name in before)


@pytest.mark.long
def test_other_meshes_learn_what_one_process_does(place):
    codes = forked_runs.together(place.folder, [place.on(name, mesh) for name, mesh in MESHES.items()])
    logs = [(place.folder / f"{name}.seen.log-0").read_text() for name in MESHES]
    assert all(code == 0 for run in codes for code in run), logs
    expected, losses = place.tensors("whole", "ema"), place.numbers("whole", "learning/loss")
    for name in MESHES:
        assert place.numbers(name, "learning/loss") == pytest.approx(losses, rel=1e-5)
        found = place.tensors(name, "ema")
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert (value - expected[key]).norm() <= 1e-3 * expected[key].norm() + 1e-6, (name, key)
        assert load_file(place.folder / name / "adapter" / "controlnet.safetensors").keys()


def test_evaluate_says_that_it_has_no_control_images(place, capsys):
    (place.folder / "prompts.txt").write_text("a dog\n")
    network = tiny_feature_networks.clip(place.folder / "clip")
    given = [f"prompts_file={place.folder / 'prompts.txt'}", "metrics=[clip_score]", f"networks.clip={network}"]
    assert main.run(["evaluate", str(place.folder / "whole"), *given]) == errors.REFUSED
    said = "reads control with the prompt, and `daguerre evaluate RUN` generates from prompts alone"
    assert said in capsys.readouterr().err


def test_generate_reads_control_images(place, tmp_path, capsys):
    """The same image as the run's sample of this picture; a photo needs a condition; it works from an image, too."""
    run, images = place.folder / "whole", place.folder / "images"
    listed = json.loads((run / "samples" / "step-00000004" / "samples.json").read_text())
    number = int(listed[0]["prompt"].split()[-1])
    one = [f"prompt={listed[0]['prompt']}", f"control={images / f'{number:02}.control.png'}", "height=16", "width=16"]
    assert main.run(["generate", str(run), *one, f"out={tmp_path / 'a'}"]) == errors.REFUSED
    assert "has another shape" in capsys.readouterr().err
    with Image.open(images / f"{number:02}.control.png") as image:
        image.crop((0, 2, 16, 18)).save(tmp_path / "cut.png")  # the frame of training: the middle
    one[1] = f"control={tmp_path / 'cut.png'}"
    assert main.run(["generate", str(run), *one, "seed=0", f"out={tmp_path / 'a'}"]) == errors.DONE
    sample = Image.open(run / "samples" / "step-00000004" / "000.png")
    assert np.abs(np.asarray(Image.open(tmp_path / "a" / "000.png")).astype(int) - np.asarray(sample)).max() <= 1
    photo = ["prompt=x", f"control_from={images / '00.png'}"]
    assert main.run(["generate", str(run), *photo]) == errors.REFUSED
    assert "has no condition that computes a control image" in capsys.readouterr().err
    again = [f"image={images / '01.png'}", "strength=0.7", "control_guidance_end=0.5", f"out={tmp_path / 'b'}"]
    assert main.run(["generate", str(run), *photo, "condition=canny", *again]) == errors.DONE
    document = json.loads((tmp_path / "b" / "000.json").read_text())
    assert (document["condition"]["name"], document["control_guidance_end"], document["strength"]) == (
        "canny",
        [0.5],
        0.7,
    )


def test_convert_export_writes_the_controlnet_and_no_whole_model(place, capsys):
    run, out = str(place.folder / "whole"), place.folder / "raw"
    assert main.run(["convert", "export", run, "format=adapters", f"out={out}", "weights=raw"]) == errors.DONE
    network = ControlNetModel.from_pretrained(out, low_cpu_mem_usage=False)
    assert_equal({f"controlnet.{n}": value for n, value in network.state_dict().items()}, place.tensors("whole"))
    assert main.run(["convert", "export", run, "format=single_file", f"out={out}.safetensors"]) == errors.REFUSED
    assert "use format=adapters" in capsys.readouterr().err
