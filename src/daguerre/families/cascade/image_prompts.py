"""CLIP's embedding of an image, by which Stage C can be prompted.

Shape letters: B images, P features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from daguerre.models.family import Moments
from daguerre.models.pixel_codec import channels
from daguerre.types import IMAGE_PROMPT, Batch, Cond, Prompt

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, eq=False)
class ImagePrompts:
    """The image embedding of Stage C; zeros without an image."""

    width: int
    """P."""
    encoder: Any = None
    """transformers' CLIPVisionModelWithProjection, frozen; None: every embedding is zeros."""

    def embedding(self, pixels_BCHW: Tensor) -> Tensor:
        """[B, P] of uint8 images: their middle square at the encoder's size, bicubic, by CLIP's statistics."""
        side, (height, width) = self.encoder.config.image_size, pixels_BCHW.shape[2:]
        share = side / min(height, width)
        size = (max(side, round(height * share)), max(side, round(width * share)))
        x_BCHW = functional.interpolate(pixels_BCHW.float() / 255, size, mode="bicubic", antialias=True)
        top, left = ((own - side) // 2 for own in size)
        x_BCHW = x_BCHW[:, :, top : top + side, left : left + side]
        mean, std = (channels(numbers, x_BCHW) for numbers in (_MEAN, _STD))
        return self.encoder((x_BCHW - mean) / std).image_embeds

    @torch.no_grad()
    def of_batch(self, batch: Batch, moments: Moments) -> Cond:
        """`image` [B, P] of a batch: the embedding of each sample that keeps it."""
        if self.encoder is None:
            return {"image": moments["mean"].new_zeros(len(batch.keys), self.width)}
        return {"image": batch.draws["image_kept"][:, None] * moments["embedding"]}

    @torch.no_grad()
    def of_prompts(self, prompts: Sequence[Prompt], pixel_shape: tuple[int, ...], unguided: bool) -> Cond:
        """`image` [B, P] of prompts; zeros where they have no such image, and on the unguided side."""
        rows = torch.zeros(len(prompts), self.width)
        for row, prompt in enumerate(prompts):
            if IMAGE_PROMPT in prompt.images and not unguided:
                pixels_CHW = torch.from_numpy(np.ascontiguousarray(prompt.images[IMAGE_PROMPT])).permute(2, 0, 1)
                rows[row] = self.embedding(pixels_CHW[None].to(self.encoder.device))[0].cpu()
        return {"image": rows}
