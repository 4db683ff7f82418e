"""Objective `output_preservation`: what is learnt of the data must not change what the model makes of a class caption.

The loss of diffusion on the data, and the squared distance between two predictions for another caption, of the same
noisy sample: that of the student and that of the model before its first update. It does what class images do, without
any: ai-toolkit's `diff_output_preservation`, and with an empty caption its `blank_prompt_preservation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from daguerre.objectives.algebra import DiffusionDraws
from daguerre.objectives.objective import REFERENCE, Example, Needs, Net, Nets
from daguerre.objectives.wrapper import DiffusionWrapper, WrapperSettings
from daguerre.types import IMAGE, LossTerms


class Settings(WrapperSettings):
    """Diffusion that keeps what the model before training predicts for a class caption."""

    name: Literal["output_preservation"] = "output_preservation"
    """The data are learnt, and predictions for the class caption stay."""
    caption: str = ""
    """The class caption, such as "a photo of a dog" where captions name one dog. Empty: the empty caption."""
    strength: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor of the mean squared distance of both predictions for it."""

    @property
    def refers(self) -> bool:
        return True

    @model_validator(mode="after")
    def _has_a_distance_of_its_own(self) -> Self:
        return self  # of what is kept alone: what is learnt has that of the objective inside


@dataclass(frozen=True, eq=False)
class Preservation(DiffusionWrapper):
    """The inner loss + strength |f(x_t, class caption) - f_before(x_t, class caption)|^2, mean over all elements."""

    settings: Settings
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        needs = Needs(networks=(REFERENCE,), null=True, null_caption=self.settings.caption)
        object.__setattr__(self, "needs", needs)

    def loss(self, nets: Nets, example: Example[DiffusionDraws]) -> LossTerms:
        """The loss of B samples; the distance is 0 before the first update, and not masked."""
        with torch.no_grad():  # before the student's own passes, as roles are called by exchanging memory with it
            before = self._error(nets[REFERENCE], example)
        torch.clear_autocast_cache()  # narrow copies of weights that a pass without gradient has made have no gradient
        # The target is the same in both errors, so their difference is that of the predictions.
        apart_B = (self._error(nets.student, example) - before).square().flatten(1).mean(1)
        terms = self.inner.loss(nets, example)
        # What learnt weights of noise levels observe stays the loss of the data.
        loss_B = terms.loss_B + self.settings.strength * apart_B
        return replace(terms, loss_B=loss_B, metrics={**terms.metrics, "preserved_apart": apart_B.detach()})

    def _error(self, net: Net, example: Example[DiffusionDraws]) -> Tensor:
        return self.inner.error(net, example.clean[IMAGE], example.null[IMAGE], example.draws)


def build(settings: Settings) -> Preservation:
    return Preservation(settings.inner(), settings)
