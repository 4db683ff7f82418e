"""Settings that every adapter shares. No torch here."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from daguerre.settings import Settings

Part = Literal["all", "layers", "embeddings"]
"""Weights of a component: all of them, those of its linear layers and convolutions, or those of its tokens."""


class AdapterSettings(Settings):
    """Base of every adapter's `Settings`."""

    part: ClassVar[Part] = "all"
    """The part of each component that it trains or adds to. Adapters of different parts can share a component; "all"
    shares it with none. The weights of all others are frozen before they are attached."""

    name: str
    """Name of the adapter: a file in adapters."""

    of_weights: ClassVar[frozenset[str]] = frozenset()
    """Settings that decide which weights are trained, or what these start as: a run cannot go on with others."""

    separate: ClassVar[bool] = False
    """True of an adapter that trains a network of its own, in addition to the model's: it may reach none of these."""

    @property
    def reads_weights(self) -> bool:
        """True if it reads weights of the model as it is attached: those of what it reaches, or of all if it is
        `separate`, are in memory then, in float32. All others are read once their type and place are known."""
        return True

    @property
    def learnt(self) -> bool:
        """True if it starts from what was learnt before, so that images can be generated with it at once."""
        return False

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        """The components whose weights the adapter trains or adds to. `trainable` are the family's, the one first that
        is trained by default; () for a family that trains all it has."""
        raise NotImplementedError
