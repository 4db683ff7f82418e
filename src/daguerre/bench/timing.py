"""Interleaved timing of variants, in one process: building, warming up, soaking, rounds. Results survive interruption.

Each has a turn as soon as it is built, so that there is a number of it however long the others take to build. One that
runs out of memory among the others is measured alone after them, and its result says so. One that has no room at all,
or fails, leaves a result with the reason. Ctrl-C, SIGTERM and the end of the budget raise `Ended` wherever the process
is; the results hold what was measured until then.
"""

import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from daguerre import errors
from daguerre.bench.variants import Variant
from daguerre.errors import UserError
from daguerre.training import oom
from daguerre.training.performance.peak_rates import synchronize

WARM_UP = 3
"""Updates before anything counts: compilation, choice of kernels, first allocations."""


class Ended(BaseException):
    """The measurement is over before its end. No library that goes on after an Exception (torch's compiler) goes on
    after this."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.reason, self.exit_code = reason, exit_code


@dataclass
class Result:
    """Measurements of one variant."""

    name: str
    samples: int = 0
    flops_per_sample: float = 0.0
    compute: torch.dtype = torch.float32
    first_seconds: float | None = None
    """Time of an update in the turn with which a variant is ready: a number even if no round follows."""
    seconds: list[float] = field(default_factory=list)
    """Time of an update, by round: only turns of the same round are compared."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU time of an update, all threads of the process."""
    waited_seconds: list[float] = field(default_factory=list)
    """Time that an update waited for data."""
    warm_up_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """Most memory in updates, the first ones too, without what the others hold; None where it is not known, as of
    several on a CPU."""
    alone: bool = False
    """Measured after the others, as there was no room among them."""
    problem: str = ""
    """Why there are no numbers."""
    out_of_memory: bool = False

    @property
    def usual_seconds(self) -> float | None:
        """Time of an update: the median over rounds, or of the first turn; None where there was none."""
        return statistics.median(self.seconds) if self.seconds else self.first_seconds

    @property
    def compile_seconds(self) -> float:
        """Time of the first updates beyond as many usual ones."""
        usual = self.warm_up_seconds[-1] if self.usual_seconds is None else self.usual_seconds
        return max(0.0, sum(self.warm_up_seconds) - len(self.warm_up_seconds) * usual)


@dataclass
class _Entered:
    """A variant that is built."""

    variant: Variant
    result: Result
    own_bytes: int = 0
    """Memory that it holds between its turns."""
    steps: int = 1
    """Updates of a turn."""


@dataclass
class Rounds:
    """The measurement."""

    makers: Mapping[str, Callable[[], Variant]]
    """Builders of the variants, by name; the others are compared with the first."""
    device: torch.device
    rounds: int
    turn_seconds: float
    soak_seconds: float
    budget_seconds: float
    say: Callable[[str], None]
    write: Callable[[], None]
    """Called after each round, and when a variant is ready, with whole results."""
    results: dict[str, Result] = field(default_factory=dict)
    _crowded: list[str] = field(default_factory=list)
    """Variants that ran out of memory among others, to be measured alone."""

    def run(self) -> None:
        """Fills the results. Ended where it was cut short."""
        self._began = time.perf_counter()
        self.results = {name: Result(name) for name in self.makers}
        entered: dict[str, _Entered] = {}
        for result in self.results.values():
            self._enter(result, entered)
        self._soak(entered)
        self._take_turns(entered)
        while self._crowded:
            self._alone(self._crowded.pop(0))

    def _alone(self, name: str) -> None:
        """Retries a variant alone. Shared rounds are kept until it has rounds of its own."""
        oom.free()
        before, result = self.results[name], Result(name, alone=True)
        entered: dict[str, _Entered] = {}
        if not before.seconds:
            self.results[name] = result
        try:
            self._enter(result, entered)
            self._take_turns(entered)
        finally:
            if result.seconds:
                self.results[name] = result

    def _enter(self, result: Result, entered: dict[str, _Entered]) -> None:
        with self._noting(result, entered):
            self._ready(result, entered)
        self.write()

    def _ready(self, result: Result, entered: dict[str, _Entered]) -> None:
        """Builds a variant and takes it through its first updates and a turn."""
        before = held_bytes(self.device)
        self.say(f"{result.name}: building")
        one = entered[result.name] = _Entered(self.makers[result.name](), result)
        result.samples, result.compute = one.variant.samples, one.variant.compute
        result.flops_per_sample = one.variant.flops_per_sample
        self.say(f"{result.name}: first {WARM_UP} updates")
        one.variant.begin()
        with self._peak_of(one, before):  # a recording's memory (training.capture) is seen while it is made
            for _ in range(WARM_UP):
                start = time.perf_counter()
                one.variant.step()
                synchronize(self.device)
                result.warm_up_seconds.append(time.perf_counter() - start)
        one.own_bytes = held_bytes(self.device) - before
        one.steps = max(1, round(self.turn_seconds / result.warm_up_seconds[-1]))
        result.first_seconds, _ = self._turn(one)
        self.say(f"{result.name}: ready: {1e3 * result.first_seconds:.1f} ms an update")

    def _soak(self, entered: dict[str, _Entered]) -> None:
        if not entered or not self.soak_seconds:
            return
        self.say(f"training for {self.soak_seconds:g} s before the clock counts")
        end = time.perf_counter() + self.soak_seconds
        while entered and time.perf_counter() < end:
            name = next(iter(entered))
            with self._noting(self.results[name], entered):
                self._turn(entered[name])

    def _take_turns(self, entered: dict[str, _Entered]) -> None:
        """Rounds, in an order that turns around each time, while there are rounds and budget left; of the budget those
        that wait to be measured alone are left their share. Afterwards nobody is entered any more."""
        began = time.perf_counter()
        left = self.budget_seconds - (began - self._began)
        for number in range(self.rounds):
            start = time.perf_counter()
            for name in list(entered) if number % 2 else list(reversed(entered)):
                with self._noting(entered[name].result, entered):
                    self._record(entered[name])
            self.write()
            now, share = time.perf_counter(), len(entered) / max(1, len(entered) + len(self._crowded))
            if now + (now - start) > began + left * share:
                break
        for name in list(entered):
            entered.pop(name).variant.close()

    def _record(self, one: _Entered) -> None:
        one.variant.waited()
        seconds, cpu_seconds = self._turn(one)
        one.result.seconds.append(seconds)
        one.result.cpu_seconds.append(cpu_seconds)
        one.result.waited_seconds.append(one.variant.waited() / one.steps)
        self.say(f"{one.result.name}: {len(one.result.seconds)} of {self.rounds}: {1e3 * seconds:.1f} ms an update")

    def _turn(self, one: _Entered) -> tuple[float, float]:
        """Seconds and processor seconds of an update; the result gets the most memory that was held meanwhile."""
        one.variant.begin()
        with self._peak_of(one, held_bytes(self.device) - one.own_bytes):
            synchronize(self.device)
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(one.steps):
                one.variant.step()
            synchronize(self.device)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return seconds / one.steps, cpu_seconds / one.steps

    @contextmanager
    def _peak_of(self, one: _Entered, others: int) -> Iterator[None]:
        """The result gets the most memory that is held within the context, without what the `others` hold."""
        # The memory of a process is not told apart by who asked for it.
        measured = forget_peak(self.device) and (self.device.type == "cuda" or len(self.makers) == 1)
        yield
        if measured:
            one.result.peak_bytes = max(peak_bytes(self.device) - others, one.result.peak_bytes or 0)

    def _noting(self, result: Result, entered: dict[str, _Entered]) -> ExitStack:
        """A context: what goes wrong with one variant is noted in its result; it leaves, and the others go on."""
        stack = ExitStack()
        stack.push(partial(self._noted, result, entered))
        return stack

    def _noted(
        self, result: Result, entered: dict[str, _Entered], _kind: object, error: BaseException | None, _trace: object
    ) -> bool:
        """Returns True for an error, of whatever class: compilers have their own. `Ended` is not an error."""
        if not isinstance(error, Exception):
            return False
        result.out_of_memory = isinstance(error, (RuntimeError, MemoryError)) and oom.ran_out(error)
        result.problem = "out of memory" if result.out_of_memory else f"{type(error).__name__}: {error}"
        if not result.out_of_memory and not isinstance(error, UserError):
            traceback.print_exception(error)
        self.say(f"{result.name}: {result.problem}")
        traceback.clear_frames(error.__traceback__)
        if result.name in entered:
            entered.pop(result.name).variant.close()
        if result.out_of_memory and entered:
            self._crowded.append(result.name)
        oom.free()
        return True


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
