"""Networks split over four processes train as one that is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from daguerre.distributed import parallelize
from daguerre.distributed.mesh import AXES, Mesh
from daguerre.distributed.sharding_rules import ParameterSplit

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


def test_a_whole_weight_is_freed_when_it_is_split(monkeypatch: pytest.MonkeyPatch):
    """Else the device has to hold the whole network beside its part of it."""
    component = nn.Module()
    component.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    net = nn.Module()
    net.unet = component
    whole = {name: weakref.ref(p) for name, p in net.named_parameters()}
    left = list[int]()

    def splits(module: nn.Module, **_: Any) -> None:
        for each in module.modules():
            if isinstance(each, nn.Linear):
                each.weight = nn.Parameter(torch.zeros(1, 2))
        left.append(sum(each() is not None for each in whole.values()))

    monkeypatch.setattr(parallelize, "fully_shard", splits)
    mesh = Mesh(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 1) | {"fsdp": 2})
    placed = [ParameterSplit(name, (2, 2), ("embed", "mlp"), None, 0, True) for name in whole]
    devices: Any = dict.fromkeys(AXES)
    parallelize.apply(net, mesh, placed, devices, {"Linear"}, ())
    assert left[:3] == [3, 2, 1], "of the four, behind each block"
