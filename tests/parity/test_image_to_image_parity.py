"""`daguerre generate image=... mask=... control=...` makes what diffusers' image-to-image and inpainting pipelines make
with ControlNets too: <= 2/255.

Both get the same noise: ours, of the image's seed, handed out where diffusers draws the latent's and the autoencoder's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    UNet2DConditionModel,
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
    ("sd", False, False): StableDiffusionImg2ImgPipeline,
    ("sd", True, False): StableDiffusionInpaintPipeline,
    ("sd", False, True): StableDiffusionControlNetImg2ImgPipeline,
    ("sd", True, True): StableDiffusionControlNetInpaintPipeline,
    ("sdxl", False, False): StableDiffusionXLImg2ImgPipeline,
    ("sdxl", True, False): StableDiffusionXLInpaintPipeline,
    ("sdxl", False, True): StableDiffusionXLControlNetImg2ImgPipeline,
    ("sdxl", True, True): StableDiffusionXLControlNetInpaintPipeline,
}
"""By family, with a mask, with a ControlNet."""
WEIGHT, END = 0.7, 0.5
"""The ControlNet's strength, and the share of the steps at which it ends."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, each with a ControlNet, a photo, a control image, and a mask along the cells of the latent."""
    place = tmp_path_factory.mktemp("image_to_image")
    write_sd(place / "sd", version=2)
    write_sdxl(place / "sdxl")
    for family in ("sd", "sdxl"):
        unet = UNet2DConditionModel.from_pretrained(place / family / "unet", low_cpu_mem_usage=False)
        torch.manual_seed(1)
        network = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32))
        with torch.no_grad():
            for p in network.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        network.save_pretrained(place / f"{family}-controlnet")
    for name, seed in (("photo", 0), ("control", 1)):
        rows = np.random.default_rng(seed).integers(0, 256, (4, 3, 3), dtype=np.uint8)
        Image.fromarray(rows).resize((WIDTH_PX, HEIGHT_PX), Image.Resampling.BICUBIC).save(place / f"{name}.png")
    mask = np.zeros((HEIGHT_PX, WIDTH_PX), np.uint8)
    mask[6:24, 4:16] = 255
    Image.fromarray(mask).save(place / "mask.png")
    return place


def theirs(place: Path, case: Case, monkeypatch: Any) -> np.ndarray:
    """[H, W, 3] of diffusers' pipeline."""
    kind, config = SCHEDULERS[case.sampler]
    more: dict[str, Any] = {}
    call = {"mask_image": Image.open(place / "mask.png")} if case.masked else {}
    if case.masked or case.controlled:
        call |= {"height": HEIGHT_PX, "width": WIDTH_PX}
    if case.controlled:
        more = {"controlnet": ControlNetModel.from_pretrained(place / f"{case.family}-controlnet")}
        call |= {"control_image": Image.open(place / "control.png"), "control_guidance_end": END}
        call |= {"controlnet_conditioning_scale": WEIGHT}
    pipe: Any = PIPELINES[case.family, case.masked, case.controlled].from_pretrained(
        place / case.family, local_files_only=True, low_cpu_mem_usage=False, **more
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
    found = pipe(
        "a large red circle",
        image=Image.open(place / "photo.png"),
        strength=case.strength,
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        output_type="np",
        **call,
    ).images
    return (found[0] * 255).round().astype(int)


class Case(NamedTuple):
    """An image that both make."""

    family: str
    sampler: str
    strength: float
    masked: bool
    controlled: bool = False


CASES = [
    Case(family, sampler, 0.6, masked)
    for family in ("sd", "sdxl")
    for sampler in SCHEDULERS
    for masked in (False, True)
]
CASES += [
    Case("sd", "euler", 1.0, False),
    Case("sdxl", "euler", 1.0, True),
    Case("sd", "dpmpp_2m", 1.0, True),
    Case("sdxl", "heun", 0.2, True),
]
CONTROLLED = [
    Case("sd", "euler", 0.7, False, True),
    Case("sd", "unipc", 1.0, True, True),
    Case("sdxl", "dpmpp_2m", 0.7, False, True),
    Case("sdxl", "euler", 0.6, True, True),
]
QUICK = [CASES[-3], CONTROLLED[0]]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in QUICK else [pytest.mark.long], id="-".join(map(str, case)))
        for case in CASES + CONTROLLED
    ],
)
def test_images_are_those_of_diffusers_pipelines(place, tmp_path, monkeypatch, case):
    given = [f"sampler={case.sampler}", f"num_inference_steps={STEPS}", "guidance_scale=4", f"seed={SEED}"]
    given += [f"mask={place / 'mask.png'}", "keep_unmasked=false"] if case.masked else []
    given += [f"image={place / 'photo.png'}", f"strength={case.strength}", "training.device=cpu"]
    given += [f"height={HEIGHT_PX}", f"width={WIDTH_PX}"]  # more pixels than the model's own images have
    alone = [place / case.family, "prompt=a large red circle", *given]
    control = [f"control={place / 'control.png'}", f"control_guidance_end={END}"]
    control += [f"controlnets={{{place / case.family}-controlnet: {WEIGHT}}}"]
    assert generate(*alone, *(control if case.controlled else []), f"out={tmp_path / 'out'}") == 0
    with monkeypatch.context() as patched:
        expected = theirs(place, case, patched)
    ours = drawn(tmp_path / "out")[0]
    difference = int(np.abs(ours - expected).max())
    print(case, difference)
    assert ours.shape == (HEIGHT_PX, WIDTH_PX, 3)
    assert difference <= 2
    photo = np.asarray(Image.open(place / "photo.png")).astype(int)
    assert np.abs(ours - photo).mean() > 5
    (document,) = documents(tmp_path / "out")
    assert document["strength"] == case.strength
    if case.controlled:
        assert generate(*alone, f"out={tmp_path / 'without'}") == 0
        assert np.abs(ours - drawn(tmp_path / "without")[0]).mean() > 1
