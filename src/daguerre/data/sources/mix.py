"""Several sources beside each other, each drawn in proportion to its weight and each with its own repeats, filters and
captions.

A mix is no source itself: `daguerre.data.dataset` opens its members. What shapes a batch is the mix's; what chooses
samples and words is each member's.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from daguerre.data.settings import SourceSettings
from daguerre.settings import Idle, Plugin

SHARED: tuple[str, ...] = (
    "resolution",
    "buckets",
    "crop",
    "random_flip",
    "interpolation",
    "formats",
    "alpha_colour",
    "max_skipped",
)
SHARED += ("cache_dir", "cache_gb")
"""Settings of a mix that hold for all its members."""
LEAST_SHARE = 1e-6
"""Least share of the samples that a source may have."""


class Settings(SourceSettings):
    """Several sources by name, such as `sources: {photos: {source: folder, path: DIR}, art: {...}}`."""

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(
            tuple(name for name in SourceSettings.model_fields if name not in {"source", *SHARED}),
            lambda own: True,
            "each of the sources has its own (sources.NAME), a mix has none",
        ),
    )

    source: Literal["mix"] = "mix"
    """Name of this source."""
    sources: dict[str, Annotated[SerializeAsAny[SourceSettings], Plugin("sources", "source", SourceSettings)]] = Field(
        min_length=1
    )
    """The sources by a name of your own, each with the settings of its kind."""
    weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field({})
    """How often each source is drawn, in any scale, by its name; 1 for those that are not named. Within a source every
    sample comes equally often."""

    @field_validator("sources")
    @classmethod
    def _each_its_own(cls, sources: dict[str, SourceSettings]) -> dict[str, SourceSettings]:
        for name, settings in sources.items():
            if settings.source == "mix":
                raise ValueError(f"{name} is a mix itself: list its sources here")
            shared = [field for field in SHARED if field in settings.model_fields_set]
            if shared:
                raise ValueError(f"{name}: {', '.join(shared)} is the same for all sources: set it in the mix itself")
        return sources

    @field_serializer("sources", mode="wrap")
    def _without_shared(self, sources: Any, handler: SerializerFunctionWrapHandler) -> Any:
        return {
            name: {field: value for field, value in settings.items() if field not in SHARED}
            for name, settings in handler(sources).items()
        }

    @model_validator(mode="after")
    def _fits(self) -> Self:
        unknown = sorted(set(self.weights) - set(self.sources))
        if unknown:
            raise ValueError(f"weights: there is no source {', '.join(unknown)}; there are {', '.join(self.sources)}")
        for name, share in zip(self.sources, self.shares(), strict=True):
            if share / sum(self.shares()) < LEAST_SHARE:
                raise ValueError(f"weights: {name} would be drawn less than once in {1 / LEAST_SHARE:,.0f} samples")
        self.members()
        return self

    def members(self) -> dict[str, SourceSettings]:
        """The sources' settings with the mix's own where those are shared. ValueError where a source refuses one."""
        shared = {field: getattr(self, field) for field in SHARED}
        checked = {
            name: type(settings).model_validate({**_given(settings), "resolution": self.resolution})
            for name, settings in self.sources.items()
        }
        return {name: settings.model_copy(update=shared) for name, settings in checked.items()}

    def words(self) -> frozenset[str] | None:
        found = frozenset[str]()
        for settings in self.members().values():
            own = settings.words()
            if own is None:
                return None
            found |= own
        return found

    def shares(self) -> list[Fraction]:
        """The weights, exactly as they were written, in the order of `sources`."""
        return [Fraction(str(self.weights.get(name, 1.0))) for name in self.sources]


def _given(settings: SourceSettings) -> dict[str, object]:
    return {field: getattr(settings, field) for field in settings.model_fields_set}
