"""Saving while training goes on: tensors are copied to host memory, then a thread writes the copy.

At most one save is in flight; its error comes back at the next one or at the end, to a policy that decides whether the
run goes on. Training waits for the copy alone, unless the disk is slower than the saves follow one another.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre import devices
from daguerre.checkpoint.manifest import CheckpointError
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.sharded import LocalFiles, Planned, ShardedStore
from daguerre.checkpoint.shards import Groups
from daguerre.formatting import counted

_SLAB_BYTES = 256 << 20
_ALIGNMENT = 64
_LONG_WAIT_SECONDS = 1.0
"""A longer wait for the save before is reported."""


@dataclass(frozen=True)
class Outcome:
    """Result of a save."""

    name: str
    path: Path | None
    """None if it failed."""
    notices: list[str]
    """Lines for the terminal."""
    stalled_seconds: float
    """Training waited: for the save before this one, for all ranks to agree, and for the copy."""
    wrote_seconds: float
    """Writing, syncing, committing and purging, mostly while training goes on."""
    local_bytes: int
    """Written by this rank."""


class HostMemory:
    """Memory of the host that one snapshot after another is copied into; pinned where they come from a GPU.

    In slabs of a power of two, because CUDA rounds pinned memory up to one.
    """

    def __init__(self) -> None:
        self._slab_bytes = _SLAB_BYTES
        self._slabs: dict[bool, list[Tensor]] = {True: [], False: []}
        self._used: dict[bool, list[int]] = {True: [], False: []}

    def copies(self, local: LocalFiles) -> LocalFiles:
        """Copies of all tensors; they hold until the next call."""
        total = sum(t.nbytes for tensors in local.values() for t in tensors.values())
        self._slab_bytes = min(_SLAB_BYTES, 1 << max(total - 1, _ALIGNMENT).bit_length())
        self._used = {pinned: [0] * len(slabs) for pinned, slabs in self._slabs.items()}
        found = {file: {key: self._copy(tensor) for key, tensor in tensors.items()} for file, tensors in local.items()}
        for device in {tensor.device for tensors in local.values() for tensor in tensors.values()}:
            devices.synchronize(device)
        return found

    @property
    def size_bytes(self) -> int:
        return sum(slab.numel() for slabs in self._slabs.values() for slab in slabs)

    @torch.no_grad()
    def _copy(self, tensor: Tensor) -> Tensor:
        place = self._place(tensor.nbytes, tensor.device.type == "cuda")
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def _place(self, size: int, pinned: bool) -> Tensor:
        slabs, used = self._slabs[pinned], self._used[pinned]
        room = -(-size // _ALIGNMENT) * _ALIGNMENT
        for number, slab in enumerate(slabs):
            if used[number] + room <= slab.numel():
                start = used[number]
                used[number] += room
                return slab[start : start + size]
        slabs.append(torch.empty(max(room, self._slab_bytes), dtype=torch.uint8, pin_memory=pinned))
        used.append(room)
        return slabs[-1][:size]


@dataclass
class FailedSaves:
    """Policy for saves that fail: the run goes on, says so, counts, and stops when too many have failed in a row.

    A full disk may be cleared and a slow server may come back; the training done meanwhile is worth more than the
    checkpoint. Earlier checkpoints are never touched by a save that fails.
    """

    most_in_a_row: int = 3
    """With so many one after another, the run stops; 1 stops it at the first."""
    in_a_row: int = 0
    total: int = 0
    """All failures of this run, those before a good save among them."""

    def failed(self, error: CheckpointError) -> str:
        """Counts a failure; what to tell. Raises it if it is one too many."""
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row >= self.most_in_a_row:
            times = "" if self.in_a_row == 1 else f" ({self.in_a_row} saves in a row failed)"
            raise CheckpointError(f"{error}{times}") from error
        left = self.most_in_a_row - self.in_a_row
        return (
            f"SAVE FAILED ({self.in_a_row} in a row, {self.total} in all): {error}. Training goes on and the next save "
            f"tries again; after {left} more the run stops"
        )

    def succeeded(self) -> list[str]:
        """Resets what is counted in a row; what to tell."""
        before, self.in_a_row = self.in_a_row, 0
        return [f"saving works again after {counted(before, 'failed save')}"] if before else []


@dataclass
class Saver:
    """Saves a run's checkpoints, purges old ones, and bears with a disk that fails. All ranks call every method."""

    store: ShardedStore
    keep: RetentionPolicy = field(default_factory=RetentionPolicy)
    failures: FailedSaves = field(default_factory=FailedSaves)
    background: bool = True
    """False: write at once, from the tensors themselves; needs no memory for a copy."""
    latest: str = field(default="", init=False)
    """Name of the newest save: in flight, or as it succeeded; empty after one that failed."""
    _memory: HostMemory = field(default_factory=HostMemory, init=False, repr=False)
    _thread: ThreadPoolExecutor = field(init=False, repr=False)
    _flying: Future[Outcome] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def save(
        self, name: str, groups: Groups, documents: Mapping[str, Any], files: Mapping[str, bytes] | None = None
    ) -> list[Outcome]:
        """Begin a save; tensors may change when this returns. The result of the one before, if not yet returned.

        Raises CheckpointError if that one was a failure too many, RanksGone if a rank is dead. ValueError for what
        could not be read back (see `ShardedStore.plan`).
        """
        begun = time.perf_counter()
        before = self.settle()
        waited = time.perf_counter() - begun
        planned = self.store.plan(name, groups, documents, files)
        local = self._memory.copies(planned.local) if self.background else planned.local
        stalled = time.perf_counter() - begun
        notice = []
        if before and waited > _LONG_WAIT_SECONDS:
            notice = [
                f"{before[0].name} took {before[0].wrote_seconds:.0f} s to write, longer than the time until the next "
                f"save: training waited {waited:.0f} s. Save less often, or use a faster disk"
            ]
        self._flying, self.latest = self._thread.submit(self._write, planned, local, stalled, notice), name
        return before if self.background else [*before, *self.settle()]

    def settle(self) -> list[Outcome]:
        """Wait for the save in flight; its outcome, or an empty list if nothing is in flight. Raises as `save` does."""
        if self._flying is None:
            return []
        flying, self._flying = self._flying, None
        outcome = flying.result()
        self.latest = self.latest if outcome.path is not None else ""
        return [outcome]

    @property
    def in_flight(self) -> bool:
        """True while there is a save whose outcome was not asked for; no collective call."""
        return self._flying is not None

    def finished(self) -> bool:
        """True if there is an outcome that `settle` would give without waiting; no collective call, and ranks may
        differ."""
        return self._flying is not None and self._flying.done()

    def names(self) -> list[str]:
        """The checkpoints there are once the save in flight has ended, oldest first. No collective call."""
        self.wait()
        return self.store.names()

    def wait(self) -> None:
        """Wait until the save in flight has ended, well or not. No collective call."""
        if self._flying is not None:
            wait([self._flying])

    def finish(self) -> list[Outcome]:
        """At the end of a run: wait. CheckpointError if the last save failed, as no other will make it good."""
        try:
            outcomes = self.settle()
        finally:
            self._thread.shutdown()
        if outcomes and outcomes[-1].path is None:
            raise CheckpointError(outcomes[-1].notices[-1])
        return outcomes

    def _write(self, planned: Planned, local: LocalFiles, stalled: float, notices: list[str]) -> Outcome:
        begun, path = time.perf_counter(), None
        try:
            path = self.store.commit(planned, local)
            notices = [*notices, *self.failures.succeeded()]
        except CheckpointError as error:
            notices = [*notices, self.failures.failed(error)]
        else:
            try:
                notices += self.store.purge(self.keep)
            except CheckpointError as error:  # tried again after the next save
                notices.append(f"older checkpoints are not purged: {error}")
        return Outcome(planned.name, path, notices, stalled, time.perf_counter() - begun, planned.local_bytes)
