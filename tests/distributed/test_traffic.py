"""What devices tell each other in an update: closed forms, and the bytes that real processes handed to gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import log, log2, sqrt
from pathlib import Path

import communication
import pytest
import torch
import traffic_ranks
from known_networks import placed_children

from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import ParameterSplit

TESTS = Path(__file__).parent.parent
LINKS = communication.Links(inside_gb_per_second=100.0, between_gb_per_second=10.0, call_seconds=1e-5)


def mesh(shape, nodes=1):
    """(data, fsdp, tensor) inside a node, nodes along data."""
    return Mesh({"data": nodes, "fsdp": 1, "tensor": 1}, dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))


def parameter(name, shape, fsdp=None):
    return ParameterSplit(name, shape, (), None, fsdp, fsdp is not None)


def test_rings():
    assert communication.ring_bytes("sum", 100, 1) == 0
    assert communication.ring_bytes("sum", 100, 4) == 150
    assert communication.ring_bytes("gather", 100, 4) == communication.ring_bytes("scatter", 100, 4) == 75


def test_data_parallelism_sums_gradients_once_whatever_the_micro_batches():
    weights = [parameter("a", (1000, 1000)), parameter("b", (10_000_000,))]
    for micro_batches in (1, 4):
        (found,) = communication.of_update(weights, mesh((4, 1, 1)), micro_batches=micro_batches)
        assert (found.kind, found.axis, found.payload_bytes, found.calls) == ("sum", "data", 44_000_000, 2)
        assert found.wire_bytes(mesh((4, 1, 1))) == 66_000_000


def test_sharding_gathers_in_both_passes_and_scatters_once():
    """5 rows over 4 devices are padded to 8: FSDP2 sends the padding, too."""
    weights = [parameter("a.w", (5, 100), 0), parameter("b.w", (8, 100), 0)]
    found = communication.of_update(
        weights, mesh((2, 4, 1)), micro_batches=3, unit_of=lambda name: name[0], bytes_of=lambda name: 2
    )  # fmt: skip
    told = [(each.kind, each.axis, each.phase, each.payload_bytes, each.calls) for each in found]
    assert told == [
        ("gather", "fsdp", "forward", 3 * 1600 * 2, 6),
        ("gather", "fsdp", "backward", 3 * 1600 * 2, 6),
        ("scatter", "fsdp", "gradients", 1600 * 2, 2),
        ("sum", "data", "gradients", 400 * 2, 2),
    ]


def test_one_device_says_nothing():
    assert communication.of_update([parameter("a", (3,))], mesh((1, 1, 1))) == []
    assert communication.of_tensor([communication.TransformerBlock(64, 32)], mesh((2, 2, 1)), 4, 2) == []
    assert communication.efficiency([], mesh((1, 1, 1)), LINKS, communication.Step(1.0)) == 1.0


def test_time_inside_and_between_nodes():
    """1 GB summed over 2 nodes of 4: 1.5 GB inside, then a quarter over the network."""
    one = communication.Collective("sum", "data", "gradients", 10**9, 10)
    expected = 1.5 / 100 + 0.25 / 10 + 10 * 1e-5 * log2(8)
    assert communication.seconds(one, mesh((4, 1, 1), nodes=2), LINKS) == pytest.approx(expected)


def test_gradients_hide_behind_the_backward_pass():
    """But for the last call, and for what is longer than the pass."""
    where, step = mesh((4, 1, 1), nodes=2), communication.Step(0.3, jitter=0.01)
    one = communication.Collective("sum", "data", "gradients", 10**9, 10)
    time = communication.seconds(one, where, LINKS)
    found = communication.exposed([one], where, LINKS, step)
    assert found["gradients"] == 0
    assert found["first and last calls"] == pytest.approx(time / 10)
    assert found["the slowest device"] == pytest.approx(0.3 * 0.01 * sqrt(2 * log(8)))
    hurried = communication.exposed([one], where, LINKS, communication.Step(0.03, jitter=0.0))
    assert hurried["gradients"] == pytest.approx(0.9 * time - 0.02)
    assert communication.efficiency([one], where, LINKS, step) == pytest.approx(0.3 / (0.3 + sum(found.values())))


def test_gathering_takes_room_from_gradients():
    where = mesh((1, 4, 1))
    gather = communication.Collective("gather", "fsdp", "backward", 4 * 10**9, 100)
    scatter = communication.Collective("scatter", "fsdp", "gradients", 4 * 10**9, 100)
    step = communication.Step(0.06, jitter=0.0)
    alone = communication.exposed([scatter], where, LINKS, step)
    both = communication.exposed([gather, scatter], where, LINKS, step)
    assert alone["gradients"] == 0
    assert both["gradients"] == pytest.approx(0.99 * (communication.seconds(gather, where, LINKS) * 2) - 0.04, rel=1e-3)


def test_sums_over_tensor_hide_behind_nothing():
    found = communication.of_tensor(
        [communication.TransformerBlock(4096, 320)] * 2, mesh((1, 1, 4)), 8, 2, micro_batches=3
    )
    assert [(each.phase, each.calls) for each in found] == [("forward", 18), ("backward", 30)]
    assert sum(each.payload_bytes for each in found) == 8 * 2 * 8 * 4096 * 320 * 2 * 3
    waited = communication.exposed(found, mesh((1, 1, 4)), LINKS, communication.Step(1.0, jitter=0.0))
    assert waited["tensor"] == pytest.approx(sum(communication.seconds(each, mesh((1, 1, 4)), LINKS) for each in found))


def predicted(shape, ranks):
    """Bytes and calls by kind and axis, as traffic_ranks.py counts them."""
    where = Mesh(traffic_ranks.ONE, dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    with torch.device("meta"):
        net = traffic_ranks.Net()
    placed = placed_children(net, where).placed
    units = [name for name, m in net.named_modules() if type(m).__name__ in ("BasicTransformerBlock", "ResnetBlock2D")]

    def unit_of(name):
        return next((unit for unit in units if name.startswith(f"{unit}.")), "")

    # Three transformers of 8 x 8 tokens of 32 channels, one of 4 x 4 of 64.
    blocks = [communication.TransformerBlock(64, 32)] * 3 + [communication.TransformerBlock(16, 64)]
    found = communication.of_update(placed, where, micro_batches=traffic_ranks.MICRO_BATCHES, unit_of=unit_of)
    found += communication.of_tensor(blocks, where, traffic_ranks.SAMPLES, 4, micro_batches=traffic_ranks.MICRO_BATCHES)
    told: dict[str, dict[str, int]] = {"bytes": {}, "calls": {}}
    for each in found:
        key = f"{each.kind} {each.axis}"
        told["bytes"][key] = told["bytes"].get(key, 0) + each.payload_bytes
        told["calls"][key] = told["calls"].get(key, 0) + each.calls
    return told


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bytes_of_real_processes(ranks, tmp_path):
    out = tmp_path / "out.json"
    path = os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(TESTS / "distributed" / "traffic_ranks.py")]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(tmp_path / "rendezvous"), str(out)], env=environment)
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    counted = json.loads(out.read_text())
    expected = {",".join(map(str, shape)): predicted(shape, ranks) for shape in traffic_ranks.MESHES[ranks]}
    assert counted == expected


def test_the_table_of_the_documentation_is_what_the_formulas_say():
    path = os.pathsep.join([str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    made = subprocess.run(
        [sys.executable, TESTS.parent / "benchmarks" / "scaling.py"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert len(made.stdout.splitlines()) == 10
    assert made.stdout in (TESTS.parent / "docs" / "scaling.md").read_text(encoding="utf-8")
