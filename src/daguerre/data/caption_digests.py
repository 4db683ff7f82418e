"""Digests of the captions that are trained on: they are part of a run's identity, as an edited caption is another text.

Ids of samples follow from their files' paths in a folder, and may be given in shards and tables: there a caption can
change while all samples stay. Elsewhere an id follows from the bytes around it, so that nothing is digested twice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np

from daguerre.checkpoint.atomic import write_atomically
from daguerre.data.dataset import Dataset
from daguerre.data.source import CaptionedSource

MOST_NAMED = 1 << 22
"""Samples of which the digests are kept one by one (32 MB), so that changed ones can be named."""
_HEX = 32


@dataclass(frozen=True, eq=False)
class CaptionDigests:
    """Of the samples of a data set."""

    dataset: Dataset

    @cached_property
    def whole(self) -> str:
        """One digest of all, in hex; empty where no caption can change without its sample."""
        each = self._each
        return blake2b(each.astype("<u8").tobytes(), digest_size=_HEX // 2).hexdigest() if len(each) else ""

    @property
    def _each(self) -> np.ndarray:
        """[n] uint64 of the chosen samples, source after source."""
        return np.concatenate([np.empty(0, np.uint64), *(digests for _, _, digests in self._sources)])

    @cached_property
    def _sources(self) -> list[tuple[CaptionedSource, np.ndarray, np.ndarray]]:
        """The sources in which captions can change, each with the numbers of its chosen samples and their digests."""
        found = []
        for member, chosen in zip(self.dataset.members, self.dataset.selections, strict=True):
            if chosen is None or not isinstance(member.source, CaptionedSource):
                continue
            if (digests := member.source.caption_digests()) is not None:
                numbers = chosen.numbers[:]
                found.append((member.source, numbers, digests[numbers]))
        return found

    def names(self, numbers: Sequence[int]) -> list[str]:
        """Names of samples by their place among the digests."""
        names, start = [], 0
        for source, chosen, _ in self._sources:
            here = [number - start for number in numbers if start <= number < start + len(chosen)]
            names += [source.name(int(chosen[number])) for number in here]
            start += len(chosen)
        return names

    def save(self, path: Path) -> None:
        """Keeps the digests, one by one, to name what has changed later, and those from before: a run that is killed
        before it saves goes on from a checkpoint that knows these."""
        each = self._each
        if not 0 < len(each) <= MOST_NAMED:
            return
        if (known := _saved(path)) and known[0] != self.whole:
            os.replace(path, _before(path))
        write_atomically(path, [self.whole.encode(), each.astype("<u8").tobytes()])

    def changed(self, path: Path, whole: str) -> list[int] | None:
        """The places of the captions that are others than those with the digest `whole`, which were saved; None where
        these are not known, one by one."""
        for known in filter(None, map(_saved, (path, _before(path)))):
            if known[0] == whole and len(known[1]) == len(self._each):
                return np.flatnonzero(known[1] != self._each).tolist()
        return None


def _before(path: Path) -> Path:
    return path.with_name(f"{path.name}.before")


def _saved(path: Path) -> tuple[str, np.ndarray] | None:
    """The digest of all and [n] uint64 of each, as saved; None for a file that is not there, or damaged."""
    try:
        data = path.read_bytes()
        return data[:_HEX].decode("ascii"), np.frombuffer(data, "<u8", offset=_HEX)
    except (OSError, ValueError):
        return None
