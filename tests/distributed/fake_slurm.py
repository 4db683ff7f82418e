"""Stands for srun, scontrol, scancel and sbatch on one machine, and for the interpreter of the tasks, in test_slurm.py.

Called by the name that it is linked under. Its tasks write what they were given into $FAKE_FOLDER/task-RANK.json, wait
there for a signal or for the file `finish` (which holds an exit code), and exit as a run does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path(os.environ["FAKE_FOLDER"])


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        os.write(1, b"127.0.0.1\n127.0.0.2\n")  # at once: whoever reads may leave after the first line
    else:
        (FOLDER / "scontrol").write_text(" ".join(words))
    return 0


def srun(words: list[str]) -> int:
    options = [word for word in words if word.startswith("--")]
    (FOLDER / "srun").write_text(" ".join(options))
    nodes, each = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for rank in range(nodes * each):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each, "SLURM_STEP_ID": 0}
        own |= {"SLURM_STEP_NUM_TASKS": nodes * each, "SLURM_STEP_NUM_NODES": nodes}
        environ = {**os.environ, **{name: str(value) for name, value in own.items()}}
        tasks.append(subprocess.Popen(words[len(options) :], env=environ))
    (FOLDER / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    signal.signal(signal.SIGUSR1, lambda got, frame: [task.send_signal(got) for task in tasks] and None)
    # "forcing job termination", as the real one has it
    signal.signal(signal.SIGTERM, lambda got, frame: [task.kill() for task in tasks] and None)
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def scancel(words: list[str]) -> int:
    """`--signal=NAME JOB`: to the tasks, not to the shell."""
    number = signal.Signals[f"SIG{words[0].partition('=')[2]}"]
    for pid in (FOLDER / "tasks").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), number)
    return 0


def sbatch(words: list[str]) -> int:
    (FOLDER / "sbatch").write_text("\n".join(words))
    print("Submitted batch job 4711")
    return 0


def task(words: list[str]) -> int:
    got: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: got.append(number))
    path = FOLDER / f"task-{os.environ['SLURM_PROCID']}.json"
    path.with_suffix(".new").write_text(json.dumps({"words": words, "environ": dict(os.environ)}))
    path.with_suffix(".new").rename(path)
    while not got:
        if (FOLDER / "finish").exists():
            return int((FOLDER / "finish").read_text())
        time.sleep(0.02)
    time.sleep(0.2)  # saves
    return 128 + got[0]


if __name__ == "__main__":
    acts = {"srun": srun, "scontrol": scontrol, "scancel": scancel, "sbatch": sbatch, "python of tasks": task}
    sys.exit(acts[Path(sys.argv[0]).name](sys.argv[1:]))
