"""Runs of `daguerre train` as launchers start them, for test_train_launched.py: processes that are signalled, killed or
stopped in a known phase. The run is tiny_runs' one.

As a program (`python launched.py FOLDER ARGUMENTS ...`) it is `daguerre ARGUMENTS ...` whose phases are seen from
outside: each call of one adds a letter to the file FOLDER/PHASE-RANK. $LINGER is a phase that takes $LINGER_SECONDS
(one) longer; $HANG and $FAIL are `PHASE RANK CALL`: where a rank stands still for ever, or fails.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tiny_runs

from daguerre.cli import main as cli_main
from daguerre.run import results, samples
from daguerre.training import step

FAKE_SLURM = Path(__file__).parents[1] / "distributed" / "fake_slurm.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


class Launched:
    """Processes of one run."""

    def __init__(
        self, folder: Path, size: int, *overrides: str, torchrun: Sequence[str] | None = None, **environ: str
    ) -> None:
        """By torchrun with these options; else each rank by itself, with the variables that torchrun sets."""
        self.folder, self.size = folder, size
        folder.mkdir(parents=True, exist_ok=True)
        for mark in folder.glob("*-[0-9]"):
            mark.unlink()
        program = [str(Path(__file__)), str(folder), *tiny_runs.arguments(folder, *overrides)]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environ}
        if torchrun is not None:
            words = [*TORCHRUN, "--standalone", f"--nproc-per-node={size}", *torchrun, *program]
            self.processes = [self._start(words, common, "log")]
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        self.processes = [
            self._start(
                [sys.executable, *program], common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, f"log-{rank}"
            )
            for rank in range(size)
        ]

    def _start(self, words: Sequence[str], environ: dict[str, str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("w") as file:
            return subprocess.Popen(words, stdout=file, stderr=file, env=environ, start_new_session=True)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in range(self.size):
            if (self.folder / f"pid-{rank}").exists() and runs(self.pid(rank)):
                os.kill(self.pid(rank), signal.SIGKILL)

    def reached(self, phase: str, times: int = 1, by: Sequence[int] | None = None, seconds: float = 120.0) -> None:
        """Waits until ranks (all, where none is named) have been in a phase so often."""
        deadline = time.monotonic() + seconds
        marks = [self.folder / f"{phase}-{rank}" for rank in (range(self.size) if by is None else by)]
        while not all(mark.exists() and mark.stat().st_size >= times for mark in marks):
            assert time.monotonic() < deadline, (
                f"{phase}: {[mark.name for mark in marks if mark.exists()]}\n{self.log()}"
            )
            assert any(process.poll() is None for process in self.processes), self.log()
            time.sleep(0.02)

    def send(self, number: int, to: Sequence[int] | None = None) -> None:
        """A signal to ranks; to all that were started (torchrun's agent alone) where none is named."""
        for pid in [process.pid for process in self.processes] if to is None else [self.pid(rank) for rank in to]:
            os.kill(pid, number)

    def pid(self, rank: int) -> int:
        """Of a rank, once it has started."""
        return int((self.folder / f"pid-{rank}").read_text())

    def codes(self, seconds: float) -> list[int]:
        """Exit codes; all must be gone in time."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.log()) from error

    def log(self) -> str:
        """What all of them printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log*")))

    def workers(self) -> list[int]:
        """Process ids of what the ranks have started."""
        ranks = {str(self.pid(rank)) for rank in range(self.size)}
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                if path.read_text().rpartition(")")[2].split()[1] in ranks:
                    found.append(int(path.parent.name))
        return found

    def alive(self) -> list[int]:
        """Ranks whose processes are there still; one that ended while it was imported has left no id."""
        started = [rank for rank in range(self.size) if (self.folder / f"pid-{rank}").exists()]
        return [rank for rank in started if runs(self.pid(rank))]


class Queue:
    """Stands for SLURM on this machine: runs an sbatch file, as often as it asks for another turn."""

    def __init__(self, folder: Path, script: Path, nodes: int, tasks: int) -> None:
        self.script, self.work = script, folder / "slurm"
        programs = folder / "slurm-programs"
        for made in (self.work, programs):
            made.mkdir()
        fake = FAKE_SLURM.read_text()
        for name in ("srun", "scontrol", "scancel"):
            (programs / name).write_text(f"#!{sys.executable}\n{fake}")
            (programs / name).chmod(0o755)
        self.python = programs / "python"
        """For `python -u -m daguerre`: this file's program, each of whose updates takes its time."""
        self.python.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" "{__file__}" "{self.work}" "$@"\n')
        self.python.chmod(0o755)
        self.environ = {
            **os.environ, "LINGER": "training", "LINGER_SECONDS": "0.25",
            "PATH": f"{programs}:{os.environ['PATH']}", "FAKE_FOLDER": str(self.work),
            "SLURM_JOB_ID": "4711", "SLURM_NNODES": str(nodes), "SLURM_NTASKS_PER_NODE": str(tasks),
            "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": str(nodes * tasks), "SLURM_CPUS_PER_TASK": "1",
        }  # fmt: skip
        self.turns = 0

    def turn(self) -> subprocess.Popen[bytes]:
        """Runs the file once more."""
        self.turns += 1
        (self.work / "scontrol").unlink(missing_ok=True)
        with (self.work / f"turn-{self.turns}").open("w") as log:
            own = self.environ | {"SLURM_RESTART_COUNT": str(self.turns - 1)}
            return subprocess.Popen(["bash", str(self.script)], stdout=log, stderr=log, env=own)

    def asked_again(self) -> bool:
        """Whether the last turn asked for another."""
        return (self.work / "scontrol").exists()

    def log(self) -> str:
        """What the last turn printed."""
        return (self.work / f"turn-{self.turns}").read_text()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _seen(folder: Path, rank: str, phase: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with a mark of each call; the phase that lingers takes its time."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        mark = folder / f"{phase}-{rank}"
        with mark.open("a") as file:
            file.write("x")
        now = f"{phase} {rank} {mark.stat().st_size}"
        if os.environ.get("LINGER") == phase:
            time.sleep(float(os.environ.get("LINGER_SECONDS", "1")))
        if os.environ.get("HANG") == now:
            threading.Event().wait()
        if os.environ.get("FAIL") == now:
            raise ZeroDivisionError("of its own")
        return act(*args, **kwargs)

    return marked


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    (folder / f"new-{rank}").write_text(str(os.getpid()))
    (folder / f"new-{rank}").rename(folder / f"pid-{rank}")
    step.update = _seen(folder, rank, "training", step.update)
    results.validate = _seen(folder, rank, "validating", results.validate)
    results.save = _seen(folder, rank, "saving", results.save)
    samples.write = _seen(folder, rank, "drawing", samples.write)
    results.evaluate = _seen(folder, rank, "evaluating", results.evaluate)
    sys.argv[1:] = sys.argv[2:]
    cli_main.main()


if __name__ == "__main__":
    main()
