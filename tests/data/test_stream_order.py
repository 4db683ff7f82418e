"""One source's stream: each place once a pass, a pure function of the position, local reading, and a good shuffle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daguerre.data.plan.order import EpochOrder, InfiniteOrder


def passes(shards, seed=3, buckets=None, num_buckets=1, **given):
    starts = np.concatenate([[0], np.cumsum(shards)]).astype(np.int64)
    chosen = np.zeros(starts[-1], dtype=np.int16) if buckets is None else buckets
    usual = {"repeats": 1, "shuffle": True, "lanes": 4, "lane_samples": 8}
    return EpochOrder(seed, starts, chosen, num_buckets, **{**usual, **given})


@st.composite
def orders(draw):
    shards = draw(st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(any))
    num_buckets = draw(st.integers(1, 4))
    buckets = np.array(draw(st.lists(st.integers(0, num_buckets - 1), min_size=sum(shards), max_size=sum(shards))))
    return passes(
        shards,
        seed=draw(st.integers(0, 2**63 - 1)),
        buckets=buckets.astype(np.int16),
        num_buckets=num_buckets,
        repeats=draw(st.integers(1, 3)),
        shuffle=draw(st.booleans()),
        lanes=draw(st.integers(1, 6)),
        lane_samples=draw(st.integers(1, 12)),
    )


@settings(deadline=None, max_examples=40)
@given(orders())
def test_each_pass_holds_each_place_once_and_an_epoch_each_repeat(order):
    for number in range(2 * order.repeats):
        stretch = order.slots(number * order.count, order.count)
        assert sorted(stretch.indexes.tolist()) == list(range(order.count))
        assert set(stretch.epochs.tolist()) == {number // order.repeats}
        assert set(stretch.repeats.tolist()) == {number % order.repeats}


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(orders(), st.integers(0, 300), st.lists(st.integers(0, 70), max_size=4))
def test_any_cut_from_any_position_gives_the_same_stream(order, position, sizes):
    whole = order.slots(position, sum(sizes))
    start = 0
    for size in sizes:
        part = order.slots(position + start, size)
        for ours, theirs in zip(part, whole.part(start, start + size), strict=True):
            assert np.array_equal(ours, theirs)
        start += size


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(orders(), st.integers(0, 300))
def test_bucket_counts_are_the_counts_of_the_slots_before(order, position):
    places = order.slots(0, position).indexes
    expected = np.bincount(order.buckets[places], minlength=order.num_buckets)
    assert order.bucket_counts(position).tolist() == expected.tolist()


def test_without_shuffle_it_is_the_sources_own_order_in_every_pass():
    order = passes([5, 0, 7], shuffle=False, repeats=2)
    assert order.slots(0, 24).indexes.tolist() == [*range(12), *range(12)]


def test_two_passes_and_two_seeds_are_unlike():
    order = passes([50, 50])
    first, second = order.slots(0, 100).indexes, order.slots(100, 100).indexes
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, passes([50, 50], seed=4).slots(0, 100).indexes)


def test_a_small_set_is_shuffled_through_and_through():
    """Where everything fits into one segment, every place is equally likely to hold every sample."""
    order = passes([10, 10], lanes=4, lane_samples=8)
    where = np.stack([np.argsort(order.slots(number * 20, 20).indexes) for number in range(3000)])
    counts = np.stack([np.bincount(where[:, sample], minlength=20) for sample in range(20)])
    expected = 3000 / 20
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 361 + 5 * np.sqrt(2 * 361)  # 19 x 19 degrees of freedom, five standard deviations


@pytest.mark.parametrize(("lanes", "lane_samples"), [pytest.param(16, 4096, marks=pytest.mark.long), (4, 1000)])
def test_neighbours_of_a_shard_end_up_far_apart(lanes, lane_samples):
    """The distance of two neighbours is that of two random slots of a segment: a third of it, as in a shuffle
    buffer of that size."""
    order = passes([10_000] * 100, lanes=lanes, lane_samples=lane_samples)
    where = np.argsort(order.slots(0, order.count).indexes)
    apart = np.abs(np.diff(where))
    assert np.mean(apart) == pytest.approx(lanes * lane_samples / 3, rel=0.1)
    assert np.mean(apart < 256) < 3 * 256 / (lanes * lane_samples)


def test_lanes_take_turns_in_an_order_of_chance():
    order = passes([1000] * 50, lanes=5, lane_samples=500)
    lanes = order.slots(0, 50_000).lanes.reshape(-1, 5)
    assert (np.sort(lanes, axis=1) == np.arange(5)).all(), "of five slots in a row each lane has one"
    first = np.bincount(lanes[:, 0], minlength=5)
    assert ((first - 2000) ** 2 / 2000).sum() < 4 + 5 * np.sqrt(8), "no lane is first more often"


def test_a_segment_reads_from_few_shards():
    order = passes([1000] * 50, lanes=4, lane_samples=500)
    for segment in range(20):
        places = order.slots(segment * 2000, 2000).indexes
        assert len(set((places // 1000).tolist())) <= 8, "each lane is in one shard, or crosses into the next"


def test_endless_counts_on():
    assert InfiniteOrder().slots(7, 3).indexes.tolist() == [7, 8, 9]
    assert InfiniteOrder(3).bucket_counts(9).tolist() == [9, 0, 0]
