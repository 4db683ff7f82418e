"""The mean of an error over a sample's elements: all equally, or each by the sample's mask.

Shape letters: B samples, C channels, H and W height and width of images, h and w those of clean samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from daguerre.objectives.settings import MaskSettings
from daguerre.types import MASK

_WEIGHT = "element_weight"
"""The field of `objective.Draws` by which the weights travel."""


class ElementMean(Protocol):
    """The mean that an objective with an error for each element calls."""

    @property
    def images(self) -> tuple[str, ...]:
        """Further images that a batch must hold for it."""

    def draws(self, images: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The inputs that `mean` needs of images [B, C, H, W] uint8, for clean samples of this shape (C, h, w)."""

    def mean(self, error_BCHW: Tensor, weight_B1HW: Tensor | None) -> Tensor:
        """[B]: the mean over the elements of each sample, with the weights that `draws` gave."""


class UniformMean:
    """Every element counts equally."""

    images: tuple[str, ...] = ()

    def draws(self, images: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """{}: no input is needed."""
        return {}

    def mean(self, error_BCHW: Tensor, weight_B1HW: Tensor | None) -> Tensor:
        """The plain mean."""
        return error_BCHW.flatten(1).mean(1)


@dataclass(frozen=True)
class Masked:
    """Elements count by their sample's mask: w = max(mask, outside_weight), 1 without a mask."""

    settings: MaskSettings
    images: tuple[str, ...] = (MASK,)

    def draws(self, images: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """`element_weight` [B, 1, h, w] float32: the mask, area-averaged to the size of a clean sample."""
        # With the draws, on the CPU and a batch ahead, at the size of a clean sample: no formula of a loss knows of
        # masks.
        mask_B1hw = adaptive_avg_pool2d(images[MASK].float() / 255.0, (shape[-2], shape[-1]))
        return {_WEIGHT: mask_B1hw.clamp(min=self.settings.outside_weight).contiguous()}

    def mean(self, error_BCHW: Tensor, weight_B1HW: Tensor | None) -> Tensor:
        """mean(w e); with `normalise` sum(w e) / sum(w), and 0 where all weights are 0."""
        assert weight_B1HW is not None, "draws has given it"
        mean_B = (weight_B1HW * error_BCHW).flatten(1).mean(1)
        if not self.settings.normalise:
            return mean_B
        whole_B = weight_B1HW.flatten(1).mean(1)
        return mean_B / torch.where(whole_B > 0, whole_B, 1.0)


def build(settings: MaskSettings | None) -> ElementMean:
    """The mean that these settings ask for."""
    return UniformMean() if settings is None else Masked(settings)
