"""Global batches: against a walk slot by slot, the same from every position, exactly once, and cut for any ranks."""

from collections import Counter
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daguerre.data.plan.batches import BLOCK, BatchPlan
from daguerre.data.plan.order import EpochOrder, InfiniteOrder


def order(count, buckets=None, num_buckets=1, seed=3, **given):
    chosen = np.zeros(count, dtype=np.int16) if buckets is None else np.asarray(buckets, dtype=np.int16)
    usual = {"repeats": 1, "shuffle": True, "lanes": 3, "lane_samples": 16}
    starts = np.array([0, count // 3, count // 2, count], dtype=np.int64)
    return EpochOrder(seed, starts, chosen, num_buckets, **{**usual, **given})


def plan(orders, batch_size, num_buckets=1, weights=None, seed=5):
    buckets = [getattr(o, "buckets", None) for o in orders]
    return BatchPlan(seed, orders, buckets, weights or [Fraction(1)] * len(orders), num_buckets, batch_size)


def content(planned):
    return planned.bucket, [tuple(row) for row in np.stack(planned.slots).T.tolist()]


def walked(plan, number):
    """The first batches, by the definition: slot after slot into its bucket's queue."""
    queues = [[] for _ in range(plan.num_buckets)]
    slots = plan.slots(0, number * plan.batch_size + plan.num_buckets * plan.batch_size)
    of = plan._buckets_of(slots)
    found = []
    for row, bucket in zip(np.stack(slots).T.tolist(), of.tolist(), strict=True):
        queues[bucket].append(tuple(row))
        if len(queues[bucket]) == plan.batch_size:
            found.append((bucket, sorted(queues[bucket], key=lambda slot: slot[4])))
            queues[bucket] = []
    return found[:number]


@st.composite
def plans(draw):
    num_buckets = draw(st.integers(1, 4))
    orders = []
    for seed in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 60))
        buckets = draw(st.lists(st.integers(0, num_buckets - 1), min_size=count, max_size=count))
        repeats = draw(st.integers(1, 2))
        orders.append(order(count, buckets, num_buckets, seed=seed, repeats=repeats, shuffle=draw(st.booleans())))
    weights = [Fraction(draw(st.integers(1, 9)), draw(st.integers(1, 9))) for _ in orders]
    return plan(orders, draw(st.integers(1, 40)), num_buckets, weights)


@pytest.mark.long
@settings(deadline=None)
@given(plans())
def test_batches_are_those_of_a_walk_slot_by_slot(plan):
    number = 30
    assert [content(b) for b in islice(plan.batches(0), number)] == walked(plan, number)


@settings(deadline=None, max_examples=25)
@given(plans(), st.integers(0, 200))
def test_batches_are_the_same_from_any_number(plan, number):
    whole = [content(b) for b in islice(plan.batches(0), number + 3)]
    assert [content(b) for b in islice(plan.batches(number), 3)] == whole[number:]


def test_chunks_do_not_show_in_the_batches(monkeypatch):
    buckets = np.random.default_rng(0).integers(0, 3, 3000)
    whole = plan([order(3000, buckets, 3)], 7, 3)
    expected = [content(b) for b in islice(whole.batches(0), 2000)]
    monkeypatch.setattr("daguerre.data.plan.batches.LARGEST_CHUNK", BLOCK)
    small = plan([order(3000, buckets, 3)], 7, 3)
    assert small._chunk < whole._chunk
    assert [content(b) for b in islice(small.batches(0), 2000)] == expected


def test_every_sample_comes_once_an_epoch_with_buckets_that_never_fill():
    """60 images in buckets of 41, 17 and 2, batches of 8: over many epochs each sample comes as often as its bucket
    allows."""
    buckets = [0] * 41 + [1] * 17 + [2] * 2
    found = Counter()
    epochs = Counter()
    for planned in islice(plan([order(60, buckets, 3)], 8, 3).batches(0), 7 * 60 // 8):
        assert {buckets[place] for place in planned.slots.indexes.tolist()} == {planned.bucket}
        for place, epoch in zip(planned.slots.indexes.tolist(), planned.slots.epochs.tolist(), strict=True):
            found[place, epoch] += 1
            epochs[epoch] += 1
    assert set(found.values()) == {1}
    for epoch in range(6):
        waiting = 60 - epochs[epoch]
        assert waiting <= 3 * 7, "only what does not fill a batch waits"


def test_what_is_left_over_leads_the_buckets_next_epoch():
    first = plan([order(10, shuffle=False)], 4)
    batches = [content(b)[1] for b in islice(first.batches(0), 5)]
    assert [(slot[1], slot[2]) for slot in batches[2]] == [(8, 0), (9, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("blocks", [1, 10, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("weights", [["1", "1", "2"], ["0.7", "0.2", "0.1"], ["3", "0.001", "1"]])
def test_shares_follow_the_weights_to_the_slot(weights, blocks):
    weights = [Fraction(w) for w in weights]
    mixed = plan([order(50), InfiniteOrder(), order(7)], 8, weights=weights)
    counts = np.bincount(mixed.slots(0, blocks * BLOCK).members, minlength=3)
    for count, weight in zip(counts.tolist(), weights, strict=True):
        assert abs(count - blocks * BLOCK * weight / sum(weights)) <= 1


def test_each_source_of_a_mix_keeps_its_own_epochs():
    mixed = plan([order(50), order(7)], 8, weights=[Fraction(1), Fraction(3)])
    slots = mixed.slots(0, 4 * BLOCK)
    for member, count in enumerate((50, 7)):
        seen = Counter(zip(slots.indexes[slots.members == member], slots.epochs[slots.members == member], strict=True))
        whole = slots.epochs[slots.members == member].max()
        assert set(seen.values()) == {1}
        assert all((place, epoch) in seen for place in range(count) for epoch in range(whole))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_take_equal_cuts_whose_sum_is_the_batch(ranks):
    for planned in islice(plan([order(100)], 16).batches(0), 10):
        parts = [planned.part(rank, ranks) for rank in range(ranks)]
        assert np.array_equal(np.concatenate([np.stack(p, axis=1) for p in parts]), np.stack(planned.slots, axis=1))
        assert max(len(p.indexes) for p in parts) - min(len(p.indexes) for p in parts) <= 1


def test_a_rank_reads_its_own_lanes():
    """With as many lanes as ranks, each rank's cut is of one lane alone."""
    far = plan([order(40_000, lanes=4, lane_samples=1000)], 256)
    for planned in islice(far.batches(0), 100):
        for rank in range(4):
            assert set(planned.part(rank, 4).lanes.tolist()) == {rank}


@pytest.mark.parametrize(
    ("weights", "size", "each"),
    [
        (["1", "1"], 2, [1, 1]),
        (["1", "1"], 8, [4, 4]),
        (["3", "1"], 8, [6, 2]),
        (["1", "2"], 3, [1, 2]),
        (["0.5", "0.3", "0.2"], 10, [5, 3, 2]),
        pytest.param(["1", "0.25", "1"], 18, [8, 2, 8], marks=pytest.mark.long),
    ],
)
def test_a_batch_that_the_weights_divide_has_exactly_the_shares(weights, size, each):
    mixed = plan([order(n) for n in (5, 40, 7)[: len(weights)]], size, weights=[Fraction(w) for w in weights])
    for planned in islice(mixed.batches(0), 2000):
        assert np.bincount(planned.slots.members, minlength=len(each)).tolist() == each


def test_sources_take_turns_without_a_fixed_order():
    mixed = plan([order(50), order(50)], 2)
    first = mixed.slots(0, 2000).members[::2]
    assert 0.45 < first.mean() < 0.55
    runs = np.diff(np.flatnonzero(np.diff(mixed.slots(0, 2000).members)))
    assert runs.max() <= 2, "evenly spread"


@pytest.mark.long
def test_a_source_that_is_hardly_ever_drawn_still_is_between_others():
    mixed = plan([order(50), order(7), order(50)], 8, weights=[Fraction(1), Fraction("0.0005"), Fraction(1)])
    counts = np.bincount(mixed.slots(0, 80_000).members, minlength=3)
    assert abs(int(counts[1]) - 20) <= 2
