"""Stable Diffusion 1.x and 2.x: a KL autoencoder, a CLIP text encoder and a UNet with cross attention.

The networks are diffusers' and transformers' own, in the folder layout of a diffusers pipeline. The UNet is trained;
the autoencoder (vae.py) and the text encoder (clip_text.py) are frozen. Where they come from is in pretrained.py, which
scheduler goes into an export in scheduler.py.

Shape letters: B samples, C channels, H and W height and width, T tokens, D features.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.families import clip_text, pipeline, pretrained, scheduler, vae
from daguerre.families.clip_text import TextReader
from daguerre.families.family import TextToImage
from daguerre.families.settings import LatentSettings
from daguerre.families.vae import VAE
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Batch, Cond


class Settings(LatentSettings):
    """Stable Diffusion 1.x or 2.x."""

    family: Literal["sd"] = "sd"
    """Name of the family."""
    pretrained_model_name_or_path: str
    """Where vae, text_encoder and tokenizer come from: `quickstart` (shipped), a folder in diffusers' layout, or a
    hub id such as `stabilityai/stable-diffusion-2-base`, which is read from the local cache first."""
    unet: dict[str, Any] | None = None
    """Numbers of a UNet2DConditionModel, which then starts from random weights drawn from the run's seed. Channels,
    cross_attention_dim and sample_size follow from the other networks; what else is not given takes diffusers'
    defaults. null: the pretrained UNet of the same place."""


class UNet(nn.Module):
    """diffusers' UNet2DConditionModel, called as every net is; its weights are named `unet.` and diffusers' name."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """The prediction y [B, C, H, W] for latents, c_noise [B] and cond["text"] [B, T, D]."""
        return self.unet(x_BCHW, c_noise_B, encoder_hidden_states=cond["text"], return_dict=False)[0]


@dataclass(frozen=True, eq=False)
class StableDiffusion(TextToImage):
    """The networks of one Stable Diffusion pipeline."""

    net: UNet
    vae: VAE
    text: TextReader

    def to(self, device: torch.device | str) -> Self:
        for part in self.parts().values():
            part.to(device)
        return self

    def parts(self) -> dict[str, nn.Module]:
        return {"unet": self.net.unet, "vae": self.vae.net, "text_encoder": self.text.encoder}

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.vae.latent_shape(pixel_shape)

    def draws(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        return self.vae.draws(seed, keys, pixel_shape)

    @torch.no_grad()
    def encode(self, batch: Batch) -> tuple[Tensor, Cond]:
        with torch.autocast(batch.pixels_BCHW.device.type, enabled=False):
            x0_BCHW = self.vae.encode(batch.pixels_BCHW, batch.draws)
            return x0_BCHW, {"text": self.text.read(batch.texts)}

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str]) -> Cond:
        with torch.autocast(self.text.encoder.device.type, enabled=False):
            return {"text": self.text.read(prompts)}

    @torch.no_grad()
    def decode(self, x0_BCHW: Tensor) -> np.ndarray:
        with torch.autocast(x0_BCHW.device.type, enabled=False):
            return self.vae.decode(x0_BCHW)

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """A folder that stock `StableDiffusionPipeline.from_pretrained` opens offline, tokenizer included."""
        if not isinstance(objective, Diffusion):
            raise UserError(f"the objective {objective!r} is no diffusion: there is nothing to export")
        plan = scheduler.choose(objective, sampling)
        with replaced(folder) as fresh:
            networks: dict[str, Any] = self.parts()
            if self.vae.has_statistics:  # StableDiffusionPipeline applies the scaling factor alone
                networks["vae"] = vae.folded(self.vae.net)
            for name, network in networks.items():
                network.save_pretrained(fresh / name, safe_serialization=True)
            for path, content in self.files().items():
                (fresh / path).parent.mkdir(exist_ok=True)
                (fresh / path).write_bytes(content)
            pipeline.write_index(fresh, "StableDiffusionPipeline", _INDEX, plan)
            pipeline.write_card(fresh, "StableDiffusionPipeline", objective, sampling, plan)
        return list(plan.notices)

    def files(self) -> dict[str, bytes]:
        return {f"tokenizer/{name}": content for name, content in self.text.files.items()}

    def cut(self, texts: Sequence[str]) -> dict[int, str]:
        return self.text.cut(texts)


_FROZEN = {"vae": vae.FILES, "text_encoder": clip_text.FILES, "tokenizer": clip_text.TOKENIZER_FILES}
_UNET = {"unet": ["config.json", "diffusion_pytorch_model.safetensors"]}
_INDEX = {
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def load(settings: Settings, seed: int) -> StableDiffusion:
    """The family of these settings; UserError says what is missing or does not fit together."""
    needed = _FROZEN if settings.unet is not None else _FROZEN | _UNET
    folder = pretrained.locate(settings.pretrained_model_name_or_path, needed)
    autoencoder = vae.load(folder / "vae", settings)
    text = clip_text.load(folder / "text_encoder", folder / "tokenizer")
    if settings.unet is None:
        unet = pretrained.load(UNet2DConditionModel, folder / "unet")
    else:
        unet = _random_unet(settings.unet, autoencoder, text, seed)
    _check_fit(unet, autoencoder, text)
    return StableDiffusion(UNet(unet), autoencoder, text)


def _random_unet(numbers: Mapping[str, Any], autoencoder: VAE, text: TextReader, seed: int) -> Any:
    """A UNet of these numbers with weights from `seed`; what the other networks decide is taken from them."""
    allowed = set(inspect.signature(UNet2DConditionModel.__init__).parameters) - {"self"}
    if unknown := sorted(set(numbers) - allowed):
        near = {name: difflib.get_close_matches(name, allowed, n=1) for name in unknown}
        named = ", ".join(f"{name} (did you mean {near[name][0]}?)" if near[name] else name for name in unknown)
        raise UserError(f"model.unet: UNet2DConditionModel has no {named}; it takes: {', '.join(sorted(allowed))}")
    decided = {
        "sample_size": autoencoder.net.config.sample_size // autoencoder.factor,
        "in_channels": autoencoder.channels,
        "out_channels": autoencoder.channels,
        "cross_attention_dim": text.width,
    }
    try:
        unet: Any = pretrained.seeded(lambda: UNet2DConditionModel(**(decided | dict(numbers))), seed)
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"model.unet: diffusers cannot build a UNet of these numbers: {error}") from error
    # The time embedding is one number a channel, and a norm over a single channel takes it out again.
    if unet.config.norm_num_groups == min(unet.config.block_out_channels):
        raise UserError(
            f"model.unet: norm_num_groups is {unet.config.norm_num_groups}, as many as the first block has channels: "
            "each norm would remove the time embedding of its channel; set norm_num_groups to a half or less (8)"
        )
    return unet


def _check_fit(unet: Any, autoencoder: VAE, text: TextReader) -> None:
    """UserError where the networks' widths do not match or the UNet wants inputs that this family does not have."""
    fits = {
        "in_channels": (unet.config.in_channels, autoencoder.channels, "latent channels of the autoencoder"),
        "out_channels": (unet.config.out_channels, autoencoder.channels, "latent channels of the autoencoder"),
        "cross_attention_dim": (unet.config.cross_attention_dim, text.width, "the text encoder's hidden_size"),
    }
    wrong = [f"{name} is {got}, but must be {want}, {why}" for name, (got, want, why) in fits.items() if got != want]
    for name in (
        "class_embed_type",
        "addition_embed_type",
        "num_class_embeds",
        "encoder_hid_dim_type",
        "time_cond_proj_dim",
    ):
        if unet.config[name] is not None:
            wrong.append(f"{name} is {unet.config[name]!r}, but this family gives the UNet text only")
    if wrong:
        raise UserError(
            f"the UNet does not fit the other networks: {'; '.join(wrong)}. Change model.unet (what is left out is "
            "taken from the other networks) or model.pretrained_model_name_or_path"
        )
