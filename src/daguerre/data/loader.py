"""Batches in plan order: reading, decoding and captions in workers, random numbers drawn one batch ahead.

The same batches come whatever the number of workers and wherever a run begins. A sample that cannot be decoded
leaves its slot empty (valid 0) and is counted; a fault that may pass is tried again, then stops the run.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor

from daguerre.data import skips
from daguerre.data.rows import Failure, Made, Rows, make_batch
from daguerre.data.settings import LoaderSettings, SourceSettings
from daguerre.data.source import Source, fingerprint
from daguerre.data.workers import made_by, workers
from daguerre.errors import UserError
from daguerre.types import Batch

Draw = Callable[[Batch], Mapping[str, Tensor]]
Cut = Callable[[Sequence[str]], Mapping[int, str]]
EMPTY_LIMIT = 10_000
"""Slots in a row without a sample that can be decoded, after which a run stops."""


@dataclass
class Skips:
    """Samples that could not be used as they are, by reason; each is counted once, in the epoch that met it first."""

    reasons: skips.Counts = field(default_factory=dict)
    """{reason: {"count": n, "examples": [names]}}: as data.json and checkpoints hold it."""
    counted_slots: int = 0
    """Slots of the plan that were looked at: what is seen again after a restart is not counted again."""

    def look(self, position: int, batch: Batch, failures: list[Failure]) -> None:
        """Counts what was found in the batch that starts at `position`."""
        for failure in failures:
            if batch.keys[failure.row, 1] == 0 and position + failure.row >= self.counted_slots:
                skips.add(self.reasons, failure.reason, failure.name, failure.kept)
        self.counted_slots = max(self.counted_slots, position + len(batch.names))


@dataclass(frozen=True)
class Loading:
    """The batches of one run, from any position of its plan."""

    source: Source
    data: SourceSettings
    loader: LoaderSettings
    seed: int
    batch_size: int
    """Samples of a micro-batch."""
    draw: Draw
    """Random numbers of a batch, on the CPU; called one batch ahead of the loop."""
    cut: Cut
    """Which captions the family does not read whole."""
    skips: Skips = field(default_factory=Skips)

    @contextmanager
    def batches(self, position: int) -> Iterator[Iterator[Batch]]:
        """Endless micro-batches from a count of slots on, made ahead; workers end with the block.

        UserError after an epoch (or `EMPTY_LIMIT` slots) in a row without one sample that can be decoded.
        """
        with ExitStack() as stack:
            thread = stack.enter_context(_thread())
            made = self._made(stack, position)
            yield self._counted(_ahead(thread, lambda: self._ready(next(made)), self.loader.prefetch_batches), position)

    def _made(self, stack: ExitStack, position: int) -> Iterator[Made]:
        rows = Rows(self.source, self.data, self.seed, self.batch_size, position)
        if not self.loader.num_workers:
            return map(rows.made, count())
        return made_by(stack.enter_context(workers(rows, self.loader.num_workers)), self.loader.prefetch_batches)

    def _ready(self, made: Made) -> Made:
        batch, failures = made
        return replace(batch, draws=self.draw(batch)), failures

    def _counted(self, ready: Iterator[Made], position: int) -> Iterator[Batch]:
        empty, limit = 0, min(EMPTY_LIMIT, self.source.count or EMPTY_LIMIT)
        for batch, failures in ready:
            cut = [Failure(i, batch.names[i], f"caption {how}", kept=True) for i, how in self.cut(batch.texts).items()]
            self.skips.look(position, batch, failures + cut)
            position += len(batch.names)
            empty = 0 if batch.valid_B.any() else empty + len(batch.names)
            if empty >= limit:
                raise UserError(
                    f"none of the last {empty:,} samples could be decoded:\n{skips.table(self.skips.reasons)}"
                )
            yield batch

    def first(self, position: int) -> Batch:
        """The micro-batch at a position, with its draws, made here and now; nothing is counted."""
        rows = Rows(self.source, self.data, self.seed, self.batch_size, position)
        return self._ready(rows.made(0))[0]

    def report(self) -> dict[str, Any]:
        """What the source is and what was left out, for data.json."""
        skipped = skips.merged(self.source.report(), self.skips.reasons)
        return {"source": self.data.source, "count": self.source.count, "skipped": skipped}

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.source)

    def document(self) -> dict[str, Any]:
        """What a checkpoint holds of it; the position is the training state's."""
        skipped = {"reasons": self.skips.reasons, "counted_slots": self.skips.counted_slots}
        return {"samples": self._fingerprint, "skips": skipped}

    def restore(self, document: Mapping[str, Any]) -> None:
        """Takes over what `document` gave. UserError where the source no longer holds the same samples."""
        if document["samples"] != self._fingerprint:
            raise UserError(
                "the samples are not those that this run was trained on: files were added, removed, renamed, damaged "
                f"or mended (now {self.source.count} samples). Put them back to go on exactly; or start a new run from "
                "these weights with init_from=RUN run_name=NEW"
            )
        self.skips.reasons = copy.deepcopy(dict(document["skips"]["reasons"]))
        self.skips.counted_slots = document["skips"]["counted_slots"]


def fixed_batches(source: Source, settings: SourceSettings, num_samples: int, batch_size: int) -> Iterator[Batch]:
    """The first samples of a source in its own order, captions kept, centre crops, no flips: for validation."""
    plain = settings.model_copy(update={"caption_dropout": 0.0, "random_flip": False, "crop": "center"})
    total = num_samples if source.count is None else min(num_samples, source.count)
    for first in range(0, total, batch_size):
        indexes = np.arange(first, min(total, first + batch_size), dtype=np.int64)
        yield make_batch(source, plain, 0, np.stack([indexes, np.zeros_like(indexes)], axis=1))[0]


@contextmanager
def _thread() -> Iterator[ThreadPoolExecutor]:
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
    try:
        yield thread
    finally:
        thread.shutdown(cancel_futures=True)


def _ahead(thread: ThreadPoolExecutor, make: Callable[[], Made], size: int) -> Iterator[Made]:
    """Values of `make` in order, `size` of them ready or in the making; an error comes where its value would have."""
    ready = deque(thread.submit(make) for _ in range(size))
    while True:
        made = ready.popleft().result()
        ready.append(thread.submit(make))
        yield made
