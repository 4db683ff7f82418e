"""The part that a rank holds follows from the mesh alone; slices saved on one mesh are the network on every other."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from daguerre.distributed.mesh import AXES, Mesh
from daguerre.distributed.sharding_rules import ParameterSplit, own_region

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("degrees", list(itertools.product((1, 2), (1, 2, 3, 4), (1, 2))))
@pytest.mark.parametrize("tensor", [None, 0, 1])
@pytest.mark.parametrize("fsdp", [0, 1])
def test_parts_are_the_whole_once_for_each_copy(degrees, tensor, fsdp):
    mesh = Mesh(dict.fromkeys(AXES, 1), dict(zip(AXES, degrees, strict=True)))
    shape = (6, 12) if fsdp == 0 else (4, 24)
    placed = ParameterSplit("w", shape, ("heads", "embed"), tensor if degrees[2] > 1 else None, fsdp, True)
    seen: dict[tuple[int, ...], int] = {}
    for rank in range(mesh.devices):
        offsets, extent = own_region(placed, mesh, rank)
        assert prod(extent) <= placed.elements(mesh)
        for at in itertools.product(*(range(o, o + n) for o, n in zip(offsets, extent, strict=True))):
            seen[at] = seen.get(at, 0) + 1
    copies = degrees[0] * (1 if placed.tensor is not None else degrees[2])
    assert seen == dict.fromkeys(itertools.product(*map(range, shape)), copies)


@pytest.mark.long
@pytest.mark.parametrize(("chain", "saves"), [("some", 2), ("all", 12)])
def test_what_a_mesh_saved_any_mesh_loads(tmp_path, chain, saves):
    """The engine's own splits of tiny SD and SDXL with their text encoders, gated layers' rows among them."""
    path = os.pathsep.join([str(TESTS / "support"), str(TESTS / "distributed"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "distributed" / "saved_meshes.py"), str(tmp_path), chain],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loads = json.loads(done.stdout)
    assert len(loads) == saves
    assert all(loads.values()), loads
