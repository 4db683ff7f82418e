"""Loss weights of samples: what they multiply, and what they are divided by."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from daguerre.training import step

WEIGHTS = torch.tensor([1.0, 0.25, 1.0, 0.25, 1.0, 3.0, 1.0, 0.25])


def cut(batch, weights_B, parts):
    """The batch in micro-batches."""
    rows = torch.arange(len(batch.names)).chunk(parts)
    return [
        replace(
            batch,
            keys=batch.keys[r],
            images={name: tensor[r] for name, tensor in batch.images.items()},
            valid_B=batch.valid_B[r],
            names=[batch.names[i] for i in r],
            draws={name: tensor[r] for name, tensor in batch.draws.items()},
            weights_B=None if weights_B is None else weights_B[r],
        )
        for r in rows
    ]


def gradients(toy, micro_batches, valid):
    state = toy.state()
    state.net.double()
    loss = step.backward(state.net, micro_batches, toy.loss_fn, valid, nullcontext, state.see)
    return loss, [p.grad for p in state.net.parameters()], state.meter.read()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_each_loss_counts_by_its_weight_and_the_sum_is_divided_by_the_count_of_valid_samples(toy, parts):
    valid = [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    batch = toy.batch(0, 8, valid=valid)
    loss, found, read = gradients(toy, cut(batch, WEIGHTS, parts), 6)
    net = toy.state().net.double()
    expected = (toy.loss_fn(net, batch).loss_B * WEIGHTS)[batch.valid_B > 0].sum() / 6
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    for a, b in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-12, atol=1e-14)
    assert read["learning/loss"] == pytest.approx(expected.item(), rel=1e-6), "what is logged is what is minimised"


def test_weights_of_one_and_no_weights_are_the_same_to_the_bit(toy):
    batch = toy.batch(0, 8)
    plain, ones = (gradients(toy, cut(batch, weights, 2), 8) for weights in (None, torch.ones(8)))
    assert torch.equal(plain[0], ones[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], ones[1], strict=True))


def test_a_poisoned_sample_in_an_empty_slot_poisons_nothing_whatever_its_weight(toy):
    batch = replace(toy.batch(0, 4, valid=[0, 1, 1, 1]), weights_B=torch.tensor([5.0, 1.0, 2.0, 1.0]))
    batch.draws["scale"][0] = float("inf")
    state = toy.state()
    assert torch.isfinite(step.backward(state.net, [batch], toy.loss_fn, 3, nullcontext, state.see))


@pytest.mark.parametrize("parts", [1, 4])
def test_twice_the_weights_are_the_loss_of_other_dreambooth_trainers(toy, parts):
    """docs/dreambooth.md: mean(instance) + w * mean(class) is what weights of 2 and 2w give; 1 and w give its half."""
    own = torch.tensor([True, False] * 4)
    batch, net = toy.batch(0, 8), toy.state().net.double()
    losses = toy.loss_fn(net, batch).loss_B
    theirs = losses[own].mean() + 0.3 * losses[~own].mean()
    theirs.backward()
    _, twice, _ = gradients(toy, cut(batch, torch.where(own, 2.0, 0.6), parts), 8)
    _, once, _ = gradients(toy, cut(batch, torch.where(own, 1.0, 0.3), parts), 8)
    for parameter, double, single in zip(net.parameters(), twice, once, strict=True):
        torch.testing.assert_close(double, parameter.grad, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(2 * single, parameter.grad, rtol=1e-6, atol=1e-9)
