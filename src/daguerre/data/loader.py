"""Batches in plan order: reading, decoding and captions in workers, random numbers drawn one batch ahead.

The same batches come whatever the number of workers and wherever a run begins. A sample that cannot be decoded
leaves its slot empty (valid 0) and is counted; a fault that may pass is tried again, then stops the run.
"""

from __future__ import annotations

import copy
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from daguerre.data import captions, decode
from daguerre.data.plan import Plan
from daguerre.data.settings import LoaderSettings, SourceSettings
from daguerre.data.source import Source
from daguerre.errors import UserError
from daguerre.types import Batch

Draw = Callable[[Batch], Mapping[str, Tensor]]
Failures = list[tuple[str, str]]
"""(name, reason) of each sample of a batch that could not be decoded."""
Made = tuple[Batch, Failures]
EMPTY_LIMIT = 10_000
"""Slots in a row without a sample that can be decoded, after which a run stops."""
ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.2
EXAMPLES = 5


@dataclass(frozen=True)
class Rows(Dataset[Made | UserError]):
    """Micro-batch n as a map-style dataset: what a worker makes. A UserError is handed back, so that it stays one."""

    source: Source
    settings: SourceSettings
    seed: int
    size: int
    start: int = 0
    """Position in the plan of the first slot of micro-batch 0."""

    def __getitem__(self, n: int) -> Made | UserError:
        plan = Plan(self.seed, self.source.count, self.settings.shuffle)
        slots = plan.slots(self.start + n * self.size, self.size)
        try:
            return make_batch(self.source, self.settings, self.seed, slots)
        except UserError as error:
            return error


def make_batch(source: Source, settings: SourceSettings, seed: int, slots: np.ndarray) -> Made:
    """The batch of these slots [n, 2] of (index, epoch), and what of it could not be decoded."""
    side, failures = settings.resolution, []
    keys = np.array([[source.sample_id(int(i)), epoch, 0] for i, epoch in slots], dtype=np.int64)
    pixels_BCHW = torch.zeros(len(slots), 3, side, side, dtype=torch.uint8)
    texts, names, valid = [], [], []
    for row, (index, _) in enumerate(slots):
        record = retrying(partial(source.record, int(index)))
        names.append(record.key)
        texts.append(captions.choose(record, settings, seed, keys[row]))
        try:
            pixels_BCHW[row] = decode.picture(record.image, settings, seed, keys[row])
            valid.append(1.0)
        except decode.Undecodable as error:
            failures.append((record.key, str(error)))
            valid.append(0.0)
    return Batch(keys, pixels_BCHW, texts, torch.tensor(valid), names), failures


def retrying(read: Callable[[], Any]) -> Any:
    """The value of `read`, tried again with a growing pause while it raises OSError; then UserError."""
    for attempt in range(ATTEMPTS):
        try:
            return read()
        except OSError as error:
            if attempt == ATTEMPTS - 1:
                raise UserError(
                    f"a sample cannot be read, after {ATTEMPTS} attempts: {error}. Nothing was skipped: mend the disk "
                    "or the connection and run the same command again"
                ) from error
            time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    raise AssertionError


@dataclass
class Skips:
    """Empty slots by reason. A batch is counted when the loop takes it, so a restart counts nothing twice."""

    reasons: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{reason: {"count": n, "examples": [names]}}: as data.json and checkpoints hold it."""

    def add(self, name: str, reason: str) -> None:
        """Counts one empty slot."""
        entry = self.reasons.setdefault(reason, {"count": 0, "examples": []})
        entry["count"] += 1
        if name not in entry["examples"] and len(entry["examples"]) < EXAMPLES:
            entry["examples"].append(name)


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
    skips: Skips = field(default_factory=Skips)

    @contextmanager
    def batches(self, position: int) -> Iterator[Iterator[Batch]]:
        """Endless micro-batches from a count of slots on, made ahead; workers end with the block.

        UserError after an epoch (or `EMPTY_LIMIT` slots) in a row without one sample that can be decoded.
        """
        rows = Rows(self.source, self.data, self.seed, self.batch_size, position)
        workers, ahead = self.loader.num_workers, self.loader.prefetch_batches
        made = iter(
            DataLoader(
                rows,
                batch_size=None,
                sampler=_Endless(),
                num_workers=workers,
                prefetch_factor=ahead if workers else None,
                multiprocessing_context="forkserver" if workers else None,
                worker_init_fn=_in_worker,
            )
        )
        with _ahead(lambda: self._ready(next(made)), ahead) as ready:
            yield self._counted(ready)

    def _ready(self, made: Made | UserError) -> Made:
        if isinstance(made, UserError):
            raise made
        batch, failures = made
        return replace(batch, draws=self.draw(batch)), failures

    def _counted(self, ready: Iterator[Made]) -> Iterator[Batch]:
        empty, limit = 0, min(EMPTY_LIMIT, self.source.count or EMPTY_LIMIT)
        for batch, failures in ready:
            for name, reason in failures:
                self.skips.add(name, reason)
            empty = 0 if batch.valid_B.any() else empty + len(batch.names)
            if empty >= limit:
                raise UserError(
                    f"none of the last {empty} samples could be decoded; the reasons: "
                    + "; ".join(f"{reason} ({entry['count']})" for reason, entry in self.skips.reasons.items())
                )
            yield batch

    def first(self, position: int) -> Batch:
        """The micro-batch at a position, with its draws, made here and now; nothing is counted."""
        rows = Rows(self.source, self.data, self.seed, self.batch_size, position)
        return self._ready(rows[0])[0]

    def report(self) -> dict[str, Any]:
        """What the source is and what was left out, for data.json."""
        skipped = {**self.source.report(), **self.skips.reasons}
        return {"source": self.data.source, "count": self.source.count, "skipped": skipped}

    def document(self) -> dict[str, Any]:
        """What a checkpoint holds of it; the position is the training state's."""
        return {"skips": self.skips.reasons}

    def restore(self, document: Mapping[str, Any]) -> None:
        """Takes over what `document` gave."""
        self.skips.reasons.clear()
        self.skips.reasons.update(copy.deepcopy(dict(document["skips"])))


def fixed_batches(source: Source, settings: SourceSettings, num_samples: int, batch_size: int) -> Iterator[Batch]:
    """The first samples of a source in its own order, captions kept, centre crops, no flips: for validation."""
    plain = settings.model_copy(update={"caption_dropout": 0.0, "random_flip": False, "crop": "center"})
    total = num_samples if source.count is None else min(num_samples, source.count)
    for first in range(0, total, batch_size):
        indexes = np.arange(first, min(total, first + batch_size), dtype=np.int64)
        yield make_batch(source, plain, 0, np.stack([indexes, np.zeros_like(indexes)], axis=1))[0]


class _Endless:
    """The sampler of DataLoader: 0, 1, 2 and so on."""

    def __iter__(self) -> Iterator[int]:
        return count()


def _in_worker(worker: int) -> None:
    # Ctrl-C reaches the whole process group; the trainer saves and then ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def _ahead(make: Callable[[], Made], size: int) -> Iterator[Iterator[Made]]:
    """A thread that keeps `size` values of `make` ready, in order; an error comes out where its value would have."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as thread:
        ready = deque(thread.submit(make) for _ in range(size))

        def take() -> Iterator[Made]:
            while True:
                made = ready.popleft().result()
                ready.append(thread.submit(make))
                yield made

        try:
            yield take()
        finally:
            thread.shutdown(cancel_futures=True)
