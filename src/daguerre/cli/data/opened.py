"""A source opened for a `data` verb, with the samples of both splits that its filters pass. No torch here."""

from dataclasses import dataclass

import numpy as np

from daguerre import keys, plugins
from daguerre.data import skipped
from daguerre.data.index.index import Index
from daguerre.data.plan import selection
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import RemoteSource, Source
from daguerre.errors import UserError


@dataclass(frozen=True)
class Opened:
    """A source and the samples chosen of it."""

    settings: SourceSettings
    source: Source
    index: Index | None
    """None for an endless source."""
    passes: np.ndarray
    """[N] bool: what the filters pass."""
    left_out: SkipReport
    """By the source when it was opened, and by the filters."""

    def drawn(self, count: int, seed: int, purpose: str) -> np.ndarray:
        """Random numbers of at most `count` samples that pass, ascending; the first ones of an endless source."""
        if self.index is None:
            return np.arange(count, dtype=np.int64)
        there = np.flatnonzero(self.passes)
        return np.sort(there[keys.permutation(seed, purpose, 0, len(there))[:count]])

    def reading(self, numbers: np.ndarray) -> Source:
        """The source, prepared to read these samples."""
        if self.index is None or not isinstance(self.source, RemoteSource):
            return self.source
        starts = self.index.shard_starts
        wanted = np.diff(np.searchsorted(np.sort(numbers), starts))
        return self.source.reading(wanted / np.maximum(np.diff(starts), 1))


def is_remote(source: Source) -> bool:
    """True if samples come over a network."""
    return isinstance(source, RemoteSource) and source.is_remote


def opened(settings: SourceSettings) -> Opened:
    """Opens a source and applies its filters. UserError if nothing passes."""
    source: Source = plugins.find("sources", settings.source).open_source(settings, "train")
    index = source.index
    if index is None:
        return Opened(settings, source, None, np.zeros(0, bool), source.report())
    selection.check_fields(index, settings)
    verdict = settings.filters.evaluate(index)
    left_out = skipped.merged(source.report(), skipped.counted(verdict.rejected))
    if not verdict.passes.any():
        what = f"none of the {index.count:,} samples passes:\n{skipped.table(left_out)}\nLoosen data.filters"
        raise UserError(what, code="empty", setting="data.filters")
    return Opened(settings, source, index, verdict.passes, left_out)
