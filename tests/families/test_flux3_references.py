"""FLUX.3 klein's reference images: read as its pipeline reads them, one alone by a rule of its own; the parameters that
only they reach."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import forked_runs
import numpy as np
import pytest
import reference_pictures
import several_devices
import torch
from diffusers import Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from flow_runs import SEED, STEPS
from PIL import Image
from reference_pictures import picture
from safetensors.torch import load_file
from tiny_families import flux3 as tiny

from daguerre.checkpoint.store import Store
from daguerre.cli import main
from daguerre.data.images import references
from daguerre.data.settings import SharedSettings
from daguerre.families import flux3
from daguerre.families.flux3 import Settings, denoise
from daguerre.samplers.draw import initial_noise
from daguerre.types import REFERENCES

SIZES = [(70, 100), (96, 64)]
"""Heights and widths of two pictures: alone the first is padded to 80 x 112, of several it is cropped to 64 x 96."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("flux3") / "flux3")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    return reference_pictures.pictures(tmp_path_factory.mktemp("pictures"), SIZES)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Eight images, with none, one or two reference images of several sizes."""
    captions, counts = [f"image {n} " * (1 + 8 * (n % 2)) for n in range(8)], [n % 3 for n in range(8)]
    folder = tmp_path_factory.mktemp("images")
    return reference_pictures.samples(folder, captions, counts, lambda n, i: (70 + 16 * (n % 2), 48 + 16 * i))


@pytest.mark.parametrize(
    ("scale", "count", "size"),
    [
        (1.0, 1, (70, 100)),
        *(pytest.param(3.5, *more, marks=pytest.mark.long) for more in ((1, (70, 100)), (2, (64, 96)))),
    ],
)
def test_images_are_those_of_the_pipeline_in_the_size_of_the_first_picture(
    scale, count, size, base, pictures, tmp_path
):
    used = pictures[:count]
    text = [f"model.{name}={value}" for name, value in tiny.reading().items()]
    args = ["generate", str(base), "prompt=make it red", f"seed={SEED}", f"num_inference_steps={STEPS}", *text]
    given = f"reference=[{','.join(map(str, used))}]"
    assert main.run([*args, f"guidance_scale={scale}", given, f"out={tmp_path / 'out'}"]) == 0
    found = np.asarray(Image.open(tmp_path / "out" / "000.png")).astype(int)
    canvas = [-(-side // 16) * 16 for side in size]
    noise = initial_noise([SEED], (16, canvas[0] // 16, canvas[1] // 16))
    shown = [Image.open(path).convert("RGB") for path in used]
    expected = tiny.drawn(tiny.opened(base), "make it red", noise, scale, image=shown, num_inference_steps=STEPS)
    assert found.shape == expected.shape == (*size, 3)
    assert np.abs(found - expected).max() <= 2
    about = json.loads((tmp_path / "out" / "000.json").read_text())
    assert (about["height"], about["width"]) == size
    assert [name for name in REFERENCES if name in about] == [*REFERENCES[:count]]
    whole = ["height=80", "width=112", f"out={tmp_path / 'none'}", f"guidance_scale={scale}"]
    assert main.run([*args, *whole, given]) == 0
    made = np.asarray(Image.open(tmp_path / "none" / "000.png"))
    assert made.shape == (80, 112, 3), "a size that is given is made as it is"


@torch.no_grad()
def test_each_picture_has_the_place_that_the_pipeline_gives_it(base):
    transformer = Flux3Transformer2DModel.from_pretrained(base / "transformer").eval()
    generator = torch.Generator().manual_seed(0)
    x, first, second = (torch.randn(2, 16, *size, generator=generator) for size in ((4, 4), (4, 6), (6, 4)))
    text, t = torch.randn(2, 80, 64, generator=generator), torch.tensor([0.3, 0.7])
    txt_ids = torch.zeros(80, 4)
    txt_ids[:, 3] = torch.arange(80)
    ids = [_prepare_image_ids(*z.shape[2:], 0.5, -n) for n, z in enumerate((x, first, second))]
    wanted = transformer(
        hidden_states=x.flatten(2).mT,
        timestep=t,
        encoder_hidden_states=text,
        img_ids=ids[0],
        txt_ids=txt_ids,
        image_cond_hidden_states=torch.cat([z.flatten(2).mT for z in (first, second)], 1),
        image_cond_ids=torch.cat(ids[1:]),
        return_dict=False,
    )[0]
    found = denoise(transformer, x, t, {"text": text, "reference": first, "reference_2": second})
    torch.testing.assert_close(found.flatten(2).mT, wanted, rtol=1e-5, atol=1e-6)
    swapped = denoise(transformer, x, t, {"text": text, "reference": second, "reference_2": first})
    assert (found - swapped).abs().max() > 1e-3


@torch.no_grad()
def test_without_any_it_is_text_to_image_to_the_bit(base):
    """The library, called without reference images, and the family, which calls what is for them with no tokens."""
    plain = Flux3Transformer2DModel.from_pretrained(base / "transformer").eval()
    generator = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, 16, 4, 4, generator=generator), torch.randn(2, 80, 64, generator=generator)
    t, txt_ids = torch.tensor([0.3, 0.7]), torch.zeros(80, 4)
    txt_ids[:, 3] = torch.arange(80)
    wanted = plain(x.flatten(2).mT, text, t, _prepare_image_ids(4, 4, 0.5), txt_ids, return_dict=False)[0]
    settings = Settings.model_validate({"pretrained_model_name_or_path": str(base), **tiny.reading()})
    net = flux3.load(settings, 0).net.eval()
    assert torch.equal(net(x, t, {"text": text}).flatten(2).mT, wanted)


@pytest.mark.parametrize(
    "size",
    [
        (100, 90),
        (12, 40),
        *(pytest.param(each, marks=pytest.mark.long) for each in [(1024, 1024), (1300, 900), (3000, 2500)]),
        (5000, 300),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_picture_is_resized_padded_and_cropped_as_the_pipeline_does(count, size, tmp_path):
    if count == 2 and min(size) < 16:
        pytest.skip("nothing is left of it in the pipeline")
    path = picture(tmp_path / "a.png", 1, size)
    mode = "fill" if count == 1 else "crop"
    wanted = Flux3ImageProcessor().preprocess(Image.open(path), resize_mode=mode)[0]
    given = {name: path.read_bytes() for name in REFERENCES[:count]}
    frames = references.frames(given, Settings.reference_rule, ("png",))
    found = references.cut(given, frames, SharedSettings())["reference"]
    assert found.shape == wanted.shape[1:]
    assert (found.float() / 127.5 - 1 - wanted[0]).abs().max() <= 2 / 255


def recipe(place: Path, base: Path, images: Path, **training: Any) -> dict[str, Any]:
    """Updates of two samples each, with decay, so that a step without a gradient would show."""
    model = {"family": "flux3", "pretrained_model_name_or_path": str(base), "references": 2, **tiny.reading()}
    return {
        "run_name": "run",
        "output_dir": str(place),
        "model": model,
        "objective": {"name": "flow", "schedule": {"name": "linear_flow", "shift": 6.93}},
        "data": {"source": "folder", "path": str(images), "resolution": 64, "held_out_fraction": 0},
        "training": {"global_batch_size": 2, "device": "cpu", "mixed_precision": "no", **training},
        "optimizer": {"learning_rate": 1e-4, "epsilon": 1e-6, "weight_decay": 0.1},
        "lr_scheduler": {"warmup": "0 steps"},
        "logging": {"every": "1 steps", "tensorboard": False},
        "checkpoint": {"every": "1 steps", "export": False},
        "validation": {"every": None},
        "sampling": {"num_images": 0, "prompts": ["a"]},
    }


def trained(place: Path, base: Path, images: Path, *given: str, steps: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a run's last checkpoint, by file."""
    place.mkdir(exist_ok=True)
    (place / "recipe.yaml").write_text(json.dumps(recipe(place, base, images)))
    assert main.run(["train", str(place / "recipe.yaml"), f"training.duration={steps} steps", *given]) == 0
    return tensors(place / "run")


def tensors(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    store = Store(run / "checkpoints")
    newest = store.root / store.names()[-1]
    held = [name for name in ("model", "optimizer") if name in store.groups(newest)]
    return dict(store.load(newest, held).tensors)


def counts(found: dict[str, dict[str, torch.Tensor]]) -> Counter[int]:
    """Parameters by the number of updates that each has seen."""
    own = found["optimizer"]
    numbers = {name.partition(".")[0] for name in own} - {"group"}
    return Counter(int(own.get(f"{number}.step", torch.zeros(()))) for number in numbers)


def test_parameters_that_only_references_reach_take_no_step_without_any(base, images, tmp_path):
    """Moments, counts and weights: where no sample has any, and where those of some updates have none, also after a
    resume."""
    plain = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    idle = sum("image_cond" in name for name in plain)
    dropped = trained(tmp_path / "dropped", base, images, "data.reference_dropout=1")
    for name, weight in plain.items():
        assert torch.equal(dropped["model"][f"transformer.{name}"], weight) == ("image_cond" in name), name
    assert counts(dropped) == {0: idle, 3: len(plain) - idle}
    some = trained(tmp_path / "some", base, images, "data.reference_dropout=0.7", steps=6)
    (fewer,) = {*counts(some)} - {6}
    assert counts(some) == {fewer: idle, 6: len(plain) - idle}
    assert 0 < fewer < 6, "choose another share"
    trained(tmp_path / "again", base, images, "data.reference_dropout=0.7", steps=3)
    again = trained(tmp_path / "again", base, images, "data.reference_dropout=0.7", steps=6)
    for file, expected in some.items():
        assert all(torch.equal(again[file][name], value) for name, value in expected.items()), file


@pytest.mark.long
@pytest.mark.parametrize(
    ("weights", "computes"), [("float32", "no"), pytest.param("bfloat16", "bf16", marks=pytest.mark.long)]
)
def test_where_all_that_is_trained_reads_references_an_update_without_any_moves_nothing(
    weights, computes, base, images, tmp_path
):
    given = ["adapter.name=lora", "adapter.rank=2", "adapter.targets=[mode_blocks.image_cond.*]"]
    given += [f"training.weights_dtype={weights}", f"training.mixed_precision={computes}"]
    start = trained(tmp_path / "none", base, images, "data.reference_dropout=1", *given, steps=1)["model"]
    kept = trained(tmp_path / "none", base, images, "data.reference_dropout=1", *given, steps=3)["model"]
    assert all(torch.equal(start[name], value) for name, value in kept.items())
    some = trained(tmp_path / "some", base, images, "data.reference_dropout=0.7", *given, steps=6)["model"]
    assert any(not torch.equal(start[name], value) for name, value in some.items())


@pytest.mark.long
def test_accumulation_and_every_mesh_learn_the_same_where_some_updates_have_no_references(base, images, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe(tmp_path, base, images, duration="6 steps") | {"output_dir": None}))
    given = ["data.reference_dropout=0.7"]
    meshes = {"one": (1, 1, 1, 1), "data": (2, 2, 1, 1), "fsdp": (2, 1, 2, 1), "tensor": (2, 1, 1, 2)}
    meshes |= {"both": (4, 1, 2, 2)}
    plan = []
    for name, (size, *degrees) in meshes.items():
        axes = [f"mesh.ici_{axis}_parallelism={n}" for axis, n in zip(("data", "fsdp", "tensor"), degrees, strict=True)]
        plan.append(forked_runs.run(tmp_path, name, size, *given, *axes, recipe=str(path)))
    plan.append(forked_runs.run(tmp_path, "single", 1, *given, "training.per_device_batch_size=1", recipe=str(path)))
    assert several_devices.zeros(forked_runs.together(tmp_path, plan))
    one = tensors(tmp_path / "one")
    seen = counts(one)
    assert len(seen) == 2
    for name in (*meshes, "single"):
        other = tensors(tmp_path / name)
        assert counts(other) == seen, name
        for key, expected in one["model"].items():
            torch.testing.assert_close(other["model"][key], expected, rtol=1e-3, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.long
def test_every_mesh_takes_updates_in_which_nothing_has_a_gradient(base, images, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe(tmp_path, base, images, duration="6 steps") | {"output_dir": None}))
    given = ["data.reference_dropout=0.7", "adapter.name=lora", "adapter.rank=2"]
    given += ["adapter.targets=[mode_blocks.image_cond.*]"]
    plan = [forked_runs.run(tmp_path, "one", 1, *given, recipe=str(path))]
    for axis in ("data", "fsdp", "tensor"):
        plan.append(forked_runs.run(tmp_path, axis, 2, *given, f"mesh.ici_{axis}_parallelism=2", recipe=str(path)))
    assert several_devices.zeros(forked_runs.together(tmp_path, plan))
    one = tensors(tmp_path / "one")
    for name in ("data", "fsdp", "tensor"):
        other = tensors(tmp_path / name)
        assert counts(other) == counts(one), name
        for key, expected in one["model"].items():
            torch.testing.assert_close(other["model"][key], expected, rtol=1e-3, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.long
def test_a_loss_that_reads_the_empty_caption_learns_the_same_on_every_mesh(base, images, tmp_path):
    """Half of the captions are as short as the empty one, so that ranks meet other lengths at once."""
    path = tmp_path / "recipe.yaml"
    lcm = {"name": "lcm", "diffusion": {"name": "flow", "schedule": {"name": "linear_flow"}}}
    whole = recipe(tmp_path, base, images, duration="4 steps") | {"output_dir": None, "objective": lcm}
    path.write_text(json.dumps(whole))
    given = ["adapter.name=lora", "adapter.rank=2", "sampling.sampler=lcm", "sampling.guidance_scale=1"]
    plan = [forked_runs.run(tmp_path, "one", 1, *given, recipe=str(path))]
    for axis in ("data", "fsdp", "tensor"):
        plan.append(forked_runs.run(tmp_path, axis, 2, *given, f"mesh.ici_{axis}_parallelism=2", recipe=str(path)))
    assert several_devices.zeros(forked_runs.together(tmp_path, plan))
    one = tensors(tmp_path / "one")["model"]
    for name in ("data", "fsdp", "tensor"):
        other = tensors(tmp_path / name)["model"]
        for key, expected in one.items():
            torch.testing.assert_close(other[key], expected, rtol=1e-3, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.long
def test_cached_pictures_and_captions_teach_the_same(base, images, tmp_path):
    plain = trained(tmp_path / "plain", base, images)["model"]
    cache = [f"cache.path={tmp_path / 'cache'}", "cache.dtype=float32"]
    for place in ("filled", "found"):
        cached = trained(tmp_path / place, base, images, *cache)["model"]
        for name, expected in plain.items():
            torch.testing.assert_close(cached[name], expected, rtol=1e-4, atol=1e-6, msg=name)
