"""LoRAs in files that number their layers and words instead of naming them, and configs that say what the numbers mean.

How such files are read is known to the family whose authors write them: its module has `NUMBERED_LORAS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from daguerre import plugins

if TYPE_CHECKING:
    from daguerre.models.parts.text.encoder import TextEncoder

Rows = dict[str, Tensor]
"""Embeddings [1, D] by word."""


@dataclass(frozen=True)
class Config:
    """A config of the authors' code that trains a LoRA, or generates with one."""

    file: Path
    """The LoRA's numbered file."""
    words: tuple[tuple[str, str | None], ...]
    """Each word that is trained with it, and the pattern of what it starts from."""
    filters: tuple[str, ...] | None = None
    """Parts of the names of the layers that have an addition; None: all have one."""


class NumberedLoras(Protocol):
    """The reader of one family's numbered files."""

    @property
    def model(self) -> str:
        """The network that they are for, as messages name it."""

    def config(self, path: Path) -> Config | None:
        """Reads a config; None for any other file. UserError where its LoRA is not there."""

    def is_numbered(self, names: Iterable[str]) -> bool:
        """True of the tensors of such a file."""

    def is_for(self, network: nn.Module) -> bool:
        """True of a network whose layers such a file numbers."""

    def named(
        self, file: Path, tensors: Mapping[str, Tensor], component: str, network: nn.Module, said: Config | None
    ) -> dict[str, Tensor]:
        """A file's tensors by the names of layers. UserError where the numbers do not say which layers they mean."""

    def words(self, path: Path, config: Config, reader: TextEncoder) -> tuple[Rows, Rows]:
        """The new words of a config at `path`, and the trained ones of the vocabulary. UserError where file, config and
        vocabulary do not agree."""

    def reader(self, base: Path) -> TextEncoder:
        """The text encoder of a base, alone."""


def readers() -> tuple[NumberedLoras, ...]:
    """Those of all families."""
    return plugins.declared("families", "NUMBERED_LORAS")


def config(path: Path) -> Config | None:
    """The config of a LoRA in the form of any family; None for any other file."""
    return next((config for _, config in _read(path)), None)


def with_words(path: Path) -> tuple[NumberedLoras, Config] | None:
    """A config of a LoRA with trained words, and who reads it; None for any other file."""
    return next(((reader, config) for reader, config in _read(path) if config.words), None)


def _read(path: Path) -> Iterator[tuple[NumberedLoras, Config]]:
    """The config by those that can read it."""
    return ((reader, config) for reader in readers() if (config := reader.config(path)) is not None)
