"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), transformers' code at a learning rate of ours."""

import math
from typing import Literal

from pydantic import Field
from transformers.optimization import Adafactor

from daguerre.training.optimizers.groups import Parameters, decay_groups
from daguerre.training.optimizers.optimizer import OptimizerPart
from daguerre.training.settings import OptimizerSettings


class Settings(OptimizerSettings):
    """Adafactor (Shazeer and Stern 2018): the second moment of a matrix is kept as its rows' and columns' means."""

    name: Literal["adafactor"] = "adafactor"
    """Name of the optimizer."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate; neither scaled by the size of the weights nor by the count of updates."""
    beta1: float | None = Field(None, ge=0, lt=1)
    """Decay of a first moment, which costs the memory of the weights; null for none."""
    decay_rate: float = Field(0.8, gt=0, le=1)
    """The second moment's decay at update t is 1 - t^-decay_rate."""
    epsilon: float = Field(1e-30, gt=0)
    """Added to the squared gradient."""
    clip_threshold: float = Field(1.0, gt=0)
    """Root mean square above which a tensor's update is scaled down."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, applied to matrices and convolution kernels, not to biases and norms."""


def build(settings: Settings, trained: Parameters) -> list[OptimizerPart]:
    """One part, whose weights and moments are copied around each update."""
    optimizer = Adafactor(
        decay_groups(settings, trained),
        eps=(settings.epsilon, 1e-3),  # the second one is read with scale_parameter alone
        clip_threshold=settings.clip_threshold,
        decay_rate=-settings.decay_rate,  # transformers wants it with its sign
        beta1=settings.beta1,
        scale_parameter=False,
        relative_step=False,
        warmup_init=False,
    )
    return [OptimizerPart(optimizer, "restored")]


def state_bytes(settings: Settings, name: str, shape: tuple[int, ...]) -> int:
    """Bytes of one parameter's state: the second moment (of its last two dims the means of rows and columns), the first
    moment where there is one, and the size of the weights, which the library notes."""
    second = math.prod(shape)
    if len(shape) >= 2:
        second = math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]
    return 4 * (second + (0 if settings.beta1 is None else math.prod(shape)) + 1)
