"""Images as they are: the codec of families whose clean samples are pixels in [-1, 1].

Shape letters: B samples, C channels, H and W height and width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from daguerre.models.family import Moments
from daguerre.types import Latents


@dataclass(frozen=True)
class PixelCodec:
    """Scales uint8 to [-1, 1] and back; needs no random numbers."""

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        return pixel_shape

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        return {}

    def encode(self, pixels_BCHW: Tensor) -> Moments:
        """`mean` [B, 3, H, W] float32 in [-1, 1], channels last."""
        return {"mean": scaled(pixels_BCHW)}

    def latents(self, moments: Moments, random_inputs: Mapping[str, Tensor]) -> Tensor:
        return moments["mean"]

    def decode(self, latents: Latents) -> Tensor:
        return levels(latents.x0_BCHW)


def scaled(pixels_BCHW: Tensor) -> Tensor:
    """uint8 as float32 in [-1, 1], channels last."""
    # 0 and 255 become -1 and 1 exactly.
    return pixels_BCHW.to(torch.float32, memory_format=torch.channels_last) / 127.5 - 1


def channels(numbers: Sequence[float], like: Tensor) -> Tensor:
    """A number a channel, [C, 1, 1] of the type and on the device of a tensor. Filled there: numbers that are copied to
    a GPU are waited for."""
    return torch.stack([like.new_full((1, 1), number) for number in numbers])


def levels(pixels_BCHW: Tensor) -> Tensor:
    """Images [B, H, W, 3] uint8 of pixels in [-1, 1], rounded as diffusers' VaeImageProcessor does."""
    levels_BCHW = ((pixels_BCHW / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    # Contiguous: encoders of image files take rows that follow one another.
    return levels_BCHW.permute(0, 2, 3, 1).contiguous()
