"""One update against a bare PyTorch step, and what the guard keeps out."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from daguerre.training import step


def update(state, micro_batches, loss_fn, **changes):
    settings = {"learning_rate": 0.01, "max_grad_norm": 0.05, "autocast": nullcontext} | changes
    return step.update(state, micro_batches, loss_fn, **settings)


def snapshot(state):
    return {f"{file}/{key}": t.clone() for file, tensors in state.tensors().items() for key, t in tensors.items()}


def test_equals_a_bare_loop_with_clipping_and_decay(toy):
    ours, theirs = toy.state(weight_decay=0.1), toy.state().net
    decayed = [p for p in theirs.parameters() if p.ndim > 1]
    plain = [p for p in theirs.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01, foreach=False
    )
    for number in range(10):
        batch = toy.batch(number)
        update(ours, [batch], toy.loss_fn)
        toy.loss_fn(theirs, batch).loss_B.mean().backward()
        clip_grad_norm_(theirs.parameters(), 0.05)
        adamw.step()
        adamw.zero_grad()
    for a, b in zip(ours.net.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accumulation_gives_the_gradient_of_the_whole_batch(toy, parts):
    whole, split = toy.state(), toy.state()
    whole.net.double(), split.net.double()
    full = toy.batch(0, size=8)
    step.backward(whole.net, [full], toy.loss_fn, 8, nullcontext, whole.see)
    pieces = [toy.batch(i, size=8 // parts) for i in range(parts)]
    step.backward(split.net, pieces, toy.loss_fn, 8, nullcontext, split.see)
    for a, b in zip(whole.net.parameters(), split.net.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
    assert whole.meter.read()["learning/loss"] == pytest.approx(split.meter.read()["learning/loss"], rel=1e-10)


def test_an_undecodable_slot_weighs_nothing_and_the_rest_is_divided_by_the_valid_count(toy):
    masked, small = toy.state(), toy.state()
    step.backward(masked.net, [toy.batch(0, valid=[1, 0, 1, 0])], toy.loss_fn, 2, nullcontext, masked.see)
    losses = toy.loss_fn(small.net, toy.batch(0)).loss_B
    (losses[[0, 2]].sum() / 2).backward()
    for a, b in zip(masked.net.parameters(), small.net.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("valid", [[0.0] * 4, None])
def test_an_update_that_is_empty_or_not_finite_changes_no_weight_and_no_moment(toy, valid):
    state = toy.state()
    update(state, [toy.batch(0)], toy.loss_fn)
    before = snapshot(state)
    finite = update(state, [toy.batch(1, valid=valid, poison=valid is None)], toy.loss_fn)
    after = snapshot(state)
    assert bool(finite) is (valid is not None)
    assert (state.step, state.slots, state.samples) == (2, 8, 4 if valid else 8)
    for name in before:
        if name.startswith(("model/", "optimizer/")):
            assert torch.equal(before[name], after[name]), name
    assert all(torch.isfinite(t).all() for t in after.values())
    update(state, [toy.batch(2)], toy.loss_fn)
    assert not torch.equal(before["model/inner.weight"], state.net.inner.weight)


def test_a_poisoned_sample_in_an_invalid_slot_poisons_nothing(toy):
    state, batch = toy.state(), toy.batch(0, valid=[0, 1, 1, 1])
    batch.draws["scale"][0] = float("inf")
    assert torch.isfinite(step.backward(state.net, [batch], toy.loss_fn, 3, nullcontext, state.see))
