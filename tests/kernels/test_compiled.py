"""Every Triton kernel compiles for the GPUs it is written for, into code without spills and with wide loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daguerre.kernels import available


def compiled(tmp_path, *words):
    if not available.installed():
        pytest.skip("Triton is not installed (it is made for Linux alone), so no kernel is compiled")
    given = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    given.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compiled_for_gpus.py")
    done = subprocess.run([sys.executable, script, *words], env=given, capture_output=True, text=True)
    assert done.stdout.endswith("compiled\n"), done.stderr


@pytest.mark.long  # of the quick tests, test_adamw_ema.py has the formulas
def test_the_update_compiles_for_an_h100(tmp_path):
    compiled(tmp_path, "90", "adamw_ema")


@pytest.mark.long
@pytest.mark.parametrize("capability", ["80", "89", "90", "100"])
def test_every_kernel_compiles(capability, tmp_path):
    compiled(tmp_path, capability)
