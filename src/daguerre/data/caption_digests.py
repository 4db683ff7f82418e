"""Digests of the captions that are trained on: they are part of a run's identity, as an edited caption is another text.

Ids of samples follow from their files' paths in a folder, and may be given in shards and tables: there a caption can
change while all samples stay. Elsewhere an id follows from the bytes around it, so that nothing is digested twice.
"""

from __future__ import annotations

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
        if not len(self._each):
            return ""
        return blake2b(self._each.astype("<u8").tobytes(), digest_size=_HEX // 2).hexdigest()

    @cached_property
    def _each(self) -> np.ndarray:
        """[n] uint64 of the chosen samples of the sources in which captions can change, in their order."""
        found = [np.empty(0, np.uint64)]
        for member, chosen in zip(self.dataset.members, self.dataset.selections, strict=True):
            if chosen is None or not isinstance(member.source, CaptionedSource):
                continue
            if (digests := member.source.caption_digests()) is not None:
                found.append(digests[chosen.numbers])
        return np.concatenate(found)

    def names(self, numbers: Sequence[int]) -> list[str]:
        """Names of samples by their place among the digests."""
        names, start = [], 0
        for member, chosen in zip(self.dataset.members, self.dataset.selections, strict=True):
            if chosen is None or not isinstance(member.source, CaptionedSource):
                continue
            if member.source.caption_digests() is not None:
                here = [number - start for number in numbers if start <= number < start + len(chosen.numbers)]
                names += [member.source.name(int(chosen.numbers[number])) for number in here]
                start += len(chosen.numbers)
        return names

    def save(self, path: Path) -> None:
        """Keeps the digests, one by one, to name what has changed later."""
        if 0 < len(self._each) <= MOST_NAMED:
            write_atomically(path, [self.whole.encode(), self._each.astype("<u8").tobytes()])

    def changed(self, path: Path, whole: str) -> list[int] | None:
        """The places of the captions that are others than those with the digest `whole`, which were saved; None where
        these are not known, one by one."""
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if data[:_HEX].decode("ascii", "replace") != whole or len(data) != _HEX + 8 * len(self._each):
            return None
        return np.flatnonzero(np.frombuffer(data, "<u8", offset=_HEX) != self._each).tolist()
