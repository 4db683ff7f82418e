"""Meshes: the seeds' examples, what is filled in, what is refused, and who stands where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from daguerre.distributed.mesh import AXES, Mesh, resolve
from daguerre.errors import UserError

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
REST = {"data": -1, "fsdp": 1, "tensor": 1}


def test_the_seeds_examples():
    """MaxDiffusion's guide: four chips, all to data; then two by two."""
    assert str(resolve(REST, REST, 4, 1)) == "Mesh('data': 4, 'fsdp': 1, 'tensor': 1)"
    assert str(resolve(REST, {"data": 2, "fsdp": 2, "tensor": 1}, 4, 1)) == "Mesh('data': 2, 'fsdp': 2, 'tensor': 1)"


def test_degrees_between_and_inside_nodes_multiply():
    mesh = resolve({"data": 2, "fsdp": -1, "tensor": 1}, {"data": 1, "fsdp": -1, "tensor": 2}, 64, 8)
    assert mesh.shape == (2, 16, 2)
    assert (mesh.nodes, mesh.devices, mesh.batch_ranks) == (8, 64, 32)


@pytest.mark.parametrize(
    ("dcn", "ici", "devices", "nodes", "said"),
    [
        (REST, ONE, 4, 1, "1 = 1, but there are 4 devices of a node"),
        (
            REST,
            {"data": 2, "fsdp": 1, "tensor": 1},
            1,
            1,
            "2 = 2, but there is one device of a node: make the product 1",
        ),
        (REST, {"data": 3, "fsdp": -1, "tensor": 1}, 4, 1, "ici_data_parallelism 3 = 3 does not divide the 4 devices"),
        (
            REST,
            {"data": -1, "fsdp": -1, "tensor": 1},
            4,
            1,
            "ici_data_parallelism and ici_fsdp_parallelism are both -1",
        ),
        (ONE, REST, 16, 2, "1 = 1, but there are 2 nodes"),
        ({"data": 2, "fsdp": 2, "tensor": 1}, REST, 16, 2, "dcn_fsdp_parallelism 2 = 4, but there are 2 nodes"),
        (REST, {"data": 0, "fsdp": 1, "tensor": 1}, 4, 1, "ici_data_parallelism=0: a degree must be 1 or more"),
        (REST, REST, 9, 2, "9 devices on 2 nodes"),
    ],
)
def test_what_does_not_agree_is_refused_with_both_numbers(dcn, ici, devices, nodes, said):
    with pytest.raises(UserError, match=said):
        resolve(dcn, ici, devices, nodes)


degrees = some.fixed_dictionaries({axis: some.integers(1, 3) for axis in AXES})


@given(degrees, degrees)
def test_every_rank_stands_at_one_place(dcn, ici):
    mesh = Mesh(dcn, ici)
    ranks = mesh.ranks()
    assert sorted(ranks.flatten().tolist()) == list(range(mesh.devices))
    for rank in range(0, mesh.devices, 5):
        place = mesh.place(rank)
        assert ranks[place["data"], place["fsdp"], place["tensor"]] == rank
        assert mesh.batch_rank(rank) == place["data"] * mesh.degree("fsdp") + place["fsdp"]


@given(degrees)
def test_what_is_inside_a_node_stays_there(ici):
    """Groups along an axis whose degree between nodes is 1 never leave a node."""
    mesh = Mesh({"data": 2, "fsdp": 1, "tensor": 1}, ici)
    node = mesh.ranks() // (mesh.devices // 2)
    assert (node == node[:, :1, :1]).all()
    assert np.array_equal(np.unique(node), [0, 1])
