"""Small decisions that all ranks must take alike: told to stop or not, who said what, is everybody here.

They go over the CPU, in a group of their own (or over the store where there is no group yet), so that they neither wait
for a GPU nor mix with what training sends. Documents are JSON. All calls but `Alone`'s are collective.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from daguerre.distributed.watchdog.failure import named
from daguerre.errors import LOST, UserError

_POLLS_SECONDS = (0.01, 0.5)
"""Between two looks at who has come: at first, and at most."""


class RanksMissing(UserError):
    """Ranks did not come in time; the message names them."""

    exit_code = LOST


class ToldToStop(UserError):
    """This process was told to stop while it waited for others."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Store(Protocol):
    """What is used of torch's stores."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a count; its new value."""
        ...

    def set(self, key: str, value: str, /) -> None:
        """Sets a value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are set."""
        ...


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a run wait for one another by name."""

    store: Store
    rank: int
    size: int
    exit_code: Callable[[], int]
    """What this process was told to exit with; 0 while it was not."""

    def all_here(self, what: str, seconds: float, stoppable: bool = False) -> None:
        """Returns when every rank has called this with the same `what`, which is used once in a run.

        RanksMissing after so many seconds, naming those that did not. ToldToStop, where `stoppable`, for a signal.
        """
        try:
            self._wait(what, seconds, stoppable)
        except RuntimeError as error:  # what torch raises for a store that is gone
            raise RanksMissing(
                f"rank {self.rank} waited for the others ({what}), and rank 0 or the agent, which holds the place "
                f"where they meet, left meanwhile: its log says why ({str(error).splitlines()[0]})"
            ) from error

    def _wait(self, what: str, seconds: float, stoppable: bool) -> None:
        self.store.set(f"{what}/{self.rank}", "here")
        here = self.store.add(f"{what}/count", 1)
        deadline, poll = time.monotonic() + seconds, _POLLS_SECONDS[0]
        while here < self.size:
            if stoppable and self.exit_code():
                raise ToldToStop(f"told to stop while waiting for {self._missing(what)} ({what})", self.exit_code())
            if time.monotonic() > deadline:
                raise RanksMissing(
                    f"{self._missing(what)} of {self.size} did not come within {seconds:g} s ({what}): look at the "
                    "log of that process; it may not have been started, or cannot reach the others"
                )
            time.sleep(poll)
            poll = min(poll * 1.5, _POLLS_SECONDS[1])
            here = self.store.add(f"{what}/count", 0)

    def _missing(self, what: str) -> str:
        return named([rank for rank in range(self.size) if not self.store.check([f"{what}/{rank}"])] or [self.rank])


class Agreement(Protocol):
    """What ranks decide together."""

    def signalled(self, mine: signal.Signals | None) -> signal.Signals | None:
        """At a step boundary: the signal that any rank was told to stop by, alike on all; None if none was."""
        ...

    def any(self, mine: bool) -> bool:
        """Whether it is so on one rank at least."""
        ...

    def total(self, mine: int) -> int:
        """Sum of all ranks' counts."""
        ...

    def gather(self, document: Any) -> list[Any]:
        """Each rank's small document, in the order of ranks, on every rank."""
        ...

    def tell(self, document: Any = None) -> Any:
        """Rank 0's document, on every rank."""
        ...

    def wait_for_all(self, what: str, seconds: float) -> None:
        """Until every rank has come here; RanksMissing names those that do not within so many seconds."""
        ...


class Alone:
    """One process agrees with itself."""

    def signalled(self, mine: signal.Signals | None) -> signal.Signals | None:
        """As `Agreement` has it."""
        return mine

    def any(self, mine: bool) -> bool:
        """As `Agreement` has it."""
        return mine

    def total(self, mine: int) -> int:
        """As `Agreement` has it."""
        return mine

    def gather(self, document: Any) -> list[Any]:
        """As `Agreement` has it."""
        return [json.loads(json.dumps(document))]

    def tell(self, document: Any = None) -> Any:
        """As `Agreement` has it."""
        return json.loads(json.dumps(document))

    def wait_for_all(self, what: str, seconds: float) -> None:
        """As `Agreement` has it."""


class Together:
    """Over a gloo group that is used for nothing else."""

    def __init__(self, group: dist.ProcessGroup, meeting: Meeting) -> None:
        self._group, self._meeting = group, meeting
        self._met = 0

    def signalled(self, mine: signal.Signals | None) -> signal.Signals | None:
        """As `Agreement` has it; of several signals the one with the highest number: SIGTERM before SIGUSR1 before
        SIGINT."""
        number = self._most(mine or 0)
        return signal.Signals(number) if number else None

    def any(self, mine: bool) -> bool:
        """As `Agreement` has it."""
        return bool(self._most(int(mine)))

    def total(self, mine: int) -> int:
        """As `Agreement` has it."""
        return self._reduced(mine, dist.ReduceOp.SUM)

    def _most(self, number: int) -> int:
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: int, how: dist.ReduceOp.RedOpType) -> int:
        tensor = torch.tensor([number])
        dist.all_reduce(tensor, how, group=self._group)
        return int(tensor)

    def gather(self, document: Any) -> list[Any]:
        """As `Agreement` has it."""
        data = json.dumps(document).encode()
        longest = self._most(len(data))
        mine = torch.full((longest,), ord(" "), dtype=torch.uint8)  # JSON may be followed by spaces
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self._meeting.size)]
        dist.all_gather(found, mine, group=self._group)
        return [json.loads(each.numpy().tobytes()) for each in found]

    def tell(self, document: Any = None) -> Any:
        """As `Agreement` has it."""
        data = json.dumps(document).encode() if self._meeting.rank == 0 else b""
        length = self._most(len(data))
        told = torch.frombuffer(bytearray(data or bytes(length)), dtype=torch.uint8)
        dist.broadcast(told, group=self._group, group_src=0)
        return json.loads(told.numpy().tobytes())

    def wait_for_all(self, what: str, seconds: float) -> None:
        """As `Agreement` has it."""
        self._met += 1
        self._meeting.all_here(f"{what} {self._met}", seconds)
