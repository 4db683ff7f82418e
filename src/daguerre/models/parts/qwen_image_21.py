"""diffusers' QwenImage21Transformer2DModel, for text alone: its forward pass as a function of shapes.

The library's own finds where text and images lie in the sequence by values of a mask on the device, which is waited for
in every call, and which has no values where only shapes are computed. Shape letters: B samples, C channels, H and W
height and width of latents, T tokens of text, S tokens of text and image, D features.
"""

from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor


class TextToImage(QwenImage21Transformer2DModel):
    """The transformer of Qwen-Image-2.1. The sequence is text, of which each token sees those before it, and behind it
    the image, which sees all. Text is modulated as at time 0, so it does not depend on the noise level."""

    def forward(self: Any, x_BCHW: Tensor, time_B: Tensor, text_BTD: Tensor) -> Tensor:
        """The velocity [B, C, H, W] of noisy latents. All T tokens of every text are read: their number is also the
        place of the image, so that padding would be another input."""
        (_, _, height, width), n_text = x_BCHW.shape, text_BTD.shape[1]
        image_BSD = self.img_in(x_BCHW.flatten(2).transpose(1, 2))
        hidden_BSD = torch.cat([self.txt_in(text_BTD), image_BSD], 1)
        time_B, is_image_S = time_B.to(hidden_BSD.dtype), None
        if self.config.causal_condition:  # one row more: that of time 0, for the text
            time_B = torch.cat([time_B, time_B.new_zeros(1)])
            is_image_S = torch.arange(hidden_BSD.shape[1], device=hidden_BSD.device) >= n_text
        time_BD = self.time_text_embed(time_B, hidden_BSD)
        modulation_BD, rotary = self.modulation(time_BD), self._rotary(n_text, height, width, hidden_BSD.device)
        # attention's mask, the image's tokens, caches of keys (none), and the stretches: one of text
        more = rotary, None, is_image_S, None, None, None, [(0, n_text, True)], None
        for block in self.transformer_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_BSD = self._gradient_checkpointing_func(block, hidden_BSD, modulation_BD, *more)
            else:
                hidden_BSD = block(hidden_BSD, modulation_BD, *more)
        is_image_S = None if is_image_S is None else is_image_S[n_text:]
        y_BSC = self.proj_out(self.norm_out(hidden_BSD[:, n_text:], time_BD, is_image_S))
        return y_BSC.transpose(1, 2).unflatten(2, (height, width))

    def _rotary(self: Any, n_text: int, height: int, width: int, device: torch.device) -> Tensor:
        """[S, D / 2] complex: three axes, on which text has its place in the order, and the image its frame's place
        behind the text, and rows and columns around 0."""
        text_T = torch.arange(n_text, device=device)
        row_H = torch.arange(height, device=device) - (height - height // 2)
        column_W = torch.arange(width, device=device) - (width - width // 2)
        on_image = (
            torch.full((height, width), n_text, device=device),
            row_H[:, None].expand(height, width),
            column_W[None].expand(height, width),
        )
        axes = []
        for dim, places in zip(self.config.axes_dims_rope, on_image, strict=True):
            place_S = torch.cat([text_T, places.flatten()])
            periods = torch.pow(self.pos_embed.theta, torch.arange(0, dim, 2, device=device).float() / dim)
            angles = torch.outer(place_S, 1.0 / periods)
            axes.append(torch.polar(torch.ones_like(angles), angles))
        return torch.cat(axes, -1)


# It is the library's class for all that reads its name: configs, indexes of pipelines, files of adapters.
TextToImage.__name__ = TextToImage.__qualname__ = QwenImage21Transformer2DModel.__name__
TextToImage.__module__ = QwenImage21Transformer2DModel.__module__
