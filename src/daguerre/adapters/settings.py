"""Settings that every adapter shares. No torch here."""

from collections.abc import Sequence
from typing import ClassVar

from daguerre.settings import Settings


class AdapterSettings(Settings):
    """Base of every adapter's `Settings`."""

    name: str
    """Name of the adapter: a file in adapters."""

    separate: ClassVar[bool] = False
    """True of an adapter that trains a network of its own, beside the model's: it may reach none of these."""

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        """The components whose weights the adapter trains or wraps; a component has one such adapter. `trainable` are
        the family's, the one first that is trained by default; () for a family that trains all it has."""
        raise NotImplementedError
