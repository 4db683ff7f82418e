"""The order of training: exactly once an epoch, the same from every position."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from daguerre.data.plan import Plan

SEEDS = st.integers(0, 2**63 - 1)
COUNTS = st.integers(1, 60)


@settings(deadline=None)
@given(SEEDS, COUNTS, st.booleans())
def test_each_epoch_holds_each_index_once(seed, count, shuffle):
    slots = Plan(seed, count, shuffle).slots(0, 3 * count)
    for epoch in range(3):
        part = slots[epoch * count : (epoch + 1) * count]
        assert (part[:, 1] == epoch).all()
        assert sorted(part[:, 0].tolist()) == list(range(count))


@settings(deadline=None)
@given(SEEDS, COUNTS, st.booleans(), st.integers(0, 200), st.lists(st.integers(1, 70), max_size=4))
def test_any_cut_from_any_position_gives_the_same_stream(seed, count, shuffle, position, sizes):
    plan = Plan(seed, count, shuffle)
    whole = plan.slots(0, position + sum(sizes))
    for size in sizes:
        assert np.array_equal(plan.slots(position, size), whole[position : position + size])
        position += size


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(Plan(seed, 40, True).slots(40 * epoch, 40)[:, 0]) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_without_shuffle_the_order_is_the_sources():
    assert Plan(3, 4, False).slots(2, 6).tolist() == [[2, 0], [3, 0], [0, 1], [1, 1], [2, 1], [3, 1]]


def test_an_endless_source_is_one_epoch_in_its_own_order():
    assert Plan(3, None, True).slots(10**12, 2).tolist() == [[10**12, 0], [10**12 + 1, 0]]


def test_the_order_is_pinned():
    # A change here would change what every run trains on after a restart.
    assert Plan(7, 10, True).slots(0, 10)[:, 0].tolist() == [5, 3, 0, 9, 4, 8, 2, 1, 6, 7]
