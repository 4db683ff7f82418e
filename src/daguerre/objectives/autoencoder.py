"""Objective `autoencoder`: an image is made small and made again; no diffusion.

The loss of Kingma and Welling 2014 (arXiv 1312.6114) with absolute beside squared errors. The net gives the image
again and the KL of its latent; which networks do that is a family's affair.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from daguerre.objectives import masks
from daguerre.objectives.masks import ElementMean
from daguerre.objectives.objective import Net, Objective
from daguerre.objectives.settings import ObjectiveSettings
from daguerre.types import Cond, LossTerms


class Settings(ObjectiveSettings):
    """Reconstruction of images in [-1, 1] through a latent that stays near a normal law."""

    name: Literal["autoencoder"] = "autoencoder"
    """Images are reconstructed."""
    kl_weight: float = Field(1e-3, ge=0)
    """Weight of the latent's KL, a mean over its elements in nats: more makes latents smoother and images softer."""
    square_weight: float = Field(1.0, ge=0)
    """Weight of the mean squared error beside the mean absolute one."""


@dataclass(frozen=True, eq=False)
class Reconstruction(Objective):
    """mean |x' - x| + square_weight mean (x' - x)^2 + kl_weight KL, for each sample. Nothing is drawn: there is
    no noise level, and the latent's noise is the family's."""

    settings: Settings
    elements: ElementMean = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", masks.build(self.settings.mask))

    def loss(self, net: Net, x0_BCHW: Tensor, cond: Cond, draws: Mapping[str, Tensor]) -> LossTerms:
        """The loss of images [B, 3, H, W]; the net gives (reconstruction [B, 3, H, W], KL [B])."""
        x_BCHW, nowhere_B = x0_BCHW.float(), x0_BCHW.new_zeros(len(x0_BCHW), dtype=torch.float32)
        given: Any = net(x_BCHW, nowhere_B, cond)
        again_BCHW, kl_B = given[0].float(), given[1].float()
        absolute_B = self.elements.mean((again_BCHW - x_BCHW).abs(), draws)
        square_B = self.elements.mean((again_BCHW - x_BCHW).square(), draws)
        loss_B = absolute_B + self.settings.square_weight * square_B + self.settings.kl_weight * kl_B
        metrics = {"absolute_error": absolute_B.detach(), "square_error": square_B.detach(), "kl": kl_B.detach()}
        return LossTerms(loss_B=loss_B, quantile_B=nowhere_B, metrics=metrics)


def build(settings: Settings) -> Reconstruction:
    return Reconstruction(settings)
