"""The optimizer and its average in one call: equal to one after the other, and resumed to the bit."""

from contextlib import nullcontext

import pytest
import torch

from daguerre.training import step
from daguerre.training.settings import EMASettings

UPDATES = 8


def run(toy, state, first, last, poisoned=(), frozen=()):
    for number in range(first, last):
        batch = toy.batch(number, poison=number in poisoned)
        for name, p in state.net.named_parameters():
            p.requires_grad_(not (number in frozen and name.startswith("inner")))
        step.update(state, [batch], toy.loss_fn, learning_rate=0.01, max_grad_norm=0.05, autocast=nullcontext)
    return state


def tensors(state):
    return {f"{file}/{name}": t for file, found in state.tensors().items() for name, t in found.items()}


EMAS = {
    "diffusers": EMASettings(decay=0.9),
    "now and then": EMASettings(name="stable_cascade", decay=0.9, every_steps=3, start_steps=2),
    "none": EMASettings(enabled=False),
    "profiles": EMASettings(decay=0.9, post_hoc=[0.05, 0.1]),
}


@pytest.mark.parametrize("ema", EMAS)
@pytest.mark.parametrize("unusual", [{}, {"poisoned": (3, 4)}, {"frozen": (5, 6)}], ids=["usual", "skipped", "frozen"])
def test_equal_to_one_pass_after_the_other(toy, ema, unusual):
    one, other = (
        tensors(run(toy, toy.state(ema=EMAS[ema], one_pass=one_pass), 0, UPDATES, **unusual))
        for one_pass in (True, False)
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("frozen", [(), (1, 5)], ids=["all", "some without gradients"])
def test_a_run_that_goes_on_is_equal_to_the_bit(toy, frozen):
    whole = run(toy, toy.state(), 0, UPDATES, frozen=frozen)
    half = run(toy, toy.state(), 0, 3, frozen=frozen)
    saved = {file: {n: t.clone() for n, t in found.items()} for file, found in half.tensors().items()}
    again = toy.state(seed=1)
    again.load(saved, half.document())
    run(toy, again, 3, UPDATES, frozen=frozen)
    ours, theirs = tensors(again), tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_of_one_goes_on_with_the_other(toy):
    expected = tensors(run(toy, toy.state(one_pass=False), 0, UPDATES))
    for before, after in ((True, False), (False, True)):
        half = run(toy, toy.state(one_pass=before), 0, 4)
        again = toy.state(seed=1, one_pass=after)
        again.load(half.tensors(), half.document())
        found = tensors(run(toy, again, 4, UPDATES))
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())


def test_parameters_share_their_count_until_one_has_no_gradient(toy):
    state = run(toy, toy.state(), 0, 3, frozen=(2,))
    steps = {name: state.optimizer.parts[0].optimizer.state[p]["step"] for name, p in state.net.named_parameters()}
    assert {name: float(value) for name, value in steps.items()} == {
        "inner.weight": 2, "inner.bias": 2, "out.weight": 3, "out.bias": 3,
    }  # fmt: skip
