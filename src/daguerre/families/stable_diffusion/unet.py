"""A UNet with cross attention as the denoiser of a family: diffusers' UNet2DConditionModel.

Shape letters: B samples, C channels, H and W height and width, T tokens, D features.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.families.stable_diffusion.controlnets import OfUNet
from daguerre.families.stable_diffusion.facts import UNET
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.family import Exporter, Family
from daguerre.models.parts.facts import KL_AUTOENCODER
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.parts.vae import VAE, factor
from daguerre.samplers.guidance import Embedded
from daguerre.types import Cond

_UNUSED = ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type")


def denoise(unet: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The UNet's prediction [B, C, H, W] from cond["text"] [B, T, D], with cond["pooled"] [B, P] and cond["sizes"]
    [B, 6] where it knows them, and cond["guidance"] [B] where it reads a scale. `residuals` are a ControlNet's: those
    of the down blocks, and last that of the middle block."""
    width = unet.config.time_cond_proj_dim
    # Without a scale, as other objectives train it, nothing is added; scale 1 is 0 in the pipelines' embedding.
    scale = sines(cond["guidance"] - 1, width) if width is not None and "guidance" in cond else None
    added = {"text_embeds": cond["pooled"], "time_ids": cond["sizes"]} if "sizes" in cond else None
    prediction: Tensor = unet(
        x_BCHW,
        c_noise_B,
        timestep_cond=scale,
        encoder_hidden_states=cond["text"],
        encoder_attention_mask=cond.get("text_mask"),
        added_cond_kwargs=added,
        down_block_additional_residuals=tuple(residuals[:-1]) or None,
        mid_block_additional_residual=residuals[-1] if residuals else None,
        return_dict=False,
    )[0]
    return prediction


def sines(scale_B: Tensor, width: int) -> Tensor:
    """A guidance scale less one, as diffusers' pipelines give it to a UNet: [B, width] sines, then cosines, of a
    thousand times the scale (Vaswani et al. 2017, arXiv 1706.03762)."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=scale_B.device) / (half - 1)
    angle = 1000 * scale_B.float()[:, None] * torch.exp(-math.log(10000.0) * steps)[None]
    return torch.cat([angle.sin(), angle.cos()], 1)


def give_guidance(unet: Any, width: int) -> None:
    """Adds an input for the guidance scale to a UNet without one; it is zero until it is trained. UserError for one
    that has another."""
    if unet.config.time_cond_proj_dim not in (None, width):
        raise UserError(
            f"the UNet reads its guidance scale in {unet.config.time_cond_proj_dim} numbers: remove "
            "model.guidance_embedding",
            code="conflict",
            setting="model.guidance_embedding",
        )
    if unet.config.time_cond_proj_dim is None:
        first = unet.time_embedding.linear_1
        unet.time_embedding.cond_proj = nn.Linear(width, first.in_features, bias=False)
        nn.init.zeros_(unet.time_embedding.cond_proj.weight)
        unet.register_to_config(time_cond_proj_dim=width)


def load(
    components: ComponentLoader, autoencoder: VAE, texts: TextConditioning, more: Mapping[str, Any] | None = None
) -> Any:
    """The UNet of these components. `more` are numbers that the family decides besides those of latents and text;
    UserError says where they do not fit."""
    channels, sample_size = autoencoder.channels, autoencoder.net.config.sample_size // factor(autoencoder.net)
    decided = {"in_channels": channels, "out_channels": channels, "cross_attention_dim": texts.width, **(more or {})}
    unet = components.network("unet", UNet2DConditionModel, {"sample_size": sample_size, **decided})
    if components.is_random("unet"):
        _check_norms(unet)
    else:
        _check_kind(unet, channels)
    reasons = dict.fromkeys(("in_channels", "out_channels"), "latent channels of the autoencoder")
    reasons["cross_attention_dim"] = "the width of the text encoders"
    wrong = [
        f"{name} is {unet.config[name]}, but must be {wanted}, {reasons.get(name, 'as this family conditions it')}"
        for name, wanted in decided.items()
        if unet.config[name] != wanted
    ]
    wrong += [
        f"{name} is {unet.config[name]!r}, but this family gives the UNet {'text and sizes' if more else 'text only'}"
        for name in _UNUSED + (() if more else ("addition_embed_type",))
        if unet.config[name] is not None
    ]
    if wrong:
        is_sized = unet.config.addition_embed_type == "text_time"
        kind, family = ("SDXL", "sdxl") if is_sized else ("Stable Diffusion", "sd")
        other = f". It is an {kind} UNet: use a recipe with model.family={family}" if is_sized != bool(more) else ""
        raise UserError(
            f"the UNet does not match the other networks: {'; '.join(wrong)}. Change model.unet (missing settings "
            f"are taken from the other networks) or model.pretrained_model_name_or_path{other}",
            code="conflict",
            setting="model.unet",
        )
    if (width := getattr(components.settings, "guidance_embedding", None)) is not None:
        give_guidance(unet, width)
    return unet


def _check_kind(unet: Any, channels: int) -> None:
    """UserError for checkpoints whose UNet is given more than a latent of so many channels and text."""
    kinds = {
        2 * channels + 1: "inpainting, and reads a mask and the masked image with the latent. A usual checkpoint "
        "inpaints, too: `daguerre generate ... image=FILE mask=FILE`; and adapter.name=controlnet "
        "adapter.condition=inpaint trains a ControlNet that sees what is kept",
        2 * channels: "edits by instruction (InstructPix2Pix)",
        channels + 1: "images by depth",
        channels + 3: "upscaling",
    }
    if (found := unet.config.in_channels) in kinds:
        raise UserError(
            f"the UNet has {found} input channels, so it is not supported: its checkpoint is for {kinds[found]}",
            code="unsupported",
            setting="model.unet",
        )


def _check_norms(unet: Any) -> None:
    """The time embedding is one number a channel, and a norm over a single channel takes it out again."""
    if unet.config.norm_num_groups == min(unet.config.block_out_channels):
        raise UserError(
            f"model.unet: norm_num_groups is {unet.config.norm_num_groups}, equal to the channels of the first "
            "block, so each norm would remove the time embedding: set norm_num_groups to half of that or less (8)",
            setting="model.unet.norm_num_groups",
        )


def family(
    components: ComponentLoader, unet: Any, autoencoder: VAE, texts: TextConditioning, exporter: Exporter
) -> Family:
    """The family of these networks, in which the UNet is trained."""
    settings: Any = components.settings
    controlnets = OfUNet("unet", unet, autoencoder, settings.long_prompts, tuple(settings.ignore_tensors))
    return trained_net.family(
        components,
        partial(denoise, unet),
        {"unet": unet, "vae": autoencoder.net},
        {"unet": UNET, "vae": KL_AUTOENCODER},
        autoencoder,
        texts,
        exporter,
        controlnets=controlnets,
        guidance=settings.guidance if unet.config.time_cond_proj_dim is None else Embedded(),
    )
