"""Micro-batches by number: reading, decoding and captions, a pure function of the plan. What a worker runs.

Nothing is ahead, parallel or counted here: that is `loader.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from daguerre.data import captions, decode
from daguerre.data.plan import Plan
from daguerre.data.settings import SourceSettings
from daguerre.data.source import Source
from daguerre.errors import UserError
from daguerre.types import Batch, Record

ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.2


class Failure(NamedTuple):
    """A sample of a batch that could not be used as it is."""

    row: int
    name: str
    reason: str
    kept: bool = False
    """Whether it is trained on all the same."""


Made = tuple[Batch, list[Failure]]


@dataclass(frozen=True)
class Rows:
    """The micro-batches of `size` samples from the slot `start` of the plan on."""

    source: Source
    settings: SourceSettings
    seed: int
    size: int
    start: int = 0

    def made(self, number: int) -> Made:
        """Micro-batch `number`, from 0. UserError where a sample cannot be read."""
        plan = Plan(self.seed, self.source.count, self.settings.shuffle)
        return make_batch(self.source, self.settings, self.seed, plan.slots(self.start + number * self.size, self.size))


def make_batch(source: Source, settings: SourceSettings, seed: int, slots: np.ndarray) -> Made:
    """The batch of these slots [n, 2] of (index, epoch), and what of it could not be decoded."""
    side, failures = settings.resolution, []
    keys = np.array([[source.sample_id(int(i)), epoch, 0] for i, epoch in slots], dtype=np.int64)
    # Filled by numpy: a large torch operation here would start a second team of OpenMP threads beside the trainer's,
    # and with more threads than cores OpenMP's waits fall asleep (measured: 1.5 times slower training on two cores).
    pixels_BCHW = np.zeros((len(slots), 3, side, side), dtype=np.uint8)
    texts, names = [], []
    for row, index in enumerate(slots[:, 0].tolist()):
        record = retrying(source.record, index)
        names.append(record.key)
        texts.append(captions.choose(record, settings, seed, keys[row]))
        try:
            with _Named(record.key):
                pixels_BCHW[row] = decode.picture(record.image, settings, seed, keys[row]).numpy()
        except decode.Undecodable as error:
            failures.append(Failure(row, record.key, str(error)))
    return Batch(keys, torch.from_numpy(pixels_BCHW), texts, valid_B(len(slots), failures), names), failures


def valid_B(size: int, failures: list[Failure]) -> Tensor:
    """1 for each sample of a batch, 0 for those that could not be decoded; float32."""
    valid = torch.ones(size)
    valid[[failure.row for failure in failures]] = 0
    return valid


def retrying(read: Callable[[int], Record], index: int) -> Record:
    """`read(index)`, tried again with a growing pause while it raises OSError; then UserError. Never a skip."""
    for attempt in range(ATTEMPTS):
        try:
            with _Named(f"index {index}"):
                return read(index)
        except OSError as error:
            if attempt == ATTEMPTS - 1:
                raise UserError(
                    f"a sample cannot be read, after {ATTEMPTS} attempts: {error}. Nothing was skipped: mend the disk "
                    "or the connection and run the same command again"
                ) from error
            time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    raise AssertionError


@dataclass(frozen=True)
class _Named:
    """A block whose errors say at which sample they came up, for those that nobody expects."""

    name: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"(at the sample {self.name})")
