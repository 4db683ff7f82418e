"""Base of the objectives that are a loss around diffusion: preferences, distillation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import Field, SerializeAsAny

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion, DiffusionDraws
from daguerre.objectives.masks import ElementMean
from daguerre.objectives.objective import Objective
from daguerre.objectives.settings import DiffusionSettings, ObjectiveSettings
from daguerre.settings import Plugin
from daguerre.types import Stateful


class WrapperSettings(ObjectiveSettings):
    """Base of the `Settings` of these objectives."""

    diffusion: Annotated[
        SerializeAsAny[DiffusionSettings], Plugin("objectives", "name", DiffusionSettings, default="eps")
    ] = Field({"name": "eps"})  # type: ignore[assignment]  # a mapping, so that nothing is imported here
    """The diffusion objective inside: what the network predicts, the noise levels and the noise."""

    def inner(self) -> Diffusion:
        """The objective inside."""
        built: Diffusion = plugins.find("objectives", self.diffusion.name).build(self.diffusion)
        return built


@dataclass(frozen=True, eq=False)
class DiffusionWrapper(Objective):
    """A loss around a diffusion objective, whose noise levels, random numbers, element means and learnt weights it
    has. A subclass adds its fields and `loss`; it then samples, exports and validates as the inner objective does."""

    drawn: ClassVar[type[DiffusionDraws]] = DiffusionDraws

    inner: Diffusion
    learnt: Stateful = field(init=False)
    elements: ElementMean = field(init=False)

    def __post_init__(self) -> None:
        # Set again by every `replace`: a copy of the inner objective has learnt weights of its own.
        object.__setattr__(self, "learnt", self.inner.learnt)
        object.__setattr__(self, "elements", self.inner.elements)

    @property
    def diffusion(self) -> Diffusion:
        return self.inner

    def with_diffusion(self, diffusion: Diffusion) -> Self:
        return replace(self, inner=diffusion)

    def draws(
        self, seed: int, keys: np.ndarray, shape: tuple[int, ...], *, quantile: float | None = None
    ) -> DiffusionDraws:
        return self.inner.draws(seed, keys, shape, quantile=quantile)
