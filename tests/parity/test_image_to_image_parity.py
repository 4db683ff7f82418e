"""`daguerre generate image=... mask=...` makes what diffusers' image-to-image and inpainting pipelines make: <= 2/255.

Both get the same noise: ours, of the image's seed, handed out where diffusers draws the latent's and the autoencoder's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
)
from PIL import Image
from tiny_drawings import documents, drawn, generate
from tiny_models import VAE_FACTOR, write_sd, write_sdxl

from daguerre import keys
from daguerre.samplers.draw import initial_noise

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

SEED = 3
STEPS = 9
HEIGHT_PX, WIDTH_PX = 32, 24
SHAPE = (4, HEIGHT_PX // VAE_FACTOR, WIDTH_PX // VAE_FACTOR)
SCHEDULERS: dict[str, Any] = {
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {}),
    "heun": (diffusers.HeunDiscreteScheduler, {}),
    "unipc": (diffusers.UniPCMultistepScheduler, {}),
}
PIPELINES = {
    ("sd", False): StableDiffusionImg2ImgPipeline,
    ("sd", True): StableDiffusionInpaintPipeline,
    ("sdxl", False): StableDiffusionXLImg2ImgPipeline,
    ("sdxl", True): StableDiffusionXLInpaintPipeline,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a photo and a mask whose edges are those of cells of the latent."""
    place = tmp_path_factory.mktemp("image_to_image")
    write_sd(place / "sd", version=2)
    write_sdxl(place / "sdxl")
    rows = np.random.default_rng(0).integers(0, 256, (4, 3, 3), dtype=np.uint8)
    Image.fromarray(rows).resize((WIDTH_PX, HEIGHT_PX), Image.Resampling.BICUBIC).save(place / "photo.png")
    mask = np.zeros((HEIGHT_PX, WIDTH_PX), np.uint8)
    mask[6:24, 4:16] = 255
    Image.fromarray(mask).save(place / "mask.png")
    return place


def theirs(place: Path, family: str, sampler: str, strength: float, masked: bool, monkeypatch: Any) -> np.ndarray:
    """[H, W, 3] of diffusers' pipeline."""
    kind, config = SCHEDULERS[sampler]
    pipe: Any = PIPELINES[family, masked].from_pretrained(
        place / family, local_files_only=True, low_cpu_mem_usage=False
    )
    pipe.scheduler = kind.from_config(pipe.scheduler.config, timestep_spacing="trailing", **config)
    pipe.set_progress_bar_config(disable=True)
    posterior = torch.from_numpy(keys.normals(SEED, "vae", 0, count=int(np.prod(SHAPE))).reshape(1, *SHAPE))

    def latent_noise(shape: Any, **_: Any) -> torch.Tensor:
        assert tuple(shape) == (1, *SHAPE)
        return initial_noise([SEED], SHAPE)

    def posterior_noise(shape: Any, **_: Any) -> torch.Tensor:
        assert tuple(shape) == (1, *SHAPE)
        return posterior

    monkeypatch.setattr(f"{type(pipe).__module__}.randn_tensor", latent_noise)
    monkeypatch.setattr("diffusers.models.autoencoders.vae.randn_tensor", posterior_noise)
    call = {"mask_image": Image.open(place / "mask.png"), "height": HEIGHT_PX, "width": WIDTH_PX} if masked else {}
    found = pipe(
        "a large red circle",
        image=Image.open(place / "photo.png"),
        strength=strength,
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        output_type="np",
        **call,
    ).images
    return (found[0] * 255).round().astype(int)


CASES = [
    (family, sampler, 0.6, masked) for family in ("sd", "sdxl") for sampler in SCHEDULERS for masked in (False, True)
]
CASES += [
    ("sd", "euler", 1.0, False),
    ("sdxl", "euler", 1.0, True),
    ("sd", "dpmpp_2m", 1.0, True),
    ("sdxl", "heun", 0.2, True),
]


@pytest.mark.parametrize(
    ("family", "sampler", "strength", "masked"),
    [pytest.param(*case, marks=[] if case in CASES[:2] + CASES[-3:-2] else [pytest.mark.long]) for case in CASES],
)
def test_images_are_those_of_diffusers_pipelines(place, tmp_path, monkeypatch, family, sampler, strength, masked):
    given = [f"sampler={sampler}", f"num_inference_steps={STEPS}", "guidance_scale=4", f"seed={SEED}"]
    given += [f"mask={place / 'mask.png'}", "keep_unmasked=false"] if masked else []
    given += [f"image={place / 'photo.png'}", f"strength={strength}", f"out={tmp_path / 'out'}", "training.device=cpu"]
    assert generate(place / family, "prompt=a large red circle", *given) == 0
    with monkeypatch.context() as patched:
        expected = theirs(place, family, sampler, strength, masked, patched)
    ours = drawn(tmp_path / "out")[0]
    difference = int(np.abs(ours - expected).max())
    print(family, sampler, strength, masked, difference)
    assert ours.shape == (HEIGHT_PX, WIDTH_PX, 3)
    assert difference <= 2
    photo = np.asarray(Image.open(place / "photo.png")).astype(int)
    assert np.abs(ours - photo).mean() > 5
    (document,) = documents(tmp_path / "out")
    assert document["strength"] == strength
