"""Every Triton kernel compiles for the GPUs it is written for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daguerre.kernels import available


@pytest.mark.long
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    if not available.installed():
        pytest.skip("Triton is missing, so no kernel is compiled: .venv/bin/pip install -c constraints.txt triton")
    given = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    given.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compiled_for_gpus.py")
    done = subprocess.run([sys.executable, script], env=given, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr
