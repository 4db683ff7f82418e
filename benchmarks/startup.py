"""From the command to the first update: seconds of `daguerre train RECIPE` in a fresh process, part by part.

    python benchmarks/startup.py [RECIPE] [--times 3] [--out FILE] [key=value ...]

Each time is a process of its own in a folder of its own, ended after its first update. By the clock, and in processor
time of all threads, which other work on the machine disturbs less; medians over the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

WHOLE = "all of it"
IMPORTING = "recipe, and importing what it names"
REST = "importing the rest"
CALLS = {
    "reading networks": ("daguerre.run.setup", "load"),
    "putting them together": ("daguerre.run.setup", "build"),
    "optimizer and averages": ("daguerre.training.state", "TrainState.start"),
    "data": ("daguerre.run.setup", "open_datasets"),
    "first batch": ("daguerre.data.loading.loader", "Loading.first"),
    "counting arithmetic": ("daguerre.run.preflight", "training_flops_per_sample"),
    "probe": ("daguerre.run.preflight", "seconds"),
}
"""Parts that are one call each."""
FIRST = "first update"
PARTS = (IMPORTING, REST, *CALLS, FIRST)


class Times:
    """Seconds by part: by the clock and of the processor."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its time added to a part."""

        def wrapped(*arguments: Any, **named: Any) -> Any:
            start, cpu = time.perf_counter(), time.process_time()
            result = call(*arguments, **named)
            self.add(part, time.perf_counter() - start, time.process_time() - cpu)
            return result

        return wrapped

    def add(self, part: str, seconds: float, cpu_seconds: float) -> None:
        """More of a part."""
        before = self.found.get(part, [0.0, 0.0])
        self.found[part] = [before[0] + seconds, before[1] + cpu_seconds]


def child(out: Path, begun: float, recipe: str, given: list[str]) -> None:
    """Trains until after the first update, writes the times and leaves."""
    times = Times()
    configs = import_module("daguerre.config.config")
    configs.load(recipe, given)
    times.add(IMPORTING, time.time() - begun, time.process_time())
    times.timed(REST, import_module)("daguerre.run.trainer")
    for part, (module, path) in CALLS.items():
        owner: Any = import_module(module)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        setattr(owner, name, times.timed(part, getattr(owner, name)))  # a class method is found bound, and stays so
    step: Any = import_module("daguerre.training.step")
    update = step.update

    def first_update(*arguments: Any, **named: Any) -> None:
        times.timed(FIRST, update)(*arguments, **named)
        times.add(WHOLE, time.time() - begun, time.process_time())
        out.write_text(json.dumps(times.found))
        os._exit(0)

    step.update = first_update
    import_module("daguerre.cli.main").run(["train", recipe, *given])


def measure(recipe: str, given: list[str]) -> dict[str, list[float]]:
    """The times of one process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, __file__, "--child", str(out), str(time.time()), recipe, f"output_dir={folder}"]
        done = subprocess.run([*command, *given], capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(f"the run ended before its first update:\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())


def table(found: list[Mapping[str, list[float]]]) -> list[str]:
    """A line a part: medians by the clock and of the processor."""

    def middle(part: str, which: int) -> float:
        return statistics.median(each.get(part, [0.0, 0.0])[which] for each in found)

    lines = ["| part | seconds | processor seconds |", "|---|---|---|"]
    for part in PARTS:
        lines.append(f"| {part} | {middle(part, 0):.2f} | {middle(part, 1):.2f} |")
    others = [middle(WHOLE, i) - sum(middle(part, i) for part in PARTS) for i in (0, 1)]
    lines.append(f"| what lies between them | {others[0]:.2f} | {others[1]:.2f} |")
    return [*lines, f"| {WHOLE} | {middle(WHOLE, 0):.2f} | {middle(WHOLE, 1):.2f} |"]


def main() -> None:
    """Parent, or child of it."""
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5:])
        return
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("recipe", nargs="?", default="quickstart")
    arguments.add_argument("overrides", nargs="*", help="key=value, as for `daguerre train`")
    arguments.add_argument("--times", type=int, default=3)
    arguments.add_argument("--out", type=Path)
    own = arguments.parse_args()
    found: list[Mapping[str, list[float]]] = [measure(own.recipe, own.overrides) for _ in range(own.times)]
    print("\n".join(table(found)))
    if own.out:
        own.out.write_text(json.dumps({"recipe": own.recipe, "processes": found}, indent=1))


if __name__ == "__main__":
    main()
