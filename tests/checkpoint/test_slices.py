"""Regions are written once each, evenly spread; gaps and overlaps are refused; the index comes back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daguerre.checkpoint import shards
from daguerre.checkpoint.shards import Region, Shard, ShardedTensor, full_region, in_order, is_unsharded, plan


def held(**named):
    """What a rank holds, as plan wants it: shape, dtype and regions by name."""
    return {"model": {name: [shape, "F32", regions] for name, (shape, regions) in named.items()}}


def written(index):
    """Bytes by rank."""
    load = {}
    for tensors in index.values():
        for each in tensors.values():
            for file, _, region in each.parts:
                load[file] = load.get(file, 0) + region.elements * each.dtype.itemsize
    return load


def elements(region):
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*region, strict=True))))


regions = st.integers(0, 3).flatmap(
    lambda dims: st.tuples(
        *[st.tuples(*[st.integers(0, 4)] * dims).flatmap(
            lambda o: st.tuples(*[st.integers(0, 4)] * len(o)).map(lambda s: Region(o, s))
        )] * 2
    )
)  # fmt: skip


@given(regions)
def test_an_overlap_is_what_both_hold(pair):
    a, b = pair
    both = elements(a) & elements(b)
    shared = a.overlap(b)
    assert (set() if shared is None else elements(shared)) == both
    if shared is not None:
        inside = torch.arange(a.elements).reshape(a.shape)[shared.within(a)]
        assert inside.shape == shared.shape


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 6), st.data())
def test_every_element_is_written_once_by_a_rank_that_holds_it(rows, columns, ranks, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, rows))) | {0, rows})
    parts = [Region((a, 0), (b - a, columns)) for a, b in itertools.pairwise(cuts) if b > a]
    owners = [data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in parts]
    holdings = [
        held(w=((rows, columns), [part for part, own in zip(parts, owners, strict=True) if rank in own]))
        for rank in range(ranks)
    ]
    stored = plan(holdings)["model"]["w"]
    seen = [element for _, _, region in stored.parts for element in elements(region)]
    assert sorted(seen) == sorted(elements(full_region((rows, columns))))
    for file, _, region in stored.parts:
        rank = 0 if file == "model.safetensors" else int(file.split("-")[1])
        assert any(elements(region) <= elements(part) for part in holdings[rank]["model"]["w"][2])


def test_copies_are_spread_by_bytes():
    shapes = {f"w{i}": (64 + 13 * i, 32) for i in range(40)} | {"b": (8,), "large": (40000, 32)}
    holdings = [held(**{name: (shape, [full_region(shape)]) for name, shape in shapes.items()}) for _ in range(4)]
    load = written(plan(holdings))
    assert len(load) == 4
    assert max(load.values()) < 1.05 * sum(load.values()) / 4
    assert len(plan(holdings)["model"]["large"].parts) > 1, "one tensor of two thirds of all is cut"


def test_what_only_one_rank_holds_is_counted_in_the_balance():
    own = held(w=((100, 4), [full_region((100, 4))]), copy=((30,), [full_region((30,))]))
    load = plan([own, held(w=((100, 4), []), copy=((30,), [full_region((30,))]))])
    assert [file for file, _, _ in load["model"]["copy"].parts] == ["model-00001-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[Region((0, 0), (2, 3))], [Region((3, 0), (1, 3))]], r"'w' of 'model': 3 of its 12 elements are held by no"),
        ([[Region((0, 0), (3, 3))], [Region((2, 0), (2, 3))]], "overlap without being equal"),
        ([[Region((0, 0), (4, 3))], [Region((0, 0), (4, 2))]], "overlap without being equal"),
        ([[Region((0, 0), (4, 3))], [Region((3, 0), (2, 3))]], r"leaves its shape \[4, 3\]"),
        ([[Region((0,), (4,))], []], "leaves its shape"),
        ([[], []], "12 of its 12 elements"),
    ],
)
def test_gaps_and_overlaps_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        plan([held(w=((4, 3), regions)) for regions in parts])


def test_regions_that_are_no_grid_are_compared():
    """A pinwheel fills a square without a grid; shifting one wing overlaps another and leaves a gap."""
    wings = [Region((0, 0), (1, 2)), Region((0, 2), (2, 1)), Region((2, 1), (1, 2)), Region((1, 0), (2, 1))]
    middle = Region((1, 1), (1, 1))
    plan([held(w=((3, 3), [*wings, middle]))])
    with pytest.raises(ValueError, match="overlap"):
        plan([held(w=((3, 3), [*wings[:3], Region((0, 0), (2, 1)), middle]))])


def test_ranks_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"'w' of 'model' is .* on rank 1"):
        plan([held(w=((4, 3), [full_region((4, 3))])), held(w=((4, 2), []))])


def test_tensors_without_elements_and_without_dims():
    holdings = [held(none=((0, 3), [full_region((0, 3))]), one=((), [full_region(())])) for _ in range(2)]
    index = plan(holdings)
    assert index["model"]["none"].parts == ()
    assert [region for _, _, region in index["model"]["one"].parts] == [Region((), ())]


def test_the_index_comes_back_equal():
    holding = held(**{"a@1": ((4, 3), [full_region((4, 3))]), "a": ((2,), [full_region((2,))])})
    index = plan([holding] * 3) | {"empty": {}}
    assert shards.from_bytes(shards.to_bytes(index)) == index
    with pytest.raises(ValueError, match="has format 2"):
        shards.from_bytes(shards.to_bytes(index).replace(b'"format":1', b'"format":2'))


def test_a_piece_of_another_dtype_and_a_dtype_without_a_name_are_refused():
    piece = Shard((0,), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'w' of 'model' is torch.float32, a piece of it is torch.float64"):
        shards.holding({"model": {"w": ShardedTensor((2,), torch.float32, [piece])}})
    with pytest.raises(ValueError, match="complex64, which safetensors cannot hold"):
        shards.holding({"model": {"w": ShardedTensor.of(torch.zeros(2, dtype=torch.complex64))}})


@pytest.mark.parametrize(("begin", "length"), [(0, 8), (0, 4), (4, 4), (2, 3), (5, 0)])
@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_elements_in_another_order_are_pieces_in_their_own(begin, length, other, dim):
    tensor = torch.arange(24).reshape(8, 3) if dim == 0 else torch.arange(24).reshape(3, 8)
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    local = tensor.index_select(dim, order).narrow(dim, begin, length).narrow(1 - dim, other, 3 - other).clone()
    offsets = (begin, other) if dim == 0 else (other, begin)
    sliced = in_order(dim, order, offsets, local, tensor.shape)
    assert sum(piece.tensor.shape[dim] for piece in sliced.pieces) == length
    for piece in sliced.pieces:
        assert torch.equal(piece.tensor, tensor[piece.region.within(full_region(tensor.shape))])
        piece.tensor.fill_(-1)
    assert bool((local == -1).all()), "pieces are views"


def test_one_process_with_whole_tensors_writes_the_plain_layout():
    index = plan([held(w=((4, 3), [full_region((4, 3))]), b=((4,), [full_region((4,))]))])
    assert is_unsharded(index)
    assert index["model"]["w"].parts == (("model.safetensors", "w", full_region((4, 3))),)
    split = plan([held(w=((4, 3), [Region((0, 0), (2, 3)), Region((2, 0), (2, 3))]))])
    assert not is_unsharded(split)
