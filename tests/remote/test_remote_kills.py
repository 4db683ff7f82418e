"""Ranks that save into a bucket are killed at random moments: what can be read is whole. Minutes: `make test-long`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from buckets import moto, s3_run  # noqa: F401 (fixtures)

pytestmark = pytest.mark.long

HERE = Path(__file__).parent


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_moments_nothing_that_can_be_read_is_wrong(s3_run, tmp_path, seed):  # noqa: F811
    """Twenty-five kills each, of one rank or of all, of one, two and three that share no disk."""
    program = [sys.executable, str(HERE / "far_saving.py"), s3_run.url, str(tmp_path), "25", str(seed)]
    paths = os.pathsep.join(str(HERE.parent / folder) for folder in ("../src", "checkpoint", "data"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["trials"] == 25
    assert found["saved"] > 10, "it did save between the kills"
