"""A teacher: a frozen denoiser of the student's family that a loss learns from, named in the objective's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field

from daguerre.objectives.settings import NetworkSettings
from daguerre.settings import ADDRESS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from daguerre.objectives.networks.source import NetworkSource
    from daguerre.types import Cond

TEACHER = "teacher"
"""The teacher's role."""


class Guiding(Protocol):
    """The effect of a guidance scale on a network: the part of samplers/guidance.py that a loss calls."""

    def fault(self, scale: float) -> str:
        """The reason for which a scale is refused; "" for one that is allowed."""

    def with_scale(self, cond: Cond, scale_B: Tensor) -> Cond:
        """The conditioning with a scale [B], where the network reads one."""

    def guide(
        self, predict: Any, cond: Cond, null_cond: Cond | None, scale_B: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """The guided prediction (x, c_noise) -> y [B, C, h, w] of a network `predict`, called as a `Net`."""


class TeacherSettings(NetworkSettings):
    """Another model of the student's family, with its text encoders, whose denoiser the student learns from."""

    splits: ClassVar[bool] = True

    path: Annotated[str, ADDRESS] = Field(min_length=1)
    """A run's folder (its pipeline is read), a folder in diffusers' layout, a hub id, or a file of the denoiser's
    weights."""

    @property
    def place(self) -> str:
        return self.path

    def network(self, source: NetworkSource) -> Any:
        """The denoiser of that model, frozen. UserError for one of another family, or with other text encoders."""
        return source.teacher(self.path)


@dataclass(frozen=True, eq=False)
class Teacher:
    """A network that is called as a `Net` (objectives/objective.py), and what a guidance scale does to it."""

    net: Any
    guidance: Guiding

    def __call__(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """y [B, C, h, w] without guidance."""
        y_BCHW: Tensor = self.net(x_BCHW, c_noise_B, cond)
        return y_BCHW

    def guided(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, null: Cond, scale_B: Tensor) -> Tensor:
        """y [B, C, h, w] led from the conditioning of the empty caption to that of the captions, at a scale [B] in the
        family's notation."""
        return self.guidance.guide(self.net, cond, null, scale_B)(x_BCHW, c_noise_B)
