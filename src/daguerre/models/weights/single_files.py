"""Files that hold a whole pretrained model, or a network in its names: read by the family whose layout they have.

The module of that family has `ORIGINAL_LAYOUT`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from daguerre import plugins


class SingleFiles(Protocol):
    """Reads such files. UserError for a file that is not one."""

    def folder(self, path: Path, pickled: bool, ignored: Sequence[str] = ()) -> Path:
        """The same model in diffusers' layout, made once and kept in the user's cache; `ignored` are patterns of
        tensors that are left out."""

    def network_tensors(
        self, path: Path, component: str, names: Iterable[str], pickled: bool, ignored: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """One network's weights in its own `names`, which the file may have, too."""

    def scheduler(self, path: Path) -> dict[str, Any]:
        """The scheduler's config, or a part of it, that a file tells; {} for one that tells nothing."""

    def unused(self, names: Iterable[str], used: set[str]) -> list[str]:
        """Names that are neither `used` nor known to belong to a file."""


def reader() -> SingleFiles:
    """The one family's that has such a layout."""
    (found,) = plugins.declared("families", "ORIGINAL_LAYOUT")
    read: SingleFiles = found
    return read
