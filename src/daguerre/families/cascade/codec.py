"""Images to the latents of Stable Cascade's stages and back.

Stage C trains on what an EfficientNet makes of an image, Stage B on what Stage A makes of it. All networks here are
frozen and compute in float32. Shape letters: B samples, C channels, H and W height and width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from daguerre import keys as keyed
from daguerre.errors import UserError
from daguerre.families.cascade.image_prompts import ImagePrompts
from daguerre.models.family import Moments
from daguerre.models.pixel_codec import channels
from daguerre.types import Latents

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STAGE_A_PX = 4
"""Pixels of an image for each cell of Stage A's latent."""
STEP_PX = 8
"""Sides of images that Stage B decodes are multiples of this: of a cell of Stage A and a patch of two cells."""


def compressed(effnet: Any, pixels_BCHW: Tensor) -> Tensor:
    """Stage C's latents [B, 16, H/32, W/32] of RGB images in [0, 1]."""
    mean, std = (channels(numbers, pixels_BCHW) for numbers in (_IMAGENET_MEAN, _IMAGENET_STD))
    return effnet((pixels_BCHW - mean) / std)


def levels(pixels_BCHW: Tensor) -> Tensor:
    """Images [B, H, W, 3] uint8 of RGB in [0, 1]."""
    return (pixels_BCHW.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def resized(pixels_BCHW: Tensor, height: int, width: int) -> Tensor:
    """Images at another size, bicubic, where they shrink with the filter widened."""
    if pixels_BCHW.shape[2:] == (height, width):
        return pixels_BCHW
    return functional.interpolate(pixels_BCHW, (height, width), mode="bicubic", antialias=True).clamp(0, 1)


def check_sides(pixel_shape: tuple[int, ...], step: int, stage: str) -> None:
    """UserError for images whose sides do not divide."""
    _, height, width = pixel_shape
    if height % step or width % step:
        raise UserError(
            f"images of {height}x{width} px do not fit {stage} of Stable Cascade, which needs sides that are multiples "
            f"of {step}: set data.resolution and data.buckets.step to multiples of {step} (for generating: height and "
            "width)",
            setting="data.resolution",
        )


class Decoder(Protocol):
    """Stage C's latents to images: the previewer, or Stage B and Stage A."""

    def __call__(self, latents: Latents, size_px: tuple[int, int]) -> Tensor:
        """RGB in [0, 1], [B, 3, H, W] of this height and width."""


@dataclass(frozen=True, eq=False)
class Preview:
    """The previewer's image, which is a quarter of what is trained on, enlarged."""

    net: Any

    def __call__(self, latents: Latents, size_px: tuple[int, int]) -> Tensor:
        return resized(self.net(latents.x0_BCHW.float()), *size_px)


@dataclass(frozen=True, eq=False)
class Compressed:
    """Images that Stage C is trained on."""

    effnet: Any
    decoder: Decoder
    prompts: ImagePrompts
    image_dropout: float
    """Share of samples without an image embedding."""

    @property
    def networks(self) -> dict[str, nn.Module]:
        encoder = self.prompts.encoder
        return {"effnet": self.effnet} | ({} if encoder is None else {"image_encoder": encoder})

    def rules(self) -> dict[str, Any]:
        """Nothing: which embeddings are left out is drawn after the moments."""
        return {}

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        stride = int(self.effnet.stride)
        check_sides(pixel_shape, stride, "Stage C")
        _, height, width = pixel_shape
        return int(self.effnet.config.latent_channels), height // stride, width // stride

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`image_kept` [B]: 1 for samples whose CLIP image embedding the network gets, too, else 0."""
        if self.prompts.encoder is None:
            return {}
        kept_B = keyed.batch_uniforms(seed, "image embedding", keys) >= self.image_dropout
        return {"image_kept": torch.from_numpy(kept_B).float()}

    def encode(self, pixels_BCHW: Tensor) -> Moments:
        """`mean` [B, 16, H/32, W/32] of uint8 images, and `embedding` [B, P] by CLIP where there is its encoder."""
        moments = {"mean": compressed(self.effnet, pixels_BCHW.float() / 255)}
        if self.prompts.encoder is not None:
            moments["embedding"] = self.prompts.embedding(pixels_BCHW)
        return moments

    def latents(self, moments: Moments, random_inputs: Mapping[str, Tensor]) -> Tensor:
        return moments["mean"].contiguous()

    def decode(self, latents: Latents) -> Tensor:
        height, width = (int(self.effnet.stride) * cells for cells in latents.x0_BCHW.shape[2:])
        return levels(self.decoder(latents, latents.size_px or (height, width)))


@dataclass(frozen=True, eq=False)
class Generated:
    """Images that are generated by Stage C, larger than those that it was trained on."""

    trained_on: Compressed
    resolution_multiple: float
    """Pixels of an image for each cell of the latent; diffusers' name."""

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        check_sides(pixel_shape, STEP_PX, "what decodes Stage C")
        _, height, width = pixel_shape
        channels = int(self.trained_on.effnet.config.latent_channels)
        return channels, ceil(height / self.resolution_multiple), ceil(width / self.resolution_multiple)

    def trained_px(self, size_px: tuple[int, int]) -> tuple[int, int]:
        _, height, width = self.latent_shape((3, *size_px))
        stride = int(self.trained_on.effnet.stride)
        return stride * height, stride * width

    def generated_px(self, size_px: tuple[int, int]) -> tuple[int, int]:
        """Of the largest image."""
        cells = (side // int(self.trained_on.effnet.stride) for side in size_px)
        height, width = (int(number * self.resolution_multiple) // STEP_PX * STEP_PX for number in cells)
        return height, width

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        return {}

    def encode(self, pixels_BCHW: Tensor) -> Moments:
        """The moments of images at the size that such a latent has in training."""
        sides = self.trained_px((pixels_BCHW.shape[2], pixels_BCHW.shape[3]))
        pixels_BCHW = resized(pixels_BCHW.float() / 255, *sides)
        return {"mean": compressed(self.trained_on.effnet, pixels_BCHW)}

    def latents(self, moments: Moments, random_inputs: Mapping[str, Tensor]) -> Tensor:
        return moments["mean"]

    def decode(self, latents: Latents) -> Tensor:
        sides = (round(cells * self.resolution_multiple / STEP_PX) * STEP_PX for cells in latents.x0_BCHW.shape[2:])
        height, width = latents.size_px or sides
        return levels(self.trained_on.decoder(latents, (height, width)))


@dataclass(frozen=True, eq=False)
class StageA:
    """Images that Stage B is trained on."""

    net: Any
    """PaellaVQModel; latents are what it makes, not quantised, divided by its scale_factor."""
    effnet_dropout: float
    """Share of samples whose compressed image Stage B does not get."""

    def latent_shape(self, pixel_shape: tuple[int, ...]) -> tuple[int, ...]:
        check_sides(pixel_shape, STEP_PX, "Stage B")
        _, height, width = pixel_shape
        return int(self.net.config.latent_channels), height // STAGE_A_PX, width // STAGE_A_PX

    def random_inputs(self, seed: int, keys: np.ndarray, pixel_shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`effnet_kept` [B]: 0 for samples whose compressed image is dropped, else 1."""
        kept_B = keyed.batch_uniforms(seed, "effnet", keys) >= self.effnet_dropout
        return {"effnet_kept": torch.from_numpy(kept_B).float()}

    def encode(self, pixels_BCHW: Tensor) -> Moments:
        """`mean` [B, 4, H/4, W/4] of uint8 images."""
        return {"mean": self.net.encode(pixels_BCHW.float() / 255, return_dict=False)[0]}

    def latents(self, moments: Moments, random_inputs: Mapping[str, Tensor]) -> Tensor:
        return (moments["mean"] / self.net.config.scale_factor).contiguous()

    def decode(self, latents: Latents) -> Tensor:
        return levels(pixels(self.net, latents.x0_BCHW))


def pixels(vqgan: Any, x0_BCHW: Tensor) -> Tensor:
    """RGB in [0, 1] of Stage A's latents, as Stage B samples them."""
    return vqgan.decode(x0_BCHW.float() * vqgan.config.scale_factor, return_dict=False)[0].clamp(0, 1)


def read_by_stage_b(effnet: Any, pixels_BCHW: Tensor, scales: Sequence[float], cells: tuple[int, int]) -> Tensor:
    """Compressed images [B, 16, *cells], as Stage B reads them, of uint8 images: each scaled by its number (nearest, to
    multiples of the encoder's stride), compressed, and brought to `cells`, the size at which Stage B takes it in
    (bilinear, corners aligned)."""
    sizes = [scaled_size(effnet, pixels_BCHW, scale) for scale in scales]
    found: list[Tensor] = [torch.empty(0)] * len(sizes)
    for size in dict.fromkeys(sizes):
        rows = [row for row, own in enumerate(sizes) if own == size]
        # A list as an index would be copied to the device, which the host would wait for.
        made = at_cells(effnet, scaled(torch.cat([pixels_BCHW[row : row + 1] for row in rows]), size), cells)
        for row, own in zip(rows, made, strict=True):
            found[row] = own
    return torch.stack(found)


def scaled_size(effnet: Any, pixels_BCHW: Tensor, scale: float) -> tuple[int, int]:
    """Height and width of images that are scaled by a number, down to multiples of the encoder's stride."""
    stride = int(effnet.stride)
    height, width = (max(stride, int(side * scale) // stride * stride) for side in pixels_BCHW.shape[2:])
    return height, width


def scaled(pixels_BCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 images as RGB in [0, 1] of this size, by the nearest pixel."""
    return functional.interpolate(pixels_BCHW.float() / 255, size, mode="nearest")


def at_cells(effnet: Any, pixels_BCHW: Tensor, cells: tuple[int, int]) -> Tensor:
    """Compressed images, at the size at which Stage B takes them in, of RGB in [0, 1]."""
    return functional.interpolate(compressed(effnet, pixels_BCHW), cells, mode="bilinear", align_corners=True)
