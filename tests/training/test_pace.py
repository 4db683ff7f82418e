"""Lengths in steps, samples and epochs, in a run whose batch and data set change on the way."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daguerre.errors import UserError
from daguerre.settings import Duration
from daguerre.training import schedules
from daguerre.training.pace import Pace
from daguerre.training.settings import LRSchedulerSettings

MIXED = Pace.of(4, 40).then(10, 8, 40).then(14, 8, 16)
"""One epoch in updates of 4 samples, then 32 samples in updates of 8, then epochs of 16 samples."""


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ("12 steps", 12), ("20 samples", 5), ("21 samples", 6), ("40 samples", 10), ("41 samples", 11),
        ("72 samples", 14), ("80 samples", 15), ("1 epochs", 10), ("2 epochs", 15), ("3 epochs", 17),
    ],
)  # fmt: skip
def test_a_length_ends_where_so_much_is_done(length, steps):
    assert MIXED.steps(Duration(length)) == steps


@pytest.mark.long
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=5),
    st.integers(0, 300),
    st.sampled_from(["steps", "samples", "epochs"]),
)
def test_it_counts_as_one_that_counts_every_update(stretches, number, unit):
    pace, done = Pace.of(stretches[0][1], stretches[0][2]), 0
    for updates, batch, epoch in stretches:
        pace, done = pace.then(done, batch, epoch), done + updates
    sizes = [(batch, epoch) for updates, batch, epoch in stretches for _ in range(updates)]
    positions = [Fraction(0)]
    for batch, epoch in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        if len(positions) > 60 and positions[-1] >= number:
            break
        positions.append(positions[-1] + {"steps": 1, "samples": batch, "epochs": Fraction(batch, epoch)}[unit])
    expected = next(step for step, position in enumerate(positions) if position >= number)
    length = Duration(f"{number} {unit}")
    assert pace.steps(length) == expected
    assert [pace.position(step, unit) for step in range(60)] == positions[:60]
    shared = Pace.read(pace.document())
    assert [shared.position(step, unit) for step in range(60)] == positions[:60]
    if number:
        due = [step for step in range(1, 60) if pace.due(length)(step)]
        assert due == [s for s in range(1, 60) if positions[s] // number > positions[s - 1] // number]
    back = next(n for n in range(61) if n == 60 or positions[60] - positions[60 - n] >= number)
    assert pace.steps_before(60, number, unit) == back


@given(st.integers(1, 64), st.integers(0, 3000), st.integers(1, 500))
def test_of_a_run_that_nothing_changes_lengths_are_what_they_were(batch, number, epoch):
    for unit in ("steps", "samples", "epochs"):
        length = Duration(f"{number} {unit}")
        assert Pace.of(batch, epoch).steps(length) == length.steps(batch, epoch)
        if unit == "samples":
            assert Pace.of(batch, None).steps_before(10**6, number, unit) == min(10**6, -(-number // batch))


def test_the_same_batch_and_data_are_the_same_part():
    assert MIXED.then(20, 8, 16) == MIXED
    assert MIXED.then(12, 8, 40) == Pace.of(4, 40).then(10, 8, 40), "from an older checkpoint what came later is undone"
    assert MIXED.then(10, 4, 40) == Pace.of(4, 40)


def test_without_epochs_none_go_by():
    mixed = Pace.of(4, 40).then(10, 4, None)
    with pytest.raises(UserError, match="have no epochs"):
        mixed.steps(Duration("2 epochs"))
    assert mixed.then(30, 4, 40).steps(Duration("2 epochs")) == 40


@pytest.mark.parametrize("name", ["linear", "cosine", "warmup_stable_decay"])
@pytest.mark.parametrize("unit", ["samples", "epochs"])
def test_a_rate_does_not_jump_where_the_batch_changes(name, unit):
    """The rate is a function of the samples, whatever updates they came in."""
    length = {"samples": (160, 16), "epochs": (Fraction(160, 40), Fraction(16, 40))}[unit]
    settings = LRSchedulerSettings(name=name, **({"decay": "96 samples"} if name.startswith("warm") else {}))

    def rates(pace):
        def first(goal):
            return next(step for step in range(200) if pace.position(step, unit) >= goal)

        total, warmup = first(length[0]), first(length[1])
        along = {"rise": lambda step: pace.position(step, unit), "fall": lambda step: pace.position(step, unit)}
        decay = pace.steps_before(total, 96, "samples")
        every = range(total + 1)
        found = [schedules.factor(settings, step, warmup, total, decay, **along) for step in every]
        return {pace.position(step, "samples"): rate for step, rate in zip(every, found, strict=True)}

    steady = rates(Pace.of(4, 40))
    for changed in (Pace.of(4, 40).then(2, 8, 40), Pace.of(4, 40).then(20, 8, 40), Pace.of(2, 40).then(30, 4, 40)):
        found = rates(changed)
        assert len(found) != len(steady)
        shared = found.keys() & steady.keys()
        assert len(shared) > 10
        assert {at: found[at] for at in shared} == pytest.approx({at: steady[at] for at in shared})
