"""The transformer of Qwen-Image and Qwen-Image-Edit: facts, guidance, and its call with reference images.

Shape letters: B samples, C channels, H and W height and width of latents, T tokens of text, S tokens of images, D
features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.network import HEAD, Architecture, Facts, layers, stands_for
from daguerre.models.parts import vae
from daguerre.models.parts.flux2_vae import patched, unpatched
from daguerre.models.weights.original_names import NameTable
from daguerre.samplers.guidance import ClassifierFree
from daguerre.types import Cond

PATCH = 2
"""Side of the square of latent pixels that is one token."""


@dataclass(frozen=True)
class NormKept(ClassifierFree):
    """Classifier-free guidance that then gives each token the norm of the prompt's side, as the pipeline does."""

    def combine(self, y_cond_BCHW: Tensor, y_null_BCHW: Tensor, scale_B111: Tensor) -> Tensor:
        y_BCHW = super().combine(y_cond_BCHW, y_null_BCHW, scale_B111)
        return y_BCHW * (_lengths(y_cond_BCHW) / _lengths(y_BCHW))


def _lengths(y_BCHW: Tensor) -> Tensor:
    """[B, 1, H, W]: the norm of the token that each pixel belongs to, but for a factor."""
    squares = avg_pool2d(y_BCHW.square().sum(1, keepdim=True), PATCH)
    return interpolate(squares.sqrt(), scale_factor=PATCH)


_EDITS = Architecture("qwen-image-edit", {"ss_base_model_version": "qwen_image_edit"})


def edits(network: Any, prediction: str) -> Architecture:
    """The names of Qwen-Image-Edit."""
    return _EDITS


def _architecture(network: Any, prediction: str) -> Architecture:
    if network.config.zero_cond_t:  # of the others, the numbers do not tell whether they edit
        return _EDITS
    return Architecture("qwen-image", {"ss_base_model_version": "qwen_image"})


@stands_for(QwenImageTransformer2DModel)
class TwoStreams(QwenImageTransformer2DModel):
    """The transformer, of blocks with a stream of text and one of image tokens. The library's forward pass copies
    numbers of the host to the device in every call, which is waited for: the length of each text, which it then drops,
    and which tokens are of reference images."""

    def forward(
        self: Any,
        tokens_BSC: Tensor,
        time_B: Tensor,
        text_BTD: Tensor,
        mask_BT: Tensor | None,
        shapes: Sequence[tuple[int, int, int]],
    ) -> Tensor:
        """The velocity [B, S, C] of the tokens of images of these `shapes` (1, rows, columns), of which the first is
        the one that is made. `mask_BT` is 0 for the padding of texts; None: no text is padded."""
        image_BSD, text_BTD = self.img_in(tokens_BSC), self.txt_in(self.txt_norm(text_BTD))
        time_B, is_reference_BS = time_B.to(image_BSD.dtype), None
        if self.zero_cond_t:  # of each sample a second row: reference images are as at time 0
            time_B = torch.cat([time_B, torch.zeros_like(time_B)])
            made = shapes[0][1] * shapes[0][2]
            is_reference_BS = (torch.arange(image_BSD.shape[1], device=image_BSD.device) >= made)[None]
        time_BD = self.time_text_embed(time_B, image_BSD)
        rotary = self.pos_embed([[*shapes]], max_txt_seq_len=text_BTD.shape[1], device=image_BSD.device)
        mask_BT = None if mask_BT is None else mask_BT.bool()
        for block in self.transformer_blocks:
            given = (image_BSD, text_BTD, mask_BT, time_BD, rotary, None, is_reference_BS)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                text_BTD, image_BSD = self._gradient_checkpointing_func(block, *given)
            else:
                text_BTD, image_BSD = block(*given)
        return self.proj_out(self.norm_out(image_BSD, time_BD[: len(image_BSD)]))


_BLOCK = "transformer_blocks.*."
NAMES = NameTable({}, others=True)
"""The authors' and ComfyUI's names of the transformer are the library's."""
TRANSFORMER = Facts(
    blocks=("QwenImageTransformerBlock",),
    axes={
        **layers(("embed", None), "img_in", "txt_in"),
        **layers(("time", None), "time_text_embed.timestep_embedder.linear_?"),
        **layers((None, "embed"), f"{_BLOCK}*_mod.1", "norm_out.linear", "proj_out"),
        **layers(("heads", "embed"), f"{_BLOCK}attn.to_[qkv]", f"{_BLOCK}attn.add_[qkv]_proj"),
        **layers(("embed", "heads"), f"{_BLOCK}attn.to_out.0", f"{_BLOCK}attn.to_add_out"),
        **layers(("mlp", "embed"), f"{_BLOCK}*_mlp.net.0.proj"),
        **layers(("embed", "mlp"), f"{_BLOCK}*_mlp.net.2"),
        f"{_BLOCK}attn.norm_*.weight": (HEAD,),
        "txt_norm.weight": ("norm",),
    },
    layers={
        "attention": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        "ff": ("img_mlp.net.*", "txt_mlp.net.*"),
    },
    readers=(("attn", "to_q", "to_k", "to_v"), ("attn", "add_q_proj", "add_k_proj", "add_v_proj")),
    names=NAMES,
    architecture=_architecture,
    other_models=(_EDITS,),
)
_LAST_OF_TEXT = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
"""Layers of the last block that only its text comes out of, which nothing reads."""


def unread(transformer: Any) -> frozenset[str]:
    """Names of the parameters of the last block that no output depends on."""
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
    own = tuple(f"{last}{layer}." for layer in _LAST_OF_TEXT)
    return frozenset(name for name, _ in transformer.named_parameters() if name.startswith(own))


def denoise(transformer: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents: packs 2 x 2 pixels to a token, and back. `cond` has `text` [B, T, D],
    `text_mask` [B, T] where texts of a batch differ in length, and latents [B, C, h, w] of reference images, whose
    tokens follow those of the image."""
    given = [x_BCHW, *vae.given(cond, x_BCHW)]
    tokens = [patched(z_BCHW) for z_BCHW in given]
    height, width = tokens[0].shape[2:]
    tokens_BSC = torch.cat([z_BCHW.flatten(2).transpose(1, 2) for z_BCHW in tokens], 1)
    shapes = [(1, *z_BCHW.shape[2:]) for z_BCHW in tokens]
    y_BSC = transformer(tokens_BSC, c_noise_B, cond["text"], cond.get("text_mask"), shapes)[:, : height * width]
    return unpatched(y_BSC.transpose(1, 2).unflatten(2, (height, width)))
