"""Autoencoders of other classes than Stable Diffusion's: latents and images as diffusers' own pipelines make them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from diffusers import (
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    Flux2KleinPipeline,
    QwenImageImg2ImgPipeline,
)
from diffusers.image_processor import VaeImageProcessor

from daguerre.errors import UserError
from daguerre.families import sd
from daguerre.models import encoders
from daguerre.models.components import ComponentLoader
from daguerre.models.parts import vae
from daguerre.models.parts.vae import VAE

KEYS = np.array([[1, 0, 0], [2, 0, 0]], dtype=np.int64)
MODE = {"sample_posterior": False}


def flux2() -> Any:
    net = AutoencoderKLFlux2(
        block_out_channels=(16, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=8, norm_num_groups=8,
        sample_size=32, mid_block_add_attention=False,
    )  # fmt: skip
    net.bn.running_mean.copy_(torch.linspace(-0.2, 0.2, 32))
    net.bn.running_var.copy_(torch.linspace(0.5, 2.0, 32))
    return net


def qwen() -> Any:
    return AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True]
    )


@pytest.fixture(scope="module", params=[flux2, qwen], ids=["flux2", "qwen"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param.__name__)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        request.param().save_pretrained(path / "vae")
    return path


def load(folder: Path, library: str | None = None, **values: Any) -> VAE:
    place = str(folder / "vae")
    settings = sd.Settings(pretrained_model_name_or_path="quickstart", vae=place, unet=tiny_models.TINY_UNET, **values)
    return vae.load(ComponentLoader(settings, 0), library or str(_config(folder)["_class_name"]))


def _config(folder: Path) -> dict[str, Any]:
    return dict(AutoencoderKLFlux2.load_config(folder / "vae"))


def pixels() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 16, 24), dtype=np.uint8))


def as_pipelines_encode(net: Any) -> torch.Tensor:
    """Latents of `pixels` by the pipelines that read images."""
    scaled = pixels().float() / 127.5 - 1
    if isinstance(net, AutoencoderKLFlux2):
        pipe = Flux2KleinPipeline(transformer=None, vae=net, scheduler=None, text_encoder=None, tokenizer=None)
        return pipe._encode_vae_image(scaled, None)
    net.encode, draws = partial(_mode, type(net).encode, net), net.encode  # the pipeline draws from the posterior
    pipe = QwenImageImg2ImgPipeline(transformer=None, vae=net, scheduler=None, text_encoder=None, tokenizer=None)
    found = pipe._encode_vae_image(scaled[:, :, None], torch.Generator())
    net.encode = draws
    return found[:, :, 0]


def _mode(encode: Any, net: Any, x: torch.Tensor) -> Any:
    return SimpleNamespace(latents=encode(net, x).latent_dist.mode())


def as_pipelines_decode(net: Any, latents: torch.Tensor) -> torch.Tensor:
    """The lines of FLUX.2's and Qwen-Image's pipelines between the last step and the image."""
    if isinstance(net, AutoencoderKLFlux2):
        mean = net.bn.running_mean.view(1, -1, 1, 1)
        std = torch.sqrt(net.bn.running_var.view(1, -1, 1, 1) + net.config.batch_norm_eps)
        return net.decode(Flux2KleinPipeline._unpatchify_latents(latents * std + mean), return_dict=False)[0]
    mean, std = (torch.tensor(net.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    return net.decode(latents[:, :, None] / (1.0 / std) + mean, return_dict=False)[0][:, :, 0]


@torch.no_grad()
def test_latents_are_those_of_the_pipeline(folder: Path):
    made = load(folder, **MODE)
    found = made.latents(made.encode(pixels()), {})
    assert found.shape[1:] == made.latent_shape((3, 16, 24)) == (made.channels, 4, 6)
    torch.testing.assert_close(found, as_pipelines_encode(made.net), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_images_are_those_of_the_pipeline(folder: Path):
    made = load(folder, **MODE)
    latents = torch.randn(2, *made.latent_shape((3, 16, 24)), generator=torch.Generator().manual_seed(0))
    expected = VaeImageProcessor().postprocess(as_pipelines_decode(made.net, latents), output_type="np") * 255
    assert np.abs(made.decode(tiny_models.latents(latents)).numpy().astype(int) - expected.round()).max() <= 1


@torch.no_grad()
def test_a_draw_has_the_posteriors_deviation(folder: Path):
    """In latents: the noise times exp(logvar / 2) of the network, divided by what the latents are divided by."""
    made, mode = load(folder), load(folder, **MODE)
    noise = made.random_inputs(5, KEYS, (3, 16, 24))
    moved = made.latents(made.encode(pixels()), noise) - mode.latents(mode.encode(pixels()), {})
    scaled = pixels().float() / 127.5 - 1
    if isinstance(made.net, AutoencoderKLFlux2):
        posterior = made.net.encode(scaled).latent_dist
        std = torch.sqrt(made.net.bn.running_var.view(1, -1, 1, 1) + made.net.config.batch_norm_eps)
        expected = Flux2KleinPipeline._patchify_latents(posterior.std) / std
    else:
        posterior = made.net.encode(scaled[:, :, None]).latent_dist
        expected = posterior.std[:, :, 0] / torch.tensor(made.net.config.latents_std).view(1, -1, 1, 1)
    torch.testing.assert_close(moved, expected * noise["posterior"], rtol=1e-4, atol=1e-5)


def test_sides_that_do_not_divide_are_refused(folder: Path):
    with pytest.raises(UserError, match="multiples of 4"):
        load(folder).latent_shape((3, 18, 16))


def test_an_autoencoder_of_another_class_is_refused(folder: Path):
    with pytest.raises(UserError, match="this family's latents are made by AutoencoderKL:") as error:
        load(folder, "AutoencoderKL")
    assert error.value.setting == "model.vae"


@torch.no_grad()
def test_latents_of_a_cache_need_no_network(folder: Path):
    """Moments are all that is kept of an image, and the autoencoder is left out of memory."""
    made = load(folder)
    moments, noise = made.encode(pixels()), made.random_inputs(5, KEYS, (3, 16, 24))
    with encoders.leaving_out(["vae"]):
        absent = load(folder)
    assert all(parameter.is_meta for parameter in absent.net.parameters())
    assert torch.equal(absent.latents(moments, noise), made.latents(moments, noise))
