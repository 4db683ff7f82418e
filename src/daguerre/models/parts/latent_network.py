"""The contract of a kind of autoencoder: the differences between one library class and others.

A kind is a module of this folder; `models/parts/vae.py` chooses it by the class that a network's config names, and has
what all kinds share: the draw from the posterior, statistics of channels, and scaling. Shape letters: B samples, C
channels, H and W height and width.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from daguerre.models.weights.original_names import FileNames


class LatentNetwork(ABC):
    """A kind of autoencoder. It has no state."""

    library: ClassVar[Any]
    """The class of diffusers."""
    memory_format: ClassVar[torch.memory_format] = torch.channels_last
    """Memory layout of weights and latents. Channels last is 1.4 times as fast on a CPU."""

    names: ClassVar[FileNames | None] = None
    """Names that its authors' files have; None where they are those of Stable Diffusion's."""
    original: ClassVar[bool] = True
    """Whether its authors' files have other names than its library."""

    @abstractmethod
    def channels(self, net: Any) -> int:
        """Channels of a latent."""

    @abstractmethod
    def factor(self, net: Any) -> int:
        """Number by which each side of an image is divided."""

    @abstractmethod
    def posterior(self, net: Any, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance [B, C, h, w] of the posterior of pixels [B, 3, H, W] in [-1, 1]."""

    @abstractmethod
    def images(self, net: Any, z_BCHW: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in about [-1, 1] of latents."""
