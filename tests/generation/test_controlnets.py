"""`daguerre generate control=... controlnets=...`: ControlNets on a model, each with its strength, as in diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drawing_pipelines
import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from tiny_drawings import documents, drawn, generate
from tiny_models import write_sd, write_sdxl

from daguerre import errors, plugins
from daguerre.conditions.condition import computed, drawing
from daguerre.families.stable_diffusion.controlnet_files import write
from daguerre.samplers.draw import initial_noise

# diffusers' schedulers hand a tensor to np.array, which numpy 2 warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

PIPELINES: dict[str, Any] = {"sd": StableDiffusionControlNetPipeline, "sdxl": StableDiffusionXLControlNetPipeline}
SEED, STEPS, SCALE, PX = 3, 4, 4.0, 16
GIVEN = ("prompt=a cat", f"seed={SEED}", f"num_inference_steps={STEPS}", f"guidance_scale={SCALE}", "sampler=ddim")
NAMES = ("one", "two")


def picture(path: Path, seed: int, size: tuple[int, int] = (PX, PX)) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def place(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A pipeline, two ControlNets of it that are not zero, and a picture for each."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    (write_sd if kind == "sd" else write_sdxl)(folder / "base")
    unet = UNet2DConditionModel.from_pretrained(folder / "base" / "unet", low_cpu_mem_usage=False)
    for number, name in enumerate(NAMES):
        torch.manual_seed(number)
        network = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32))
        with torch.no_grad():
            for p in network.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        (folder / name).mkdir()
        write(folder / name, network)
        picture(folder / f"{name}.png", number)
    return kind, folder


def command(folder: Path, *more: str) -> list[str]:
    return [str(folder / "base"), *GIVEN, "training.device=cpu", *more]


def ours(folder: Path, out: Path, *more: str) -> np.ndarray:
    assert generate(*command(folder, f"out={out}", *more)) == 0
    return drawn(out)[0].astype(int)


def theirs(kind: str, folder: Path, names: tuple[str, ...], **given: Any) -> np.ndarray:
    networks = [ControlNetModel.from_pretrained(folder / name, low_cpu_mem_usage=False) for name in names]
    pictures = [Image.open(folder / f"{name}.png") for name in names]
    alone = len(names) == 1
    own = networks[0] if alone else networks
    pipe = drawing_pipelines.opened(PIPELINES[kind], folder / "base", STEPS, controlnet=own)
    latents = initial_noise([SEED], (4, PX // 2, PX // 2))
    sizes = {"height": PX, "width": PX, "num_inference_steps": STEPS, "guidance_scale": SCALE}
    image = pipe("a cat", image=pictures[0] if alone else pictures, latents=latents, output_type="np", **sizes, **given)
    return (image.images[0] * 255).round().astype(int)


def places(folder: Path, strengths: dict[str, float], suffix: str = "") -> str:
    return f"controlnets={json.dumps({str(folder / name) + suffix: strength for name, strength in strengths.items()})}"


CASES: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "one": ({"one": 0.7}, {}),
    "guess mode": ({"one": 1.0}, {"guess_mode": True}),
    "some steps": ({"one": 1.0}, {"control_guidance_start": 0.25, "control_guidance_end": 0.75}),
    "two": ({"one": 0.5, "two": 1.5}, {}),
    "two, all of it": (
        {"one": 0.5, "two": 1.5},
        {"guess_mode": True, "control_guidance_start": [0.0, 0.3], "control_guidance_end": [0.5, 1.0]},
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.long] * (name != "two, all of it")) for name in CASES]
)
def test_images_are_those_of_diffusers(case, place, tmp_path):
    kind, folder = place
    strengths, given = CASES[case]
    pictures = [
        f"{name}={folder / f'{own}.png'}" for name, own in zip(("control", "control_2"), strengths, strict=False)
    ]
    options = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    found = ours(folder, tmp_path / "out", places(folder, strengths), *pictures, *options)
    scales = [*strengths.values()]
    scaled = {"controlnet_conditioning_scale": scales[0] if len(scales) == 1 else scales}
    expected = theirs(kind, folder, tuple(strengths), **scaled, **given)
    assert np.abs(found - expected).max() <= 2
    without = theirs(
        kind, folder, tuple(strengths), controlnet_conditioning_scale=0.0 if len(scales) == 1 else [0.0, 0.0]
    )
    assert np.abs(found - without).mean() > 1


@pytest.mark.long
def test_layouts_sizes_and_other_names_give_the_same_image(place, tmp_path):
    kind, folder = place
    if kind == "sdxl":
        pytest.skip("the same for every family")
    one = f"control={folder / 'one.png'}"
    found = ours(folder, tmp_path / "folder", places(folder, {"one": 0.7}), one)
    file = places(folder, {"one/controlnet.safetensors": 0.7})
    assert np.array_equal(ours(folder, tmp_path / "file", file, one), found)
    other = [f"controlnet_model_name_or_path={folder / 'one'}", "controlnet_conditioning_scale=0.7"]
    assert np.array_equal(ours(folder, tmp_path / "names", *other, f"controlnet_image={folder / 'one.png'}"), found)
    (document,) = documents(tmp_path / "folder")
    assert document["controlnets"][str(folder / "one")][0] == 0.7
    assert document["control"] == str(folder / "one.png")
    assert (document["controlnet_conditioning_scale"], document["guess_mode"]) == ([0.7], False)
    Image.open(folder / "one.png").resize((2 * PX, 2 * PX), Image.Resampling.NEAREST).save(tmp_path / "large.png")
    large = ours(
        folder,
        tmp_path / "large",
        places(folder, {"one": 0.7}),
        f"control={tmp_path / 'large.png'}",
        f"height={2 * PX}",
    )
    assert large.shape == (2 * PX, 2 * PX, 3), "the control image decides the other side"
    many = tmp_path / "many"
    many.mkdir()
    for number in range(2):
        picture(many / f"p{number}.png", number)
    assert generate(*command(folder, places(folder, {"one": 0.7}), f"control={many}", f"out={tmp_path / 'each'}")) == 0
    assert sorted(path.stem for path in (tmp_path / "each").glob("*.png")) == ["p0", "p1"]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "each" / "p0.png")), found)


def test_a_condition_of_a_photo_is_its_control_image(place, tmp_path):
    kind, folder = place
    if kind == "sdxl":
        pytest.skip("the same for every family")
    photo = picture(tmp_path / "photo.png", 7)
    settings = plugins.find("conditions", "canny").Settings(low=50)
    edges = computed(settings, np.asarray(Image.open(photo)), drawing(0, "control", (SEED, 0, 0)))
    Image.fromarray(edges).save(tmp_path / "edges.png")
    found = ours(folder, tmp_path / "edges", places(folder, {"one": 1.0}), f"control={tmp_path / 'edges.png'}")
    condition = ["condition={name: canny, low: 50}", f"control_from={photo}"]
    assert np.array_equal(ours(folder, tmp_path / "photo", places(folder, {"one": 1.0}), *condition), found)
    (document,) = documents(tmp_path / "photo")
    assert (document["control_from"], document["condition"]["name"]) == (str(photo), "canny")


REFUSED: dict[str, tuple[list[str], str]] = {
    "no control image": (["controlnets={FOLDER/one: 1}"], "reads a control image: give"),
    "no ControlNet": (["control=FOLDER/one.png"], "control is read by nothing in this model"),
    "one control image too many": (
        ["controlnets={FOLDER/one: 1}", "control=FOLDER/one.png", "control_2=FOLDER/two.png"],
        "control_2 is read by nothing in this model; it reads control",
    ),
    "another shape": (
        ["controlnets={FOLDER/one: 1}", "control=FOLDER/one.png", "height=16", "width=32"],
        "has another shape than what is generated",
    ),
    "a condition that is none": (
        ["controlnets={FOLDER/one: 1}", "control_from=FOLDER/one.png", "condition=depths"],
        "there is no 'depths' in conditions",
    ),
    "a photo without a condition": (
        ["controlnets={FOLDER/one: 1}", "control_from=FOLDER/one.png"],
        "say which, such as condition=canny",
    ),
    "a condition without a photo": (
        ["controlnets={FOLDER/one: 1}", "control=FOLDER/one.png", "condition=canny"],
        "condition has no effect: without control_from=PHOTO",
    ),
    "numbers for two": (
        ["controlnets={FOLDER/one: 1}", "control=FOLDER/one.png", "control_guidance_end=[0.5, 1]"],
        "control_guidance_end has 2 numbers and there are 1 ControlNets",
    ),
    "an end before the start": (
        [
            "controlnets={FOLDER/one: 1}",
            "control=FOLDER/one.png",
            "control_guidance_start=0.5",
            "control_guidance_end=0.2",
        ],
        "the start below the end",
    ),
    "a scale of nothing": (["guess_mode=true"], "guess_mode is for ControlNets, and this model has none"),
    "a scale twice": (
        ["controlnets={FOLDER/one: 1}", "control=FOLDER/one.png", "controlnet_conditioning_scale=0.5"],
        "gives each ControlNet its scale",
    ),
    "a strength that is none": (["controlnets={FOLDER/one: .nan}", "control=FOLDER/one.png"], "give a number"),
    "a strength below 0": (["controlnets={FOLDER/one: -0.5}", "control=FOLDER/one.png"], "is -0.5: give a number from"),
    "a base model": (["controlnets={FOLDER/base/unet: 1}", "control=FOLDER/one.png"], "a UNet, not a ControlNet"),
    "no picture": (["controlnets={FOLDER/one: 1}", "control=FOLDER/three.png"], "cannot be read"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_is_refused(name, place, tmp_path, capsys):
    kind, folder = place
    if kind == "sdxl":
        pytest.skip("the same for every family")
    given, message = REFUSED[name]
    options = [each.replace("FOLDER", str(folder)) for each in given]
    assert generate(*command(folder, f"out={tmp_path / 'out'}", *options)) == errors.REFUSED
    assert message in capsys.readouterr().err
