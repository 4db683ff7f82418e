"""Triton's interpreter, by which a CPU computes the kernels of the GPU, slowly: its tests are long, and skipped without
Triton."""

import pytest
import torch

from daguerre.kernels import available

HOW = "Triton is not installed (it is made for Linux alone), so its kernels are NOT tested"


@pytest.fixture
def interpreter(monkeypatch):
    """Within the test, Triton kernels compute on tensors of the CPU."""
    if not available.installed():
        pytest.skip(HOW)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert available.triton(torch.device("cpu"))


@pytest.fixture(params=["plain", pytest.param("triton", marks=pytest.mark.long)])
def computed_by(request):
    """Each test twice: by the form for CPUs, and by the kernel through the interpreter."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return request.param
