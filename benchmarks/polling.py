"""What it costs a run that it can be watched and asked: looks for actions, lines of metrics, and its log.

    python benchmarks/polling.py [--pairs 10] [--updates 300] [--turn 20] [--recipe quickstart] [key=value ...]

One run trains with one thread. Of each pair 300 updates do all this and 300 none of it, in turns of 20 updates whose
order changes, so that spells in which a shared machine is slower meet both. Counted is processor time of the whole
process. Printed: the mean over the pairs of what updates with it take more, in per cent, with its 95 % interval by
Student's t; and the same from the time spent inside those calls alone, which the machine disturbs less. `--calls`
measures the calls without a run: a look that is not due yet, one into an empty folder (one is due each second), and a
line of 24 metrics.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from daguerre.checkpoint import actions
from daguerre.checkpoint.actions import Inbox
from daguerre.checkpoint.run_dir import RunFolder, lock_holder
from daguerre.cli import main as cli
from daguerre.run import trainer
from daguerre.run.control import Control
from daguerre.tracking.console import Progress
from daguerre.tracking.sinks import MetricsFile

WARM = 50
"""Updates before the first turn, in which everything starts."""
_T95 = {4: 2.776, 9: 2.262, 19: 2.093}


class Turns:
    """Processor time of updates that write and look, and of such that do not, by pairs; they change places each
    `turn` updates."""

    def __init__(self, pairs: int, updates: int, turn: int) -> None:
        each = updates // turn
        self.order = [
            kind for number in range(pairs * each) for kind in ((True, False) if number % 2 else (False, True))
        ]
        self.turn, self.turns_of_a_pair, self.done = turn, 2 * each, 0
        self.seconds: dict[bool, list[float]] = {True: [0.0] * pairs, False: [0.0] * pairs}
        self.inside = [0.0] * pairs
        self._began = self._inside = 0.0

    @property
    def total(self) -> int:
        return WARM + len(self.order) * self.turn

    @property
    def works(self) -> bool:
        """True in a turn that does everything."""
        at = (self.done - WARM) // self.turn
        return self.done < WARM or at >= len(self.order) or self.order[at]

    def ended(self) -> None:
        """Notes the end of an update."""
        number, within = divmod(self.done - WARM, self.turn)
        if within:
            return
        if 0 < number <= len(self.order):
            kind, pair = self.order[number - 1], (number - 1) // self.turns_of_a_pair
            self.seconds[kind][pair] += time.process_time() - self._began
            self.inside[pair] += self._inside if kind else 0.0
        self._began, self._inside = time.process_time(), 0.0

    def timed(self, call: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """The call in turns that do everything, with its time; `otherwise` in the others."""

        def turn(*given: Any, **named: Any) -> Any:
            if not self.works:
                return otherwise(*given, **named)
            began = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self._inside += time.thread_time() - began

        return turn


@contextmanager
def watched(turns: Turns) -> Iterator[None]:
    """A run whose calls for the page are left out by turns."""
    after = trainer.after

    def noted(run: Any, update: Any, stopping: bool) -> None:
        after(run, update, stopping)
        turns.done += 1
        turns.ended()

    def nothing(*given: Any, **named: Any) -> None:
        return None

    with (
        mock.patch.object(trainer, "after", noted),
        mock.patch.object(Control, "signalled", turns.timed(Control.signalled, lambda own: own.stop.signal)),
        mock.patch.object(Control, "obey", turns.timed(Control.obey, lambda own, run, signal: (run, signal))),
        mock.patch.object(MetricsFile, "write", turns.timed(MetricsFile.write, nothing)),
        mock.patch.object(Progress, "update", turns.timed(Progress.update, nothing)),
    ):
        yield


def calls(times: int) -> None:
    """Prints microseconds of processor time of each."""
    with tempfile.TemporaryDirectory() as place:
        run = RunFolder(Path(place) / "run")
        run.actions.mkdir(parents=True)
        file, line = MetricsFile(run.metrics), {f"learning/value_{i}": 0.123456789 * i for i in range(24)}
        with run.hold():
            holder = lock_holder(run.path)
            assert holder is not None
            inbox = Inbox(run, holder, print)
            inbox.take()
            print(f"a look that is not due: {_microseconds(inbox.take, times):.2f}")
            with mock.patch.object(actions, "LOOK_SECONDS", 0.0):
                inbox = Inbox(run, holder, print)
                print(f"a look: {_microseconds(inbox.take, times):.1f}")
        print(f"a line: {_microseconds(lambda: file.write(1, 1, line), times):.1f}")
        file.close()


def _microseconds(call: Callable[[], Any], times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        call()
    return 1e6 * (time.thread_time() - began) / times


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval."""
    mean, half = statistics.mean(values), _T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.3f} % ({mean - half:+.3f} to {mean + half:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, choices=[count + 1 for count in _T95], default=10)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--turn", type=int, default=20)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    if given.calls:
        calls(5000)
        return
    turns = Turns(given.pairs, given.updates, given.turn)
    with tempfile.TemporaryDirectory() as folder, watched(turns):
        words = ["train", given.recipe, f"output_dir={folder}", "run_name=watched", f"duration={turns.total} steps"]
        words += ["validation.every=null", "checkpoint.every=null", "sampling.num_images=0", "loader.num_workers=0"]
        assert cli.run([*words, *given.overrides]) == 0
    with_it, without = turns.seconds[True], turns.seconds[False]
    print(f"an update: {1e3 * statistics.mean(without) / given.updates:.1f} ms of processor time without")
    print("all of an update: " + interval([100 * (a / b - 1) for a, b in zip(with_it, without, strict=True)]))
    print("the calls alone: " + interval([100 * a / b for a, b in zip(turns.inside, without, strict=True)]))


if __name__ == "__main__":
    main()
