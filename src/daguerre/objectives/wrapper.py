"""Base of the objectives that are a loss around diffusion: preferences, distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion, DiffusionDraws
from daguerre.objectives.masks import ElementMean
from daguerre.objectives.objective import Objective
from daguerre.objectives.settings import DiffusionSettings, NetworkSettings, ObjectiveSettings
from daguerre.settings import Plugin
from daguerre.types import Stateful


class WrapperSettings(ObjectiveSettings):
    """Base of the `Settings` of these objectives."""

    diffusion: Annotated[
        SerializeAsAny[DiffusionSettings], Plugin("objectives", "name", DiffusionSettings, default="eps")
    ] = Field({"name": "eps"})  # type: ignore[assignment]  # a mapping, so that nothing is imported here
    """The diffusion objective inside: what the network predicts, the noise levels and the noise."""

    @model_validator(mode="after")
    def _mask_is_around(self) -> Self:
        # One place for it: what checks and loads masks reads `objective.mask`, whatever the objective.
        if self.diffusion.mask is not None:
            why = self.unused().get("mask")
            raise ValueError(
                "diffusion.mask has no effect: " + (f"{why}: remove it" if why else "set objective.mask in its place")
            )
        return self

    @model_validator(mode="after")
    def _has_a_distance_of_its_own(self) -> Self:
        if self.diffusion.loss.name != "l2":
            raise ValueError(f"diffusion.loss has no effect: {self.name} has a distance of its own: remove it")
        return self

    @property
    def networks(self) -> Mapping[str, NetworkSettings]:
        """The networks that fields of these settings name, such as `teacher`: the field is the role."""
        return {name: own for name, own in self if isinstance(own, NetworkSettings)}

    def in_use(self) -> Self:
        """The settings without any of them: a subclass that trains one keeps it."""
        return self.model_copy(update=dict.fromkeys(self.networks))

    def inner(self) -> Diffusion:
        """The objective inside, with the masks of the one around."""
        own = self.diffusion.model_copy(update={"mask": self.mask})
        built: Diffusion = plugins.find("objectives", own.name).build(own)
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
