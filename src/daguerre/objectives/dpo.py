"""Objective `dpo`: of two images for a caption, the one that people prefer becomes the more likely one.

Diffusion-DPO (Wallace et al. 2023, arXiv 2311.12908, eq. 14). Both images get one noise at one level. The network may
reduce its squared error of the preferred image below that of the model before the first update (the reference), and
raise that of the rejected one; `beta` says how far it may go from the reference. Shape letters: B pairs.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from daguerre.objectives.algebra import DiffusionDraws, per_sample
from daguerre.objectives.objective import REFERENCE, Example, Needs, Net, Nets
from daguerre.objectives.wrapper import DiffusionWrapper, WrapperSettings
from daguerre.settings import Unused
from daguerre.types import IMAGE, REJECTED, Cond, LossTerms


class Settings(WrapperSettings):
    """Direct preference optimization, from pairs of images for one caption."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("mask",), lambda own: True, "pairs are compared as whole images"),
    )

    name: Literal["dpo"] = "dpo"
    """Preferences between images are learnt."""
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    """Strength of the hold to the model before training: less lets preferences move it further. It multiplies squared
    errors that are summed over a sample; programs that take means have this times the numbers of a sample, such as 2000
    for Stable Diffusion 1.5 (4 x 64 x 64 numbers: 0.12) and 5000 for SDXL (4 x 128 x 128: 0.076)."""

    @property
    def refers(self) -> bool:
        return True

    @model_validator(mode="after")
    def _compares_the_noise(self) -> Self:
        if self.diffusion.weighting.name != "none":
            raise ValueError(
                f"diffusion.weighting is {self.diffusion.weighting.name}: pairs are compared by errors of the noise, "
                "at all levels with one weight: remove it"
            )
        return self


@dataclass(frozen=True, eq=False)
class Preference(DiffusionWrapper):
    """-log sigmoid(-beta / 2 (D_preferred - D_rejected)), where D is the squared error of the noise less that of the
    reference, both summed over a sample."""

    needs = Needs(images=(REJECTED,), networks=(REFERENCE,))

    settings: Settings

    def loss(self, nets: Nets, example: Example[DiffusionDraws]) -> LossTerms:
        """The loss of B pairs; ln 2 before the first update."""
        names = (IMAGE, REJECTED)
        # Both images in one pass: a network that is split gathers its weights once for them.
        x0 = torch.cat([example.clean[name].float() for name in names])
        cond = {key: torch.cat([example.cond[name][key] for name in names]) for key in example.cond[IMAGE]}
        # One noise and one level for both images of a pair: what they have in common cancels.
        draws = DiffusionDraws.of({name: torch.cat([rows, rows]) for name, rows in example.draws.tensors.items()})
        # Before the student: what its pass keeps would be written over where parameters are split.
        reference = self.error_of_noise(nets[REFERENCE], x0, cond, draws)
        student = self.error_of_noise(nets.student, x0, cond, draws)
        # Subtracted element by element: the two sums are large and nearly the same.
        preferred_B, rejected_B = (student.square() - reference.square()).flatten(1).sum(1).chunk(2)
        margin_B = -0.5 * self.settings.beta * (preferred_B - rejected_B)
        loss_B = -logsigmoid(margin_B)
        metrics = {"preferred_more": (margin_B > 0).float(), "preference_margin": margin_B}
        return LossTerms(
            loss_B, example.draws.quantile, metrics={name: rows.detach() for name, rows in metrics.items()}
        )

    def error_of_noise(self, net: Net, x0: Tensor, cond: Cond, draws: DiffusionDraws) -> Tensor:
        """The noise as the network sees it, less the noise [2 B, C, h, w], whatever it predicts: a / d times its error
        (`Diffusion.solve`)."""
        factor_B = draws.a / (draws.a * draws.q - draws.s * draws.p)
        error = self.inner.error(net, x0, cond, draws)
        return per_sample(factor_B, error) * error


def build(settings: Settings) -> Preference:
    return Preference(settings.inner(), settings)
