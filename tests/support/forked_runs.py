"""Runs of `daguerre train` on several processes, forked from one that has loaded everything: each starts at once.

As a program: python forked_runs.py PLAN.json, which lists runs, one after the other:
{"size": processes, "arguments": ["train", ...], "seen": FILE, "copies": [[FROM, TO], ...], "drops": [FOLDER, ...],
"kill": N, "in": FOLDER, "areas": {FAMILY: PX}}; copies are made and folders deleted before. The last process gets
SIGKILL where it opens or renames a file in that folder for the N-th time, and so do the others then. Each process
writes the names of the samples that it trained on to FILE-RANK, a line an update. Families in "areas" read reference
images of that area. The exit codes come as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import few_samples
import pyarrow
import pytest
import reference_pictures
import torch

from daguerre.cli import main as cli_main
from daguerre.families import sd  # noqa: F401 (loaded once, before the forks)
from daguerre.run import trainer  # noqa: F401
from daguerre.training import step
from daguerre.training.state import TrainState

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def together(folder: Path, runs: Sequence[dict[str, Any]], seconds: float = 500.0) -> list[list[int]]:
    """The exit codes of the processes of each run, which together take no more than `seconds` and a minute each."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps(list(runs)))
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, __file__, str(plan)],
        capture_output=True, text=True, timeout=seconds + 60 * len(runs), env={**environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def here(runs: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The same of runs of one process each, in this process: nothing needs to be loaded again."""
    codes = []
    for one in runs:
        _prepare(one)
        with Path(f"{one['seen']}.log-0").open("w") as log, redirect_stdout(log), redirect_stderr(log):
            codes.append([cli_main.run(one["arguments"])])
    return codes


def run(folder: Path, name: str, size: int, *overrides: str, recipe: str, **more: Any) -> dict[str, Any]:
    """A run of the plan, in the folder's `NAME`."""
    place = [f"output_dir={folder}", f"run_name={name}"]
    return {
        "size": size,
        "arguments": ["train", recipe, *place, *overrides],
        "seen": str(folder / f"{name}.seen"),
        **more,
    }


def samples(folder: Path, name: str, size: int) -> list[list[str]]:
    """The samples of each update of a run, sorted: each process saw a part."""
    parts = [(folder / f"{name}.seen-{rank}").read_text().splitlines() for rank in range(size)]
    return [sorted(set(",".join(lines).split(","))) for lines in zip(*parts, strict=True)]


def _record_samples(path: str) -> None:
    original = step.update

    def update(state: TrainState, micro_batches: Any, *rest: Any, **named: Any) -> Any:
        names = [f"{n}:{k}" for b in micro_batches for n, k in zip(b.names, b.keys[:, 1].tolist(), strict=True)]
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(",".join(names) + "\n")
        return original(state, micro_batches, *rest, **named)

    step.update = update


def _process(one: dict[str, Any], rank: int, port: int) -> int:
    size = one["size"]
    if size > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    log = os.open(f"{one['seen']}.log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _record_samples(f"{one['seen']}-{rank}")
    if "kill" in one and rank == size - 1:
        _killed(one["kill"], one["in"])
    for family, area in one.get("areas", {}).items():
        reference_pictures.small_rule(pytest.MonkeyPatch(), family, area, area)
    return cli_main.run(one["arguments"])


def _prepare(one: dict[str, Any]) -> None:
    for source, copy in one.get("copies", []):
        shutil.copytree(source, copy)
    for folder in one.get("drops", []):
        shutil.rmtree(folder)


def _forked(one: dict[str, Any]) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _prepare(one)
    pids = []
    for rank in range(one["size"]):
        if (pid := os.fork()) == 0:
            code = 70
            try:
                code = _process(one, rank, port)
            except BaseException:  # noqa: BLE001 (a fork must not go on as its parent would)
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        for other in pids if codes[pid] == -signal.SIGKILL else []:
            if other not in codes:
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def _killed(number: int, folder: str) -> None:
    """Kills this process where it opens or renames a file in a folder for the `number`-th time."""
    left = [number]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename") and str(arguments[0]).startswith(folder):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(plan: str) -> None:
    torch.set_num_threads(1)
    pyarrow.array([0])  # imports pandas, where it is installed: once, before the forks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    few_samples.look_at_few()
    gc.freeze()  # no fork's collector goes over what all have loaded
    print(json.dumps([_forked(one) for one in json.loads(Path(plan).read_text())]))


if __name__ == "__main__":
    main(sys.argv[1])
