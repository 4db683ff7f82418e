"""Objective `contrastive`: in a batch, each caption finds its image and each image its caption; no diffusion.

The loss of CLIP (Radford et al. 2021, arXiv 2103.00020, figure 3). The net gives the similarities; the encoders are a
family's affair.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.nn.functional import cross_entropy

from daguerre.objectives.objective import Example, Nets, Objective
from daguerre.objectives.settings import ObjectiveSettings
from daguerre.settings import Unused
from daguerre.types import IMAGE, LossTerms


class Settings(ObjectiveSettings):
    """Matching of captions and images within a micro-batch, so that its size matters: larger ones teach more."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("mask",), lambda own: True, "whole images are compared, so single pixels have no error"),
    )

    name: Literal["contrastive"] = "contrastive"
    """Captions and images are matched."""


@dataclass(frozen=True, eq=False)
class Matching(Objective):
    """Mean of the cross entropies over a caption's row and an image's column of similarities."""

    couples_samples: ClassVar[bool] = True

    def loss(self, nets: Nets, example: Example[Any]) -> LossTerms:
        """The loss of B pairs; the net gives their similarities [B, B], captions by images."""
        x0_BCHW, cond = example.clean[IMAGE], example.cond[IMAGE]
        nowhere_B = x0_BCHW.new_zeros(len(x0_BCHW), dtype=torch.float32)
        similar_BB = nets.student(x0_BCHW, nowhere_B, cond).float()
        own_B = torch.arange(len(similar_BB), device=similar_BB.device)
        by_caption_B = cross_entropy(similar_BB, own_B, reduction="none")
        by_image_B = cross_entropy(similar_BB.T, own_B, reduction="none")
        found_B = (similar_BB.detach().argmax(1) == own_B).float()
        return LossTerms(0.5 * (by_caption_B + by_image_B), quantile_B=nowhere_B, metrics={"found": found_B})


def build(settings: Settings) -> Matching:
    """The objective of these settings, which has none but its name."""
    return Matching()
