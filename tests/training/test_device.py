"""The way of a batch to its device: nothing changes on a CPU; a GPU gets it by a stream of its own."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from daguerre.training import device
from daguerre.types import Batch

BATCH = Batch(
    np.zeros((2, 3)), {"image": torch.ones(2, 3, 4, 4, dtype=torch.uint8)}, ["", ""], torch.ones(2), ["a", "b"],
    np.zeros((2, 6)), {"noise": torch.randn(2, 4, 2, 2)},
)  # fmt: skip


def test_on_a_cpu_it_is_the_same_batch():
    found = device.on(torch.device("cpu"), BATCH)
    assert found.pixels_BCHW is BATCH.pixels_BCHW
    assert found.draws["noise"] is BATCH.draws["noise"]


@pytest.fixture
def said(monkeypatch):
    """What a GPU is told, in order."""
    told = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def stream(of):
        told.append(f"begin {of.name}")
        yield
        told.append(f"end {of.name}")

    def to(tensor, where, non_blocking):
        told.append(f"to {where}{' at once' if non_blocking else ''}")
        return tensor

    monkeypatch.setattr(device, "_stream", lambda where: Stream("sending"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: Stream("computing"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: told.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, of: told.append(f"kept for {of.name}"))
    return told


def test_a_gpu_gets_it_apart_and_waits(said):
    device.on(torch.device("cuda", 1), replace(BATCH, weights_B=torch.ones(2)))
    each = ["pinned", "to cuda:1 at once", "kept for computing"]
    assert said == ["begin sending", *each, *each, "end sending", "computing waits for sending"]
