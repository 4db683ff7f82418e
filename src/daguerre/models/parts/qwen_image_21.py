"""diffusers' QwenImage21Transformer2DModel, for text alone: its forward pass on a batch of texts with a mask.

The library's own finds where text and images lie in the sequence by values of a mask on the device, which is waited for
in every call, and it gives the image the same place in every sample, as if padding were text. Shape letters: B samples,
C channels, H and W height and width of latents, T tokens of text, S tokens of text and image, D features.
"""

from functools import wraps
from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from daguerre.models.network import stands_for


@stands_for(QwenImage21Transformer2DModel)
class TextToImage(QwenImage21Transformer2DModel):
    """The transformer of Qwen-Image-2.1. The sequence is text, of which each token sees those before it, and behind it
    the image, which sees all. Text is modulated as at time 0, so it does not depend on the noise level."""

    # Under the library's signature: configs read their numbers off it.
    @wraps(QwenImage21Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self: Any, *args: Any, **numbers: Any) -> None:
        super().__init__(*args, **numbers)
        for block in self.transformer_blocks:
            block.attn.set_processor(_Attention())

    def forward(self: Any, x_BCHW: Tensor, time_B: Tensor, text_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """The velocity [B, C, H, W] of noisy latents. `mask_BT` is True for tokens of text and False for the padding
        behind them; None: all are text."""
        (_, _, height, width), n_text = x_BCHW.shape, text_BTD.shape[1]
        image_BSD = self.img_in(x_BCHW.flatten(2).transpose(1, 2))
        hidden_BSD = torch.cat([self.txt_in(text_BTD), image_BSD], 1)
        time_B, is_image_S = time_B.to(hidden_BSD.dtype), None
        if self.config.causal_condition:  # one row more: that of time 0, for the text
            time_B = torch.cat([time_B, time_B.new_zeros(1)])
            is_image_S = torch.arange(hidden_BSD.shape[1], device=hidden_BSD.device) >= n_text
        time_BD = self.time_text_embed(time_B, hidden_BSD)
        # On the device; of one row where all texts have one length.
        length_B = torch.full((1,), n_text, device=x_BCHW.device) if mask_BT is None else mask_BT.sum(1)
        rotary = self._rotary(length_B, n_text, height, width)
        seen_BS = None if mask_BT is None else pad(mask_BT, (0, height * width), value=True)
        # caches of keys, of which there are none; then the one stretch of text, and the keys that the image sees
        more = self.modulation(time_BD), rotary, None, is_image_S, None, None, None, [(0, n_text, True)], seen_BS
        for block in self.transformer_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_BSD = self._gradient_checkpointing_func(block, hidden_BSD, *more)
            else:
                hidden_BSD = block(hidden_BSD, *more)
        is_image_S = None if is_image_S is None else is_image_S[n_text:]
        y_BSC = self.proj_out(self.norm_out(hidden_BSD[:, n_text:], time_BD, is_image_S))
        return y_BSC.transpose(1, 2).unflatten(2, (height, width))

    def _rotary(self: Any, length_B: Tensor, n_text: int, height: int, width: int) -> Tensor:
        """[B, S, 1, D / 2] complex, for all heads: three axes, on which text has its place in the order, and the image
        its frame's place behind the text, and rows and columns around 0."""
        device = length_B.device
        text_T = torch.arange(n_text, device=device)
        row_H = torch.arange(height, device=device) - (height - height // 2)
        column_W = torch.arange(width, device=device) - (width - width // 2)
        on_image = (
            length_B[:, None].expand(-1, height * width),
            row_H[:, None].expand(height, width).reshape(1, -1),
            column_W.repeat(height)[None],
        )
        axes = []
        for dim, places_BS in zip(self.config.axes_dims_rope, on_image, strict=True):
            places_BS = torch.cat([text_T.expand(len(places_BS), -1), places_BS], 1).expand(len(length_B), -1)
            periods = torch.pow(self.pos_embed.theta, torch.arange(0, dim, 2, device=device).float() / dim)
            angles = places_BS[..., None] * (1.0 / periods)
            axes.append(torch.polar(torch.ones_like(angles), angles))
        return torch.cat(axes, -1)[:, :, None]


class _Attention:
    """The attention of a block, with places of each sample. Padding is behind the text, so that no token of text sees
    it anyway."""

    def __call__(
        self, attn: Any, hidden_BSD: Tensor, rotary_emb: Tensor, segments: Any, key_valid: Tensor | None, **_: Any
    ) -> Tensor:
        """[B, S, D] of the same. `rotary_emb` [B, S, 1, D / 2] complex, `segments` the one stretch of text, `key_valid`
        [B, S] True for what the image sees; None: all."""
        ((_, n_text, _),) = segments
        # On a mesh, each device has its share of the heads.
        q, k, v = (
            layer(hidden_BSD).unflatten(-1, (-1, attn.inner_dim // attn.heads))
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        q, k = (_turned(norm(rows).to(v.dtype), rotary_emb) for norm, rows in ((attn.norm_q, q), (attn.norm_k, k)))
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        mask = None if key_valid is None else key_valid[:, None, None]
        of_text = scaled_dot_product_attention(q[:, :, :n_text], k[:, :, :n_text], v[:, :, :n_text], is_causal=True)
        of_image = scaled_dot_product_attention(q[:, :, n_text:], k, v, mask)
        y: Tensor = attn.to_out[0](torch.cat([of_text, of_image], 2).transpose(1, 2).flatten(2).type_as(q))
        return y


def _turned(rows_BSHD: Tensor, rotary: Tensor) -> Tensor:
    """Pairs of features turned by the angles of their places."""
    pairs = torch.view_as_complex(rows_BSHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(-2).type_as(rows_BSHD)
