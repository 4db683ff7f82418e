"""The loop: its numbers, stopping, and going on from any step as if nothing had happened."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from daguerre.training.guard import READ_EVERY, Guard, NonFiniteError
from daguerre.training.loop import train


def run(toy, state, plan, batches, stop_at=None):
    lines = []
    for update in train(state, batches, toy.loss_fn, plan, nullcontext):
        if update.values is not None:
            lines.append((update.step, {k: v for k, v in update.values.items() if not k.startswith("perf/")}))
        if update.step == stop_at:
            break
    return lines


@pytest.mark.parametrize("stop_at", [4, 7, 18])
def test_stopped_anywhere_and_restored_it_ends_equal_to_the_bit(toy, stop_at):
    whole = toy.state()
    expected = run(toy, whole, toy.plan(), toy.batches())
    first = toy.state()
    lines = run(toy, first, toy.plan(), toy.batches(), stop_at)
    tensors = {f: {k: t.clone() for k, t in entries.items()} for f, entries in first.tensors().items()}
    second = toy.state(seed=1)
    second.load(tensors, first.document())
    lines += run(toy, second, toy.plan(), toy.batches(second.slots // 4))
    assert lines == expected
    for file, entries in whole.tensors().items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, second.tensors()[file][key]), (file, key)


def test_numbers_are_logged_at_the_interval_and_at_the_end(toy):
    lines = run(toy, toy.state(), toy.plan(total_steps=10), toy.batches())
    assert [step for step, _ in lines] == [4, 8, 10]
    assert set(lines[0][1]) == {
        "learning/loss",
        *(f"learning/loss_quartile_{i}" for i in range(4)),
        "learning/gradient_norm",
        "learning/current_learning_rate",
        "learning/nonfinite_steps",
    }


def test_speed_counts_training_only(toy):
    seconds = []
    for update in train(toy.state(), toy.batches(), toy.loss_fn, toy.plan(total_steps=8), nullcontext):
        seconds += [update.values["perf/step_time_seconds"]] if update.values else []
        assert update.values is None or update.values["perf/samples_per_second"] > 0
    assert len(seconds) == 2


@pytest.mark.long  # of the quick tests, test_optimizers_contract.py has each optimizer
def test_the_loss_falls(toy):
    lines = run(toy, toy.state(), toy.plan(total_steps=200, warmup_steps=0), toy.batches())
    assert lines[-1][1]["learning/loss"] < 0.5 * lines[0][1]["learning/loss"]


def test_non_finite_updates_are_counted_and_training_goes_on(toy):
    def batches():
        for index in range(20):
            yield [toy.batch(index, poison=index in (5, 6, 9))]

    state = toy.state()
    lines = run(toy, state, toy.plan(), batches())
    assert lines[-1][1]["learning/nonfinite_steps"] == 3
    assert state.document()["nonfinite_steps"] == 3
    assert all("nan" not in str(values) for _, values in lines)


def test_too_many_in_a_row_stop_the_run_and_name_the_samples(toy):
    def batches():
        for index in range(20):
            yield [toy.batch(index, poison=index >= 5)]

    with pytest.raises(NonFiniteError, match=r"(?s)3 updates in a row.*step 6: sample 20, .*step 8: sample 28"):
        run(toy, toy.state(), toy.plan(), batches())


def test_of_a_large_batch_the_samples_whose_own_loss_is_not_finite_are_named(toy):
    """Not the first eight of the batch. Slots without a sample have no loss."""

    def batches():
        for index in range(20):
            first, second = toy.batch(index, 20, valid=[1.0] * 19 + [0.0]), toy.batch(index + 100, 20)
            if index >= 5:
                first.draws["scale"][[17, 19]] = second.draws["scale"][3] = float("inf")
            yield [first, second]

    said = r"(?s)step 6: sample 117, sample 2103 \(of 40 the loss of these\)\n"
    with pytest.raises(NonFiniteError, match=said):
        run(toy, toy.state(), toy.plan(), batches())


@pytest.mark.parametrize(("every", "stopped"), [(10**10, READ_EVERY), (7, 35)])
def test_a_run_that_seldom_logs_is_stopped_as_well(toy, every, stopped):
    """The guard is asked every so many updates, whether numbers are read or not."""

    def batches():
        for index in range(500):
            yield [toy.batch(index, poison=index >= 30)]

    state = toy.state()
    with pytest.raises(NonFiniteError, match=rf"(?s)3 updates in a row.*step {stopped}: sample "):
        run(toy, state, toy.plan(total_steps=500, log_every=every), batches())
    assert state.step == stopped


def test_flags_that_are_never_logged_are_not_kept_for_the_whole_run(toy):
    state, most = toy.state(), 0
    for _ in train(state, toy.batches(), toy.loss_fn, toy.plan(total_steps=120, log_every=10**10), nullcontext):
        most = max(most, len(state.guard._unread))
    assert most < READ_EVERY


def test_the_device_is_asked_no_more_often_than_needed(toy, monkeypatch):
    asked = []
    check = Guard.check
    monkeypatch.setattr(Guard, "check", lambda self, *given: asked.append(1) or check(self, *given))
    run(toy, toy.state(), toy.plan(total_steps=2 * READ_EVERY + 1, log_every=10**10), toy.batches())
    assert len(asked) == 3


def test_a_row_of_non_finite_updates_goes_on_over_a_restart(toy):
    state = toy.state()
    poisoned = toy.batches(poison=True)
    run(toy, state, toy.plan(), poisoned, stop_at=2)
    restored = toy.state()
    restored.load(state.tensors(), state.document())
    with pytest.raises(NonFiniteError):
        run(toy, restored, toy.plan(log_every=1), poisoned)
    assert restored.step == 3


def test_a_row_that_ended_does_not_stop_a_run_whose_limit_was_lowered(toy):
    state = toy.state()
    run(toy, state, toy.plan(), toy.batches(poison=True), stop_at=2)
    restored = toy.state()
    restored.load(state.tensors(), state.document())
    lowered = replace(toy.plan(log_every=1), max_nonfinite_steps=2)
    assert len(run(toy, restored, lowered, toy.batches(2), stop_at=4)) == 2


def test_updates_may_be_cut_into_any_number_of_micro_batches(toy):
    """As where buckets of larger images are computed in smaller pieces."""

    def cut():
        for index in range(20):
            size = (4, 2, 1)[index % 3]
            yield [toy.batch(index * 4 // size + part, size) for part in range(4 // size)]

    whole, pieces = toy.state(), toy.state()
    expected = run(toy, whole, toy.plan(), toy.batches())
    lines = run(toy, pieces, toy.plan(), cut())
    assert [step for step, _ in lines] == [step for step, _ in expected]
    assert pieces.slots == whole.slots
    for ours, theirs in zip(pieces.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
