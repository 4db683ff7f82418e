"""FLUX.2 klein's reference images: read as its pipeline reads them, in training, in sampling and on several devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flow_runs
import forked_runs
import numpy as np
import pytest
import reference_pictures
import several_devices
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from flow_runs import SEED, STEPS
from PIL import Image
from reference_pictures import picture
from safetensors.torch import load_file
from tiny_families import flux2 as tiny

from daguerre.cli import main
from daguerre.data.images import references
from daguerre.data.settings import SharedSettings
from daguerre.families.flux2 import Settings
from daguerre.models.parts.flux2_transformer import denoise
from daguerre.report import page
from daguerre.samplers.draw import initial_noise
from daguerre.types import REFERENCES

SIZES = [(70, 100), (96, 64)]
"""Heights and widths of two pictures; the first is cropped to 64 x 96."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("flux2") / "flux2")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    return reference_pictures.pictures(tmp_path_factory.mktemp("pictures"), SIZES)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Eight images, with none, one or two reference images of several sizes."""
    captions, counts = [f"image {n}" for n in range(8)], [n % 3 for n in range(8)]
    folder = tmp_path_factory.mktemp("images")
    return reference_pictures.samples(folder, captions, counts, lambda n, i: (32 + 16 * (n % 2), 48 + 16 * i))


def drawn(base: Path, out: Path, scale: float, *given: str) -> np.ndarray:
    text = [f"model.{name}={value}" for name, value in tiny.reading().items()]
    args = ["generate", str(base), "prompt=make it red", f"seed={SEED}", f"out={out}", f"guidance_scale={scale}"]
    assert main.run([*args, f"num_inference_steps={STEPS}", *text, *given]) == 0
    return np.asarray(Image.open(out / "000.png")).astype(int)


def theirs(base: Path, scale: float, given: list[Path], size: tuple[int, int]) -> np.ndarray:
    pipe: Any = Flux2KleinPipeline.from_pretrained(base)
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([SEED], (16, size[0] // 16, size[1] // 16))
    text = {"max_sequence_length": tiny.TOKENS, "text_encoder_out_layers": tiny.LAYERS}
    images = [Image.open(path).convert("RGB") for path in given]
    image = pipe(images, "make it red", latents=noise, num_inference_steps=STEPS, guidance_scale=scale, **text)
    return np.asarray(image.images[0]).astype(int)


@pytest.mark.parametrize(("scale", "count"), [pytest.param(1.0, 1, marks=pytest.mark.long), (4.0, 2)])
def test_images_are_those_of_the_pipeline_with_the_size_of_the_first_picture(scale, count, base, pictures, tmp_path):
    used = pictures[:count]
    given = f"reference=[{','.join(map(str, used))}]" if count > 1 else f"reference={used[0]}"
    found = drawn(base, tmp_path / "out", scale, given)
    assert found.shape == (64, 96, 3)
    assert np.abs(found - theirs(base, scale, used, (64, 96))).max() <= 2
    other = drawn(base, tmp_path / "none", scale, "height=64", "width=96")
    assert np.abs(found - other).max() > 2, "they are read"
    about = json.loads((tmp_path / "out" / "000.json").read_text())
    assert [name for name in REFERENCES if name in about] == [*REFERENCES[:count]]


@torch.no_grad()
def test_each_picture_has_the_place_in_time_that_the_pipeline_gives_it(base):
    transformer = Flux2Transformer2DModel.from_pretrained(base / "transformer").eval()
    generator, of = torch.Generator().manual_seed(0), Flux2KleinPipeline
    x, first, second = (torch.randn(2, 16, *size, generator=generator) for size in ((4, 4), (4, 6), (6, 4)))
    text, t = torch.randn(2, tiny.TOKENS, 96, generator=generator), torch.tensor([0.3, 0.7])
    ids = [of._prepare_latent_ids(x), of._prepare_image_ids([first[:1], second[:1]]).expand(2, -1, -1)]
    wanted = transformer(
        hidden_states=torch.cat([of._pack_latents(z) for z in (x, first, second)], 1),
        timestep=t,
        encoder_hidden_states=text,
        txt_ids=of._prepare_text_ids(text),
        img_ids=torch.cat(ids, 1),
        return_dict=False,
    )[0][:, :16]
    found = denoise(transformer, x, t, {"text": text, "reference": first, "reference_2": second})
    torch.testing.assert_close(of._pack_latents(found), wanted, rtol=1e-5, atol=1e-6)
    swapped = denoise(transformer, x, t, {"text": text, "reference": second, "reference_2": first})
    assert (found - swapped).abs().max() > 1e-3


@pytest.mark.parametrize(
    "size",
    [(1300, 900), (100, 90), *(pytest.param(each, marks=pytest.mark.long) for each in [(1024, 1024), (2000, 1500)])],
)
def test_a_picture_is_resized_and_cropped_as_the_pipeline_does(size, tmp_path):
    path = picture(tmp_path / "a.png", 1, size)
    processor, image = Flux2ImageProcessor(), Image.open(path)
    image = processor._resize_if_exceeds_area(image)
    width, height = (side // 16 * 16 for side in image.size)
    wanted = processor.preprocess(image, height=height, width=width, resize_mode="crop")[0]
    frames = references.frames({"reference": path.read_bytes()}, Settings.reference_rule, ("png",))
    found = references.cut({"reference": path.read_bytes()}, frames, SharedSettings())["reference"]
    assert found.shape == wanted.shape
    assert (found.float() / 127.5 - 1 - wanted).abs().max() <= 2 / 255


def test_what_cannot_be_read_is_refused_before_any_weight_is(base, pictures, tmp_path, capsys):
    narrow = picture(tmp_path / "narrow.png", 1, (1, 20000))
    for given, said in (
        (f"reference={tmp_path / 'nowhere.png'}", "cannot be read"),
        (f"reference={narrow}", "too narrow"),
        (f"reference=[{','.join([str(pictures[0])] * 11)}]", "at most 10"),
    ):
        assert main.run(["generate", str(base), "prompt=a", f"out={tmp_path / 'o'}", given]) == 2
        assert said in capsys.readouterr().err


def trained(place: Path, base: Path, images: Path, number: int, *given: str) -> Path:
    model = {"family": "flux2", "pretrained_model_name_or_path": str(base), "references": number, **tiny.reading()}
    place.mkdir()
    data = {"source": "folder", "path": str(images), "resolution": 64, "held_out_fraction": 0}
    return flow_runs.trained(place, model, {}, *given, data=data, batch=4)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.long  # of the quick tests, test_flux3_references.py drops all
def test_samples_without_any_are_text_to_image_to_the_bit(base, images, tmp_path):
    """So are those of which all are dropped."""
    plain = weights(trained(tmp_path / "plain", base, images, 0))
    dropped = weights(trained(tmp_path / "dropped", base, images, 2, "data.reference_dropout=1"))
    read = weights(trained(tmp_path / "read", base, images, 2))
    assert all(torch.equal(plain[name], dropped[name]) for name in plain)
    assert not all(torch.equal(plain[name], read[name]) for name in plain)


@pytest.mark.long
def test_cached_pictures_and_captions_teach_the_same(base, images, tmp_path):
    # Gradients that are zero but for rounding must not be magnified to whole steps.
    small = ["optimizer.learning_rate=1e-4", "optimizer.epsilon=1e-6"]
    plain = weights(trained(tmp_path / "plain", base, images, 2, *small))
    cache = [*small, f"cache.path={tmp_path / 'cache'}", "cache.dtype=float32"]
    for place in ("filled", "found"):
        cached = weights(trained(tmp_path / place, base, images, 2, *cache))
        for name, expected in plain.items():
            torch.testing.assert_close(cached[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_run_shows_its_reference_images_beside_the_result(base, images, tmp_path):
    run = trained(tmp_path / "run", base, images, 2, "sampling.num_images=3", "sampling.guidance_scale=4")
    (listing,) = (run / "samples").glob("step-*/samples.json")
    names = [sorted(one.get("control_files", {})) for one in json.loads(listing.read_text())]
    assert names == [[*REFERENCES[: n % 3]] for n in range(3)]
    page.write(run)
    report = (run / "report.html").read_text()
    assert "reference 2" in report, "each beside its image, by its name"


@pytest.mark.long
def test_several_devices_learn_what_one_learns_where_samples_have_other_numbers_of_pictures(base, images, tmp_path):
    recipe = {
        "run_name": "run",
        "model": {"family": "flux2", "pretrained_model_name_or_path": str(base), "references": 2, **tiny.reading()},
        "objective": {"name": "flow", "schedule": {"name": "linear_flow"}},
        "data": {"source": "folder", "path": str(images), "resolution": 64, "held_out_fraction": 0},
        "training": {"duration": "3 steps", "global_batch_size": 4, "device": "cpu", "mixed_precision": "no"},
        "optimizer": {"learning_rate": 1e-4, "epsilon": 1e-6},
        "logging": {"every": "1 steps", "tensorboard": False},
        "checkpoint": {"every": None, "export": False},
        "validation": {"every": None},
        "sampling": {"num_images": 0, "prompts": ["a"]},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    meshes = {"one": (1, 1, 1, 1), "data": (2, 2, 1, 1), "fsdp": (2, 1, 2, 1), "both": (4, 1, 2, 2)}
    plan = []
    for name, (size, *degrees) in meshes.items():
        axes = [f"mesh.ici_{axis}_parallelism={n}" for axis, n in zip(("data", "fsdp", "tensor"), degrees, strict=True)]
        plan.append(forked_runs.run(tmp_path, name, size, *axes, recipe=str(path)))
    assert several_devices.zeros(forked_runs.together(tmp_path, plan))
    losses = {}
    for name in meshes:
        lines = map(json.loads, (tmp_path / name / "metrics" / "metrics.jsonl").read_text().splitlines())
        losses[name] = [line["learning/loss"] for line in lines if "learning/loss" in line]
    assert len(losses["one"]) == 3
    for name in meshes:
        assert losses[name] == pytest.approx(losses["one"], rel=1e-5), name
