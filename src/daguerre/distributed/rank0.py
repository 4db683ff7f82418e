"""Small decisions that must be equal on all ranks: to stop or not, small documents of each, is everybody here.

They go over the CPU, in a group of their own (or over the store where there is no group yet), so that they neither wait
for a GPU nor mix with what training sends. Documents are JSON. All calls are collective.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from daguerre.distributed.watchdog.failure import named
from daguerre.errors import LOST, UserError
from daguerre.ranks import ALONE, over_group

_T = TypeVar("_T")

_POLLS_SECONDS = (0.01, 0.5)
"""Between two looks at who has come: at first, and at most."""


class RanksMissing(UserError):
    """Ranks did not come in time; the message names them."""

    exit_code = LOST
    code = "unreachable"


class StopRequested(UserError):
    """This process was asked to stop while it waited for others."""

    code = "failed"

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Meeting:
    """A place where the ranks of a run wait for one another by name."""

    store: dist.Store
    rank: int
    size: int
    exit_code: Callable[[], int]
    """Exit code of the signal that came to this process; 0 while none has."""

    def all_here(self, what: str, seconds: float, stoppable: bool = False) -> None:
        """Returns when every rank has called this with the same `what`, which is used once in a run.

        RanksMissing after so many seconds, naming those that did not. StopRequested, where `stoppable`, for a signal.
        """
        try:
            self._wait(what, seconds, stoppable)
        except RuntimeError as error:  # what torch raises for a store that is gone
            raise RanksMissing(
                f"rank {self.rank} waited for the others ({what}), but rank 0 or the launcher's agent exited "
                f"meanwhile: see its log ({str(error).splitlines()[0]})"
            ) from error

    def _wait(self, what: str, seconds: float, stoppable: bool) -> None:
        self.store.set(f"{what}/{self.rank}", "here")
        here = self.store.add(f"{what}/count", 1)
        deadline, poll = time.monotonic() + seconds, _POLLS_SECONDS[0]
        while here < self.size:
            if stoppable and self.exit_code():
                raise StopRequested(f"asked to stop while waiting for {self._missing(what)} ({what})", self.exit_code())
            if time.monotonic() > deadline:
                raise RanksMissing(
                    f"{self._missing(what)} of {self.size} did not connect within {seconds:g} s ({what}): check the "
                    "log of that process; it may not have been started, or cannot reach the others"
                )
            time.sleep(poll)
            poll = min(poll * 1.5, _POLLS_SECONDS[1])
            here = self.store.add(f"{what}/count", 0)

    def _missing(self, what: str) -> str:
        return named([rank for rank in range(self.size) if not self.store.check([f"{what}/{rank}"])] or [self.rank])


class Agreement:
    """Decisions of all ranks, over a gloo group that is used for nothing else; None for one process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._ranks = ALONE if group is None else over_group(group)

    def signalled(self, own: signal.Signals | None) -> signal.Signals | None:
        """The signal that asked any rank to stop, the same on all; None without one. Of several the one with the
        highest number: SIGTERM before SIGUSR1 before SIGINT."""
        return self.between_updates(own, 0)[0]

    def between_updates(self, own: signal.Signals | None, asked: int) -> tuple[signal.Signals | None, int]:
        """At a step boundary, in one call: the signal, and the highest number of actions that a rank was asked for."""
        number, actions = self._reduced([own or 0, asked], dist.ReduceOp.MAX)
        return signal.Signals(number) if number else None, actions

    def total(self, own: int) -> int:
        return self._reduced([own], dist.ReduceOp.SUM)[0]

    def _reduced(self, numbers: list[int], how: dist.ReduceOp.RedOpType) -> list[int]:
        if self._group is None:
            return numbers
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, how, group=self._group)
        return [int(number) for number in tensor]

    def gather(self, document: Any) -> list[Any]:
        """Each rank's small document, in the order of ranks, on every rank."""
        return list(self.share(self._ranks.collect(document)))

    def share(self, document: Any = None) -> Any:
        return self._ranks.share(document)

    def run_on_rank0(self, act: Callable[[], _T]) -> _T:
        """Rank 0's result, as JSON on every rank; so is its UserError. For any other error the watchdog ends all."""
        result: _T = self._ranks.led(act, UserError)
        return result
