"""Contestants timed in turns, in one process: building, warming up, soaking, rounds; whatever happens, rows stay.

A contestant that has no room beside the others is measured alone after them, and its row says so. One that has no room
at all, or fails, leaves a row with the reason. Ctrl-C, SIGTERM and the end of the budget raise `Ended` wherever the
process is; what was measured until then is in the rows.
"""

from __future__ import annotations

import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from daguerre import errors
from daguerre.commands.bench_step import Contestant, steps
from daguerre.errors import UserError
from daguerre.training import memory
from daguerre.training.rates import synchronize

WARM_UP = 3
"""Updates before anything counts: compilation, choice of kernels, first allocations."""


class Ended(BaseException):
    """The measurement is over before its end. No library that goes on after an Exception (torch's compiler) goes on
    after this."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.reason, self.exit_code = reason, exit_code


@dataclass
class Row:
    """What was measured of one contestant."""

    name: str
    samples: int = 0
    flops_per_sample: float = 0.0
    compute: torch.dtype = torch.float32
    seconds: list[float] = field(default_factory=list)
    """Of an update, by round."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Of an update by the processor's clock, all threads of the process."""
    waited_seconds: list[float] = field(default_factory=list)
    """Of an update, for data."""
    warm_up_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """Most memory in a turn, without what the others hold; None where it is not known, as of several on a CPU."""
    alone: bool = False
    """Measured after the others, for want of room beside them."""
    problem: str = ""
    """Why there are no numbers."""
    out_of_memory: bool = False

    @property
    def compile_seconds(self) -> float:
        """What the first updates took beyond as many usual ones."""
        usual = statistics.median(self.seconds) if self.seconds else self.warm_up_seconds[-1]
        return max(0.0, sum(self.warm_up_seconds) - len(self.warm_up_seconds) * usual)


@dataclass
class _Entered:
    """A contestant that is ready."""

    contestant: Contestant
    row: Row
    own_bytes: int
    """What it holds between its turns."""
    steps: int
    """Updates of a turn."""


@dataclass
class Rounds:
    """The measurement."""

    makers: Mapping[str, Callable[[], Contestant]]
    """What builds each contestant, by name; the first is what the others are compared with."""
    device: torch.device
    rounds: int
    turn_seconds: float
    soak_seconds: float
    budget_seconds: float
    say: Callable[[str], None]
    after_round: Callable[[], None]
    """Called with whole rows, to write them."""
    rows: dict[str, Row] = field(default_factory=dict)

    def run(self) -> None:
        """Fills the rows. Ended where it was cut short."""
        self._began = time.perf_counter()
        self.rows = {name: Row(name) for name in self.makers}
        entered = {name: each for name in self.makers if (each := self._enter(name)) is not None}
        # What had no room did not have it beside those that are there.
        crowded = [name for name, row in self.rows.items() if row.out_of_memory and len(self.makers) > 1 and entered]
        self._soak(entered)
        self._take_turns(entered, until=len(entered) / (len(entered) + len(crowded)) if entered else 1.0)
        while entered:
            entered.popitem()[1].contestant.close()
        for number, name in enumerate(crowded, 1):
            memory.free()
            self._alone(name, until=(len(self.makers) - len(crowded) + number) / len(self.makers))

    def _alone(self, name: str, until: float) -> None:
        self.rows[name] = Row(name, alone=True)
        if (entered := self._enter(name)) is not None:
            self._take_turns({name: entered}, until)
            entered.contestant.close()

    def _enter(self, name: str) -> _Entered | None:
        """A contestant, built and past its first updates; None, and a row that says why, if it cannot be."""
        row, before = self.rows[name], held_bytes(self.device)
        with self._noting(row):
            self.say(f"{name}: building")
            contestant = self.makers[name]()
            row.samples, row.compute = contestant.samples, contestant.compute
            row.flops_per_sample = contestant.flops_per_sample
            self.say(f"{name}: first {WARM_UP} updates")
            for seconds in steps(contestant, WARM_UP, self.device):
                row.warm_up_seconds.append(seconds)
            count = max(1, round(self.turn_seconds / row.warm_up_seconds[-1]))
            return _Entered(contestant, row, held_bytes(self.device) - before, count)
        memory.free()
        return None

    def _soak(self, entered: Mapping[str, _Entered]) -> None:
        if not entered or not self.soak_seconds:
            return
        self.say(f"training for {self.soak_seconds:g} s before the clock counts")
        end = time.perf_counter() + self.soak_seconds
        one = next(iter(entered.values()))
        with self._noting(one.row):
            while time.perf_counter() < end:
                self._turn(one)

    def _take_turns(self, entered: dict[str, _Entered], until: float) -> None:
        """Rounds, in an order that turns around each time, while there are rounds and (a share of) budget left."""
        for number in range(self.rounds):
            start = time.perf_counter()
            for name in list(entered) if number % 2 else list(reversed(entered)):
                with self._noting(entered[name].row):
                    self._record(entered[name])
                if entered[name].row.problem:
                    entered.pop(name).contestant.close()
                    memory.free()
            self.after_round()
            round_seconds = time.perf_counter() - start
            left = until * self.budget_seconds - (time.perf_counter() - self._began)
            if not entered or round_seconds > left:
                break

    def _record(self, one: _Entered) -> None:
        one.contestant.waited()
        seconds, cpu_seconds, peak = self._turn(one)
        one.row.seconds.append(seconds)
        one.row.cpu_seconds.append(cpu_seconds)
        one.row.waited_seconds.append(one.contestant.waited() / one.steps)
        if peak is not None:
            one.row.peak_bytes = max(peak, one.row.peak_bytes or 0)
        self.say(f"{one.row.name}: {len(one.row.seconds)} of {self.rounds}: {1e3 * seconds:.1f} ms an update")

    def _turn(self, one: _Entered) -> tuple[float, float, int | None]:
        """Seconds and processor seconds of an update, and the most memory that was held meanwhile."""
        others = held_bytes(self.device) - one.own_bytes
        # The memory of a process is not told apart by who asked for it.
        measured = forget_peak(self.device) and (self.device.type == "cuda" or len(self.makers) == 1)
        synchronize(self.device)
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(one.steps):
            one.contestant.step()
        synchronize(self.device)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return seconds / one.steps, cpu_seconds / one.steps, peak_bytes(self.device) - others if measured else None

    @contextmanager
    def _noting(self, row: Row) -> Iterator[None]:
        """What goes wrong with one contestant is noted in its row, and the others go on."""
        try:
            yield
        except (RuntimeError, MemoryError, UserError) as error:
            row.out_of_memory = not isinstance(error, UserError) and memory.ran_out(error)
            row.problem = "out of memory" if row.out_of_memory else f"{type(error).__name__}: {error}"
            self.say(f"{row.name}: {row.problem}")
            traceback.clear_frames(error.__traceback__)


def held_bytes(device: torch.device) -> int:
    """Memory in use: of the GPU by tensors, of a CPU by the process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status_bytes("VmRSS")


def forget_peak(device: torch.device) -> bool:
    """Begins a new measurement of the peak; whether that can be done here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use since."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    """A number of /proc/self/status; 0 where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


@contextmanager
def limited(budget_seconds: float) -> Iterator[None]:
    """Within the context the end of the budget, Ctrl-C and SIGTERM raise Ended."""
    reasons = {
        signal.SIGALRM: (f"the budget of {budget_seconds:g} s was over", errors.DONE),
        signal.SIGINT: ("stopped by Ctrl-C", errors.INTERRUPTED),
        signal.SIGTERM: ("stopped by SIGTERM", errors.TERMINATED),
    }

    def end(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Ended(*reasons[signal.Signals(number)])

    before = {number: signal.signal(number, end) for number in reasons}
    signal.setitimer(signal.ITIMER_REAL, budget_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
