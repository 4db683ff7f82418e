"""Networks split over four processes train as one that is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_every_mesh_trains_as_one_process(kind: str, tmp_path: Path):
    """Losses, gradient norms and weights of five updates with accumulation and clipping, in float64."""
    out = tmp_path / "out.json"
    path = os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(TESTS / "distributed" / "splits.py")]
    processes = [
        subprocess.Popen([*command, kind, str(rank), str(tmp_path / "rendezvous"), str(out)], env=environment)
        for rank in range(4)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
    found = json.loads(out.read_text())
    assert len(found) == 5
    worst = {name: numbers for name, numbers in found.items() if max(numbers.values()) > 1e-10}
    assert worst == {}, worst
