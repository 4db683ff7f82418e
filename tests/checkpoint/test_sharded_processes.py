"""Real processes over gloo: what four save others load; whoever is killed whenever, nothing is a mixture."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LONG_KILLS = 60


def run(mode: str, folder: Path, *arguments: object, timeout: float = 120) -> dict[str, Any]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "saving_ranks.py"), mode, str(folder), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long  # of the quick tests, test_sharded.py has every mesh
def test_four_processes_save_and_three_two_and_one_go_on(tmp_path):
    found = run("reshard", tmp_path)
    assert found == {"names": ["step-00000006", "step-00000007"], "equal": [True, True]}


@pytest.mark.long
def test_ranks_killed_at_random_moments(tmp_path):
    found = run("kills", tmp_path, 5, 1)
    assert found["trials"] == 5


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_ranks_killed_at_many_random_moments(tmp_path, seed):
    found = run("kills", tmp_path, LONG_KILLS, seed, timeout=1200)
    assert found["all"] > 10
    assert found["rank 0"] > 5
    assert found["rank other"] > 5
    assert found["left"] > 10, "saves were cut"
    assert found["acknowledged"] > 10
    assert len(found["sound"]) >= 2


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: apt-get install strace")
@pytest.mark.parametrize("syscall", ["openat", "write", "fsync", "rename", "mkdir", "unlinkat", "rmdir", "close"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_at_every_system_call(tmp_path, rank, syscall):
    found = run("syscalls", tmp_path, rank, syscall, timeout=1800)
    if rank == 0 or syscall in ("openat", "write", "fsync", "close"):
        assert found["points"] > 0
