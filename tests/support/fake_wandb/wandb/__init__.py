"""Stands for the package of Weights & Biases: keeps what it is told, as the real one treats it, for tests to look at.

A run whose id is known and whose mode is online goes on after its last step, as the server has it; an offline one
knows nothing of earlier ones. Rows below the present step are dropped.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

SERVER: dict[str, Run] = {}
RUNS: list[Run] = []
REFUSES: list[Exception] = []
"""Raised by the next calls of `log`, in turn."""


class Settings(SimpleNamespace):
    base_url = "https://api.wandb.test"


class Image:
    def __init__(self, image, caption):
        self.image, self.caption = image, caption


class Run:
    def __init__(self, arguments):
        self.arguments, self.axes, self.rows, self.finished = arguments, {}, {}, False
        known = SERVER.get(arguments["id"]) if arguments["mode"] == "online" else None
        self.rows = known.rows if known else {}
        self.step = max(self.rows) + 1 if self.rows else 0
        self.url = "https://wandb.test/run" if arguments["mode"] == "online" else None
        folder = Path(arguments["dir"]) / "wandb" / f"offline-run-{len(RUNS):04d}-{arguments['id']}"
        self.dir = str(folder / "files")
        if arguments["mode"] == "offline":
            Path(self.dir).mkdir(parents=True)

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, values, step):
        if REFUSES:
            raise REFUSES.pop(0)
        assert step >= self.step, "the caller leaves out what the server would drop"
        self.step = step
        self.rows.setdefault(step, {}).update(values)

    def finish(self, exit_code):
        self.finished, self.exit_code = True, exit_code


def init(**arguments):
    run = Run(arguments)
    SERVER[arguments["id"]] = run
    RUNS.append(run)
    return run
