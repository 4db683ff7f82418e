"""The loss of an objective on clean samples of one image, for tests of formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from daguerre.objectives.objective import Draws, Example, Nets, Objective
from daguerre.types import IMAGE, Cond, LossTerms


def loss_of(
    objective: Objective, net: Any, x0: Tensor, cond: Cond, draws: Draws | Mapping[str, Tensor], **others: Any
) -> LossTerms:
    """`others` are the further networks by role."""
    drawn = draws if isinstance(draws, Draws) else objective.drawn.of(draws)
    return objective.loss(Nets(net, others), Example({IMAGE: x0}, {IMAGE: cond}, drawn))
