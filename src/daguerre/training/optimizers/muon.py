"""Muon (Jordan et al. 2024) for matrices, torch's code at AdamW's learning rate; AdamW for everything else."""

import math
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from pydantic import Field

from daguerre.errors import UserError
from daguerre.settings import Unused
from daguerre.training.optimizers import adamw
from daguerre.training.optimizers.groups import Parameters, check, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart
from daguerre.training.settings import OptimizerSettings


class Settings(OptimizerSettings):
    """Muon for matrices, whose steps are made orthogonal; AdamW for convolutions, biases, norms and what is named.

    Steps are scaled to the size of AdamW's (arXiv 2502.16982), so one learning rate and weight decay serve both.
    """

    unused_when: ClassVar[tuple[Unused, ...]] = (
        *OptimizerSettings.unused_when,
        Unused(("nesterov",), lambda own: own.momentum == 0, "no effect while momentum is 0"),
    )

    name: Literal["muon"] = "muon"
    """Name of the optimizer."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon: decay of the momentum."""
    nesterov: bool = True
    """Muon: look ahead along the momentum."""
    ns_steps: int = Field(5, ge=1, le=20)
    """Muon: Newton-Schulz iterations that make a step orthogonal."""
    adamw_for: list[str] = Field([])
    """Matrices that AdamW moves as well, by patterns of their names, such as embeddings."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the second moment."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """Muon's part, then AdamW's. UserError if no matrix is trained."""
    check(settings.adamw_for, trained, "optimizer.adamw_for")
    matrices = {name: p for name, p in trained.items() if _is_muons(settings, name, p.ndim)}
    if not matrices:
        raise UserError(
            "optimizer.name=muon: none of the trained parameters is a matrix; use optimizer.name=adamw",
            code="empty",
            setting="optimizer.name",
        )
    others = {name: p for name, p in trained.items() if name not in matrices}
    muon = torch.optim.Muon(
        decay_groups(settings, matrices),
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )
    betas = (settings.beta1, settings.beta2)
    rest = [adamw.part(decay_groups(settings, others), betas, settings.epsilon)] if others else []
    return [OptimizerPart(muon, "restored"), *rest]


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the state of one parameter: Muon's momentum, or what AdamW keeps."""
    return 4 * math.prod(shape) if _is_muons(settings, name, len(shape)) else 8 * math.prod(shape) + 4


def _is_muons(settings: Settings, name: str, dims: int) -> bool:
    return dims == 2 and not any(fnmatchcase(name, pattern) for pattern in settings.adamw_for)
