"""FLUX.3 klein's reference images: read as its pipeline reads them, one alone by a rule of its own; the parameters that
only they reach."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from flow_runs import SEED, STEPS
from PIL import Image
from tiny_families import flux3 as tiny

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


def picture(path: Path, seed: int, size: tuple[int, int]) -> Path:
    low = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(low).resize(size[::-1], Image.Resampling.BICUBIC).save(path)
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    return [picture(folder / f"{i}.png", i, size) for i, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Eight images, with none, one or two reference images of several sizes."""
    folder = tmp_path_factory.mktemp("images")
    for n in range(8):
        picture(folder / f"{n}.png", n, (64, 64))
        (folder / f"{n}.txt").write_text(f"image {n} " * (1 + 8 * (n % 2)))
        for i, name in enumerate(REFERENCES[: n % 3]):
            picture(folder / f"{n}.{name}.png", 10 * n + i, (70 + 16 * (n % 2), 48 + 16 * i))
    return folder


@pytest.mark.parametrize(("scale", "count", "size"), [(1.0, 1, (70, 100)), (3.5, 1, (70, 100)), (3.5, 2, (64, 96))])
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


@pytest.mark.parametrize("size", [(1300, 900), (1024, 1024), (3000, 2500), (100, 90), (12, 40), (5000, 300)])
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
