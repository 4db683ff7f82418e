"""Layers that are several in one, norms of heads, and biases of heads: split over a mesh they train as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fused_networks
import fused_ranks
import pytest
import torch
from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
from refusals import refused

from daguerre.distributed import sharding_rules
from daguerre.distributed.mesh import Mesh
from daguerre.models.placement import placement

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
TESTS = Path(__file__).parent.parent


def mesh(**ici: int) -> Mesh:
    return Mesh(ONE, ONE | ici)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", ["flux", "klein"])
def test_layers_are_split_as_diffusers_splits_them(kind, degree):
    """diffusers' plan for inference says which part of each layer a device has, and leaves norms of heads whole."""
    network = fused_networks.network(kind)
    specs = resolve_tp_shard_specs(network, network._tp_plan, degree)
    found = placement(fused_networks.known(kind, network), sharding_rules.DEFAULT, mesh(tensor=degree))
    assert found.problems == ()
    for each in found.placed:
        spec = specs.get(each.name)
        assert each.tensor == (None if spec is None else spec.dim), each.name
        assert each.partial == ("attn.norm_" in each.name), each.name
        if each.tensor is not None:
            sizes, start, theirs = spec.block_sizes, 0, []
            for size in sizes:
                theirs.append(torch.arange(start, start + size).reshape(degree, -1))
                start += size
            order = each.order(degree) or list(range(start))
            assert order == torch.cat(theirs, 1).flatten().tolist(), each.name


@pytest.mark.parametrize("kind", fused_networks.KINDS)
def test_every_pattern_means_a_parameter(kind):
    network = fused_networks.known(kind, fused_networks.network(kind))
    found = {*placement(network, sharding_rules.DEFAULT, mesh()).patterns.values()}
    assert {name for name in network.facts.axes if name.endswith(".weight")} == {
        name for name in found if name.endswith(".weight")
    }


def test_an_order_has_every_element_once_and_segments_of_any_length():
    segments = (sharding_rules.Segment("heads", 4, 2), sharding_rules.Segment("mlp"), sharding_rules.Segment("mlp"))
    placed = sharding_rules.ParameterSplit("w", (12,), (segments,), 0, None, False)
    assert placed.order(2) == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert placed.order(1) == []


@pytest.mark.parametrize(
    ("heads", "rules", "why"),
    [
        (3, sharding_rules.DEFAULT, "3 heads over 2 devices"),
        (4, [("heads", ["tensor"]), ("embed", ["fsdp"])], "the rules split heads alone"),
    ],
)
def test_what_cannot_be_split_together_is_refused(heads, rules, why):
    """48 columns of 3 heads divide by 2, and heads do not."""
    network = fused_networks.known("flux", fused_networks.network("flux", heads))
    with refused("conflict", "mesh.ici_tensor_parallelism", why):
        placement(network, rules, mesh(tensor=2))


def test_norms_of_heads_that_are_whole_have_whole_gradients():
    network = fused_networks.known("klein", fused_networks.network("klein"))
    found = placement(network, sharding_rules.DEFAULT, mesh(fsdp=2))
    assert not any(each.partial for each in found.placed)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_processes_train_a_fused_transformer_as_one(tmp_path):
    """Outputs, all gradients, their norm and the weights after AdamW, in float64. klein is fused in both dims."""
    (found,) = fused_ranks.together(2, tmp_path, [("klein", False)]).values()
    assert max(found[name] for name in ("outputs", "gradients", "norm", "weights")) < 1e-10, found
    assert 0.6 < found["share"] < 0.7


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mesh_trains_as_one_process_and_saves_what_any_reads(tmp_path, ranks):
    """Full and LoRA, on tensor 2, fsdp 2, and both with two more; saved at tensor 2, read whole and at tensor 2."""
    path = os.pathsep.join([str(TESTS / "support"), str(TESTS / "distributed"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "distributed" / "fused_ranks.py"), str(tmp_path), str(ranks)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    saves = {name: found.pop(name) for name in [*found] if name.endswith("saved")}
    assert len(found) == 12
    assert all(all(same.values()) for same in saves.values()), saves
    assert len(saves) == (6 if ranks == 2 else 0)
    worst = {n: v for n, v in found.items() if max(v[k] for k in ("outputs", "gradients", "norm", "weights")) > 1e-10}
    assert worst == {}, worst
