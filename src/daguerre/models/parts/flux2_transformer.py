"""FLUX.2's transformer in use: latents and those of reference images to tokens, and back to a velocity.

diffusers' Flux2Transformer2DModel, of which the number `patch_size` of its config is the side in latent pixels of a
token. FLUX.2's own latents are patches already, and it is 1. Shape letters: B samples, C channels, H and W height and
width of latents, T tokens, D features.
"""

from typing import Any

import torch
from torch import Tensor, nn

from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.network import Facts
from daguerre.models.parts import vae
from daguerre.models.parts.flux2_vae import patched, unpatched
from daguerre.models.parts.flux_names import FLUX2
from daguerre.types import Cond

TRANSFORMER = Facts(
    blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    heads="heads",
    layers={
        "attention": (
            *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_?_proj", "attn.to_add_out"),
            *("attn.to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out"),
        ),
        "ff": ("ff.linear_*", "ff_context.linear_*"),
    },
    readers=(("attn", "to_q", "to_k", "to_v"), ("attn", "add_q_proj", "add_k_proj", "add_v_proj")),
    names=FLUX2,
    unknown_to_diffusers=("*_stream_modulation*.linear", "norm_out.linear"),
)
"""Layers of single blocks that are attention and feed-forward in one belong to attention."""


def denoise(transformer: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents, a token for each patch of them.

    `cond` has `text` [B, T, D], and latents [B, C, h, w] of reference images, whose tokens follow those of the image at
    times of their own, 10, 20, ... in place of its 0.
    """
    device, patch = x_BCHW.device, transformer.config.patch_size
    given = [x_BCHW, *vae.given(cond, x_BCHW)]
    latents = [patched(z_BCHW, patch) for z_BCHW in given]
    h, w = latents[0].shape[2:]
    y_BTC = transformer(
        hidden_states=torch.cat([z.flatten(2).transpose(1, 2) for z in latents], 1),
        timestep=c_noise_B,
        encoder_hidden_states=cond["text"],
        txt_ids=_text_positions(cond["text"].shape[1], device),
        img_ids=torch.cat([_positions(*z.shape[2:], time=10 * n, device=device) for n, z in enumerate(latents)]),
        return_dict=False,
    )[0]
    return unpatched(y_BTC[:, : h * w].transpose(1, 2).unflatten(2, (h, w)), patch)


def _text_positions(tokens: int, device: torch.device) -> Tensor:
    """[tokens, 4]: 0, 0, 0 and the token's number."""
    return nn.functional.pad(torch.arange(tokens, device=device)[:, None], (3, 0))


def _positions(rows: int, columns: int, *, time: int, device: torch.device) -> Tensor:
    """[rows * columns, 4]: time, row and column of each token, and 0. Made on the device, so that nothing waits for a
    copy."""
    row = torch.arange(rows, device=device)[:, None].expand(rows, columns)
    column = torch.arange(columns, device=device)[None].expand(rows, columns)
    return torch.stack([torch.full_like(row, time), row, column, torch.zeros_like(row)], -1).reshape(-1, 4)
