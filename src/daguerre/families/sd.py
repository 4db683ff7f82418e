"""Stable Diffusion 1.x and 2.x: a KL autoencoder, a CLIP text encoder and a UNet with cross attention.

The networks are diffusers' and transformers' own, in the folder layout of a diffusers pipeline. The UNet is trained;
the autoencoder and the text encoder are frozen. Where a pipeline comes from is in pretrained.py, which scheduler goes
into an export in scheduler.py. Shape letters: B samples, C channels, H and W height and width, T tokens, D features.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from daguerre import keys as keyed
from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.families import pipeline, pretrained, scheduler
from daguerre.families.family import TextToImage
from daguerre.families.settings import FamilySettings
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Batch, Cond


class Settings(FamilySettings):
    """Stable Diffusion 1.x or 2.x."""

    family: Literal["sd"] = "sd"
    """Name of the family."""
    pretrained_model_name_or_path: str
    """Where vae, text_encoder and tokenizer come from: `quickstart` (shipped), a folder in diffusers' layout, or a
    hub id such as `stabilityai/stable-diffusion-2-base`, which is read from the local cache first."""
    unet: dict[str, Any] | None = None
    """Numbers of a UNet2DConditionModel, which then starts from random weights drawn from the run's seed; what is not
    given takes diffusers' defaults. null: the pretrained UNet of the same place."""
    sample_posterior: bool = True
    """Draw a latent from the autoencoder's posterior for each sample and epoch; off: take the posterior's mean."""


class UNet(nn.Module):
    """diffusers' UNet2DConditionModel, called as every net is; its weights are named `unet.` and diffusers' name."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """The prediction y [B, C, H, W] for latents, c_noise [B] and cond["text"] [B, T, D]."""
        return self.unet(x_BCHW, c_noise_B, encoder_hidden_states=cond["text"], return_dict=False)[0]


@dataclass
class Truncation:
    """Texts that were longer than the text encoder can read."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, texts: Sequence[str]) -> None:
        """Counts these texts, and keeps the first three ever seen."""
        self.count += len(texts)
        self.examples += texts[: 3 - len(self.examples)]


@dataclass(frozen=True, eq=False)
class StableDiffusion(TextToImage):
    """The networks of one Stable Diffusion pipeline."""

    net: UNet
    vae: Any
    """AutoencoderKL, frozen."""
    text_encoder: Any
    """CLIPTextModel, frozen."""
    tokenizer: Any
    """CLIPTokenizer."""
    tokenizer_files: Mapping[str, bytes]
    """As they were loaded; saving a tokenizer that was used writes its last padding and truncation, too."""
    sample_posterior: bool
    captions_cut: Truncation = field(default_factory=Truncation)
    prompts_cut: Truncation = field(default_factory=Truncation)

    def to(self, device: torch.device | str) -> Self:
        for part in self.parts().values():
            part.to(device)
        return self

    def parts(self) -> dict[str, nn.Module]:
        return {"unet": self.net.unet, "vae": self.vae, "text_encoder": self.text_encoder}

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        factor = _vae_factor(self.vae)
        _, height, width = pixel_shape
        if height % factor or width % factor:
            raise UserError(
                f"pictures of {height}x{width} px do not fit this autoencoder, which divides sides by {factor}; "
                f"set data.resolution to a multiple of {factor}"
            )
        return (self.vae.config.latent_channels, height // factor, width // factor)

    def draws(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        if not self.sample_posterior:
            return {}
        noise = keyed.batch_normals(seed, "vae", keys, self.latent_shape(pixel_shape))
        return {"posterior": torch.from_numpy(noise)}

    @torch.no_grad()
    def encode(self, batch: Batch) -> tuple[Tensor, Cond]:
        """x0 = scaling_factor (mean + std noise) of pixels in [-1, 1]; cond["text"] [B, T, D]."""
        with torch.autocast(batch.pixels_BCHW.device.type, enabled=False):
            pixels_BCHW = batch.pixels_BCHW.to(torch.float32, memory_format=torch.channels_last) / 127.5 - 1
            posterior = self.vae.encode(pixels_BCHW).latent_dist
            z_BCHW = posterior.mean
            if self.sample_posterior:
                z_BCHW = z_BCHW + posterior.std * batch.draws["posterior"]
            x0_BCHW = self.vae.config.scaling_factor * z_BCHW
            return x0_BCHW.contiguous(), {"text": self._read(batch.texts, self.captions_cut)}

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str]) -> Cond:
        with torch.autocast(self.text_encoder.device.type, enabled=False):
            return {"text": self._read(list(prompts), self.prompts_cut)}

    def _read(self, texts: list[str], cut: Truncation) -> Tensor:
        """The text encoder's last hidden state [B, T, D], all T tokens, as StableDiffusionPipeline takes it."""
        rows = self.tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self.tokenizer.model_max_length,
            return_overflowing_tokens=True,
        )
        text_of_row = rows["overflow_to_sample_mapping"]
        first_rows = [text_of_row.index(i) for i in range(len(texts))]
        cut.note([texts[i] for i in range(len(texts)) if text_of_row.count(i) > 1])
        ids_BT = torch.tensor([rows["input_ids"][row] for row in first_rows], device=self.text_encoder.device)
        return self.text_encoder(ids_BT).last_hidden_state

    @torch.no_grad()
    def decode(self, x0_BCHW: Tensor) -> np.ndarray:
        with torch.autocast(x0_BCHW.device.type, enabled=False):
            z_BCHW = (x0_BCHW.float() / self.vae.config.scaling_factor).to(memory_format=torch.channels_last)
            pixels_BCHW = self.vae.decode(z_BCHW, return_dict=False)[0]
        pixels_BHWC = ((pixels_BCHW / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        return pixels_BHWC.contiguous().cpu().numpy()

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """A folder that stock `StableDiffusionPipeline.from_pretrained` opens offline, tokenizer included."""
        if not isinstance(objective, Diffusion):
            raise UserError(f"the objective {objective!r} is no diffusion: there is nothing to export")
        plan = scheduler.choose(objective, sampling)
        with replaced(folder) as fresh:
            networks: dict[str, Any] = self.parts()
            for name, network in networks.items():
                network.save_pretrained(fresh / name, safe_serialization=True)
            for path, content in self.files().items():
                (fresh / path).parent.mkdir(exist_ok=True)
                (fresh / path).write_bytes(content)
            pipeline.write_index(fresh, "StableDiffusionPipeline", _INDEX, plan)
            pipeline.write_card(fresh, "StableDiffusionPipeline", objective, sampling, plan)
        return list(plan.notices)

    def files(self) -> dict[str, bytes]:
        return {f"tokenizer/{name}": content for name, content in self.tokenizer_files.items()}

    def report(self) -> dict[str, dict[str, object]]:
        limit = self.tokenizer.model_max_length
        cut = {"captions": self.captions_cut, "prompts": self.prompts_cut}
        return {
            f"{kind} cut to {limit} tokens": {"count": one.count, "examples": list(one.examples)}
            for kind, one in cut.items()
            if one.count
        }


_FROZEN = {
    "vae": ["config.json", "diffusion_pytorch_model.safetensors"],
    "text_encoder": ["config.json", "model.safetensors"],
    "tokenizer": ["tokenizer_config.json"],
}
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
    """The family of these settings; ValueError says what is missing or does not fit together."""
    needed = _FROZEN if settings.unet is not None else _FROZEN | _UNET
    folder = pretrained.locate(settings.pretrained_model_name_or_path, needed)
    vae = pretrained.load_frozen(AutoencoderKL, folder / "vae").to(memory_format=torch.channels_last)
    text_encoder = pretrained.load_frozen(CLIPTextModel, folder / "text_encoder")
    if vae.config.shift_factor is not None:
        raise UserError(f"{folder}/vae has a shift_factor, which Stable Diffusion does not apply: use another one")
    if settings.unet is None:
        unet = pretrained.load(UNet2DConditionModel, folder / "unet")
    else:
        unet = _random_unet(settings.unet, vae, text_encoder, seed)
    _check_fit(unet, vae, text_encoder)
    tokenizer = _load_tokenizer(folder / "tokenizer", text_encoder)
    files = {path.name: path.read_bytes() for path in sorted((folder / "tokenizer").iterdir()) if path.is_file()}
    return StableDiffusion(UNet(unet), vae, text_encoder, tokenizer, files, settings.sample_posterior)


def _vae_factor(vae: Any) -> int:
    """By how much the autoencoder divides each side."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def _random_unet(numbers: Mapping[str, Any], vae: Any, text_encoder: Any, seed: int) -> Any:
    """A UNet of these numbers with weights from `seed`; what the other networks decide is taken from them."""
    allowed = set(inspect.signature(UNet2DConditionModel.__init__).parameters) - {"self"}
    if unknown := sorted(set(numbers) - allowed):
        near = {name: difflib.get_close_matches(name, allowed, n=1) for name in unknown}
        named = ", ".join(f"{name} (did you mean {near[name][0]}?)" if near[name] else name for name in unknown)
        raise UserError(f"model.unet: UNet2DConditionModel has no {named}; it takes: {', '.join(sorted(allowed))}")
    channels = vae.config.latent_channels
    decided = {
        "sample_size": vae.config.sample_size // _vae_factor(vae),
        "in_channels": channels,
        "out_channels": channels,
        "cross_attention_dim": text_encoder.config.hidden_size,
    }
    try:
        unet = pretrained.seeded(lambda: UNet2DConditionModel(**(decided | dict(numbers))), seed)
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"model.unet: diffusers cannot build a UNet of these numbers: {error}") from error
    # The time embedding is one number a channel, and a norm over a single channel takes it out again.
    if unet.config.norm_num_groups == min(unet.config.block_out_channels):
        raise UserError(
            f"model.unet: norm_num_groups is {unet.config.norm_num_groups}, as many as the first block has channels: "
            "each norm would remove the time embedding of its channel; set norm_num_groups to a half or less (8)"
        )
    return unet


def _check_fit(unet: Any, vae: Any, text_encoder: Any) -> None:
    """ValueError where the networks' widths do not match or the UNet wants inputs that this family does not have."""
    channels, width = vae.config.latent_channels, text_encoder.config.hidden_size
    fits = {
        "in_channels": (unet.config.in_channels, channels, "latent channels of the autoencoder"),
        "out_channels": (unet.config.out_channels, channels, "latent channels of the autoencoder"),
        "cross_attention_dim": (unet.config.cross_attention_dim, width, "the text encoder's hidden_size"),
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


def _load_tokenizer(folder: Path, text_encoder: Any) -> Any:
    """The tokenizer in `folder`, whose tokens must be those of the text encoder.

    transformers 5 builds a tokenizer of 2 tokens, in silence, when the files are not what it expects.
    """
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    config = text_encoder.config
    if len(tokenizer) != config.vocab_size:
        raise UserError(
            f"{folder} has {len(tokenizer)} tokens, but the text encoder knows {config.vocab_size}: they are not a "
            "pair, or the tokenizer's files are incomplete (tokenizer.json, or vocab.json with merges.txt)"
        )
    if tokenizer.model_max_length > config.max_position_embeddings:
        raise UserError(
            f"{folder} sets model_max_length to {tokenizer.model_max_length}, but the text encoder reads "
            f"{config.max_position_embeddings} tokens: correct model_max_length in tokenizer_config.json"
        )
    return tokenizer
