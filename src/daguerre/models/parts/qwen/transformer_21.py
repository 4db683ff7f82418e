"""diffusers' QwenImage21Transformer2DModel: its forward pass on a batch of texts with a mask, and reference images.

The library's own finds where text and images lie in the sequence by values of a mask on the device, which is waited for
in every call, and it gives the image the same place in every sample, as if padding were text. Shape letters: B samples,
C channels, H and W height and width of latents, T tokens of text, S tokens of text and images, D features.
"""

from collections.abc import Sequence
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from daguerre.models.network import stands_for


@stands_for(QwenImage21Transformer2DModel)
class Interleaved(QwenImage21Transformer2DModel):
    """The transformer of Qwen-Image-2.1. The sequence is text, in which reference images stand, and after it the image
    that is made. Each token of text sees those before it, each image all that is before it and itself. Text and
    reference images are modulated as at time 0, so they do not depend on the noise level."""

    # Under the library's signature: configs read their numbers off it.
    @wraps(QwenImage21Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self: Any, *args: Any, **numbers: Any) -> None:
        super().__init__(*args, **numbers)
        for block in self.transformer_blocks:
            block.attn.set_processor(_Attention())

    def forward(
        self: Any,
        x_BCHW: Tensor,
        time_B: Tensor,
        text_BTD: Tensor,
        mask_BT: Tensor | None = None,
        references: Sequence[Tensor] = (),
        before: Sequence[int] = (),
    ) -> Tensor:
        """The velocity [B, C, H, W] of noisy latents. `mask_BT` is True for tokens of text and False for the padding
        behind them; None: all are text. `references` are latents [B, C, h, w], and `before` the tokens of text ahead of
        each."""
        (_, _, height, width), n_text = x_BCHW.shape, text_BTD.shape[1]
        bounds = [0, *before[: len(references)], n_text]
        parts = [self.txt_in(text_BTD)[:, start:end] for start, end in pairwise(bounds)]
        images = [self.img_in(z_BCHW.flatten(2).transpose(1, 2)) for z_BCHW in (*references, x_BCHW)]
        # text and image by turns: the last image is the one that is made
        hidden_BSD = torch.cat([part for both in zip(parts, images, strict=True) for part in both], 1)
        n_known = hidden_BSD.shape[1] - height * width
        time_B, is_image_S = time_B.to(hidden_BSD.dtype), None
        if self.config.causal_condition:  # one row more: that of time 0, for what is known
            time_B = torch.cat([time_B, time_B.new_zeros(1)])
            is_image_S = torch.arange(hidden_BSD.shape[1], device=hidden_BSD.device) >= n_known
        time_BD = self.time_text_embed(time_B, hidden_BSD)
        # On the device; of one row where all texts have one length.
        length_B = torch.full((1,), n_text, device=x_BCHW.device) if mask_BT is None else mask_BT.sum(1)
        shapes = [z_BCHW.shape[2:] for z_BCHW in (*references, x_BCHW)]
        rotary = self._rotary(length_B, bounds, shapes)
        lengths = [part.shape[1] for part in parts]
        segments, seen_BS = _segments(lengths, shapes[:-1]), None
        if mask_BT is not None:
            # padding is behind the last text: what is before it has none
            seen_BS = pad(mask_BT[:, bounds[-2] :], (n_known - lengths[-1], height * width), value=True)
        # caches of keys, of which there are none; then the stretches that are known, and the keys that the image sees
        more = self.modulation(time_BD), rotary, None, is_image_S, None, None, None, segments, seen_BS
        for block in self.transformer_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_BSD = self._gradient_checkpointing_func(block, hidden_BSD, *more)
            else:
                hidden_BSD = block(hidden_BSD, *more)
        is_image_S = None if is_image_S is None else is_image_S[n_known:]
        y_BSC = self.proj_out(self.norm_out(hidden_BSD[:, n_known:], time_BD, is_image_S))
        return y_BSC.transpose(1, 2).unflatten(2, (height, width))

    def _rotary(self: Any, length_B: Tensor, bounds: Sequence[int], shapes: Sequence[Sequence[int]]) -> Tensor:
        """[B, S, 1, D / 2] complex, for all heads: three axes, on which text has its place in the order, and an image
        its frame's place after the text before it, and rows and columns around 0. Text continues from the longer side
        of an image."""
        device, rows = length_B.device, len(length_B)
        axes: list[list[Tensor]] = [[], [], []]
        place = 0
        for number, ((start, end), (height, width)) in enumerate(zip(pairwise(bounds), shapes, strict=True)):
            text_BT = torch.arange(place, place + end - start, device=device).expand(rows, -1)
            place += end - start
            is_last = number == len(shapes) - 1
            frame_B = length_B + (place - end) if is_last else torch.full((rows,), place, device=device)
            row_H = torch.arange(height, device=device) - (height - height // 2)
            column_W = torch.arange(width, device=device) - (width - width // 2)
            on_image = (
                frame_B[:, None].expand(-1, height * width),
                row_H[:, None].expand(height, width).reshape(1, -1).expand(rows, -1),
                column_W.repeat(height)[None].expand(rows, -1),
            )
            for axis, places_BS in zip(axes, on_image, strict=True):
                axis += [text_BT, places_BS]
            place += max(height, width)
        turned = []
        for dim, parts in zip(self.config.axes_dims_rope, axes, strict=True):
            places_BS = torch.cat(parts, 1)
            periods = torch.pow(self.pos_embed.theta, torch.arange(0, dim, 2, device=device).float() / dim)
            angles = places_BS[..., None] * (1.0 / periods)
            turned.append(torch.polar(torch.ones_like(angles), angles))
        return torch.cat(turned, -1)[:, :, None]


def _segments(texts: Sequence[int], references: Sequence[Sequence[int]]) -> list[tuple[int, int, bool]]:
    """Begin and end of each stretch of what is known, in the order of the sequence, and whether it is text."""
    found, start = list[tuple[int, int, bool]](), 0
    counts = [height * width for height, width in references]
    for number, length in enumerate(texts):
        stretches = [(length, True), *((count, False) for count in counts[number : number + 1])]
        for count, is_text in stretches:
            if count:
                found.append((start, start + count, is_text))
            start += count
    return found


class _Attention:
    """The attention of a block, with places of each sample. Padding comes after the text, so that nothing that is known
    sees it anyway."""

    def __call__(
        self, attn: Any, hidden_BSD: Tensor, rotary_emb: Tensor, segments: Any, key_valid: Tensor | None, **_: Any
    ) -> Tensor:
        """[B, S, D] of the same. `rotary_emb` [B, S, 1, D / 2] complex, `segments` as `_segments` gives them,
        `key_valid` [B, S] True for what the image sees; None: all."""
        # On a mesh, each device has its share of the heads.
        q, k, v = (
            layer(hidden_BSD).unflatten(-1, (-1, attn.inner_dim // attn.heads))
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        q, k = (_turned(norm(rows).to(v.dtype), rotary_emb) for norm, rows in ((attn.norm_q, q), (attn.norm_k, k)))
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        found = [_of_segment(q, k, v, *segment) for segment in segments]
        n_known = segments[-1][1] if segments else 0
        mask = None if key_valid is None else key_valid[:, None, None]
        found.append(scaled_dot_product_attention(q[:, :, n_known:], k, v, mask))
        y: Tensor = attn.to_out[0](torch.cat(found, 2).transpose(1, 2).flatten(2).type_as(q))
        return y


def _of_segment(q: Tensor, k: Tensor, v: Tensor, start: int, end: int, is_text: bool) -> Tensor:
    """Attention [B, heads, end - start, features] of a stretch to all before it, and to itself: of text, each token to
    those up to itself."""
    q, k, v = q[:, :, start:end], k[:, :, :end], v[:, :, :end]
    if not is_text or not start:
        return scaled_dot_product_attention(q, k, v, is_causal=is_text)
    sees = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
    return scaled_dot_product_attention(q, k, v, sees)


def _turned(rows_BSHD: Tensor, rotary: Tensor) -> Tensor:
    """Pairs of features turned by the angles of their places."""
    pairs = torch.view_as_complex(rows_BSHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(-2).type_as(rows_BSHD)
