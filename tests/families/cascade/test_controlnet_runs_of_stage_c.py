"""Runs of a ControlNet of Stage C from end to end: checkpoints, going on, other meshes, files, samples, generating."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import forked_runs
import numpy as np
import pytest
import torch
from adapter_runs import MESHES, Place, assert_equal
from PIL import Image
from safetensors.torch import load_file
from tiny_cascade import write_decoder

from daguerre import errors
from daguerre.cli import main

RECIPE = """
run_name: controlnet
model: {family: KIND}
objective: {name: eps, schedule: {name: cosine}, weighting: {name: p2}, noise: {offset: 0.1}}
adapters: {outline: {name: controlnet, reads: grey, conditioning_dropout: 0.2, condition: {name: canny, side_px: 32}}}
data: {source: folder, resolution: 64, random_flip: true, held_out_fraction: 0.2}
training: {duration: "4 steps", global_batch_size: 6}
optimizer: {learning_rate: 1e-3, epsilon: 1e-5}
lr_scheduler: {warmup: "0 steps"}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: "2 steps", keep: 9}
sampling: {num_images: 2, num_inference_steps: 2}
validation: {every: "2 steps", num_samples: 2, num_levels: 2}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    """With the run `whole`, which was never stopped."""
    made = Place(tmp_path_factory.mktemp("cascade"), "cascade_c", RECIPE)
    assert made.train("whole") == errors.DONE
    return made


def file(place: Place, name: str) -> Path:
    return place.folder / name / "adapter" / "controlnet.safetensors"


@pytest.mark.long
def test_a_checkpoint_holds_the_controlnet_alone_and_stabilitys_file_is_written(place):
    model, averaged = place.tensors("whole"), place.tensors("whole", "ema")
    assert all(name.startswith("controlnet.") for name in model)
    written = load_file(file(place, "whole"))
    assert {name.partition(".")[0] for name in written} == {"backbone", "projections"}
    assert model.keys() == {f"controlnet.{name}" for name in written}
    assert_equal({name: written[name.removeprefix("controlnet.")] for name in averaged}, averaged)
    first = place.tensors("whole", step=2)
    still = {name for name in model if torch.equal(first[name], model[name])}
    assert still == {name for name in model if "running_" in name or "num_batches" in name}
    assert not (place.folder / "whole" / "pipeline").exists()
    assert "adapter.blocks" not in (place.folder / "whole" / "adapter" / "README.md").read_text()


def test_samples_show_control_images_in_their_size_and_images_in_theirs(place):
    """64 px are two cells, of which 80 px are generated."""
    folder = place.folder / "whole" / "samples" / "step-00000004"
    listed = json.loads((folder / "samples.json").read_text())
    assert [(one["height"], one["width"]) for one in listed] == [(80, 80)] * 2
    with Image.open(folder / "000.control.png") as control, Image.open(folder / "000.png") as image:
        assert (control.size, image.size) == ((64, 64), (80, 80))
    page = (place.folder / "whole" / "report.html").read_text()
    assert page.index("strength 0<") < page.index("strength 0.5<") < page.index("strength 1<")


@pytest.mark.long  # of the quick tests, run/test_lora_runs.py stops and kills
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


@pytest.mark.long  # of the quick tests, run/test_controlnet_runs.py starts from a run
def test_a_run_is_where_another_one_starts(place):
    """Also as a file; what the file tells is not asked for again."""
    for name, start in (("further", place.folder / "whole"), ("further_still", file(place, "whole"))):
        one = f"adapters.outline.controlnet_model_name_or_path={start}"
        assert place.train(name, one, "training.duration=1 steps", "checkpoint.every=1 steps") == errors.DONE
        found, before = place.tensors(name, step=1), place.tensors("whole", "ema")
        assert all((found[key] - before[key]).abs().max() < 2e-3 for key in before)


@pytest.mark.long
def test_other_meshes_learn_what_one_process_does(place):
    codes = forked_runs.together(place.folder, [place.on(name, mesh) for name, mesh in MESHES.items()])
    logs = [(place.folder / f"{name}.seen.log-0").read_text() for name in MESHES]
    assert all(code == 0 for run in codes for code in run), logs
    expected, losses = place.tensors("whole", "ema"), place.numbers("whole", "learning/loss")
    for name in MESHES:
        assert place.numbers(name, "learning/loss") == pytest.approx(losses, rel=1e-5)
        for key, value in place.tensors(name, "ema").items():
            assert (value - expected[key]).norm() <= 1e-3 * expected[key].norm() + 1e-6, (name, key)
        assert load_file(file(place, name)).keys() == load_file(file(place, "whole")).keys()


class TestGenerate:
    def images(self, tmp_path: Path, *given: str, name: str = "a") -> np.ndarray:
        assert main.run(["generate", *given, f"out={tmp_path / name}"]) == errors.DONE
        return np.asarray(Image.open(tmp_path / name / "000.png")).astype(int)

    def test_the_same_image_as_the_sample_of_the_run(self, place, tmp_path):
        """Of the control image, and of the photo of which the run has made it."""
        run = place.folder / "whole"
        folder = run / "samples" / "step-00000004"
        listed = json.loads((folder / "samples.json").read_text())[0]
        given = [str(run), f"prompt={listed['prompt']}", f"seed={listed['seed']}", "height=80", "width=80"]
        sample = np.asarray(Image.open(folder / "000.png")).astype(int)
        with_control = self.images(tmp_path, *given, f"control={folder / '000.control.png'}")
        assert np.abs(with_control - sample).max() <= 1
        number = int(listed["prompt"].split()[-1])
        photo = place.folder / "images" / f"{number:02}.png"
        from_photo = self.images(tmp_path, *given, f"control_from={photo}", name="b")
        assert from_photo.shape == sample.shape

    @pytest.mark.long  # of the quick tests, generation/test_controlnets.py
    def test_strengths_steps_and_files_of_others(self, place, tmp_path):
        """A file of Stability's is put beside a base model; the metadata say which."""
        recorded = Path(__file__).parent / "controlnet_grey.safetensors"
        given = [str(place.folder / "whole"), "prompt=x", "height=80", "width=80", "num_inference_steps=4"]
        given += [f"control_from={place.folder / 'images' / '00.png'}", *self.stages(tmp_path)]
        strong = "controlnet_conditioning_scale=100"
        usual = self.images(tmp_path, *given, strong)
        off = self.images(tmp_path, *given, "controlnet_conditioning_scale=0", name="b")
        late = self.images(tmp_path, *given, strong, "control_guidance_start=0.5", name="c")
        added = f"controlnets={{{recorded}: 0.7}}"
        two = self.images(tmp_path, *given, added, f"control_2={self.control(place)}", name="d")
        assert len({image.tobytes() for image in (usual, off, late, two)}) == 4
        plain = [one for one in given if not one.startswith("control_from")]
        base = self.images(tmp_path, *plain, "base=true", name="e")
        assert np.abs(base - off).max() <= 1
        document = json.loads((tmp_path / "d" / "000.json").read_text())
        assert document["controlnets"][str(recorded)][0] == 0.7
        assert document["controlnet_conditioning_scale"] == [1.0, 0.7]

    def stages(self, tmp_path: Path) -> list[str]:
        """Settings of images that are decoded by a tiny Stage B and A."""
        decoder = tmp_path / "decoder"
        decoder if decoder.exists() else write_decoder(decoder)
        return ["model.decode.name=stages", f"model.decoder={decoder}", f"model.vqgan={decoder}"]

    def control(self, place: Place) -> Path:
        return place.folder / "whole" / "samples" / "step-00000004" / "000.control.png"

    @pytest.mark.long  # of the quick tests, test_stages.py
    def test_with_stages_an_image_and_an_image_prompt(self, place, tmp_path):
        photo = place.folder / "images" / "00.png"
        given = [str(place.folder / "whole"), "prompt=x", "height=80", "width=80", f"control_from={photo}"]
        given += self.stages(tmp_path)
        found = [
            self.images(tmp_path, *given, *more, name=str(number))
            for number, more in enumerate(([], [f"image={photo}", "strength=0.5"], [f"image_prompt={photo}"]))
        ]
        assert len({image.tobytes() for image in found}) == 3


def test_settings_of_the_other_kind_of_controlnet_are_refused(place, capsys):
    assert place.train("bad", "adapters.outline.size=small") == errors.REFUSED
    assert "have no such setting (they have blocks, bottleneck, reads, latent_factor)" in capsys.readouterr().err
    assert place.train("bad", "adapters.outline.blocks=[0, 99]") == errors.REFUSED
    assert "4 residual blocks, 0 to 3, and no number 99" in capsys.readouterr().err
