"""Running out of memory: what is said, and the largest micro-batch that is found to fit."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from daguerre import errors
from daguerre.kernels import adamw_ema
from daguerre.training import oom, step
from daguerre.training.oom import OutOfMemory

pytestmark = pytest.mark.usefixtures("few_objects")
CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "40000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "means_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError(CPU_MESSAGE), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_errors_that_mean_it_become_a_users_error_with_advice(error, means_it):
    expected = OutOfMemory if means_it else RuntimeError
    with pytest.raises(expected) as caught, oom.explained("drawing", lambda: "draw less"):
        raise error
    assert (caught.value is error) is not means_it
    if means_it:
        assert str(caught.value).startswith("out of memory while drawing: ")
        assert str(caught.value).endswith("\ndraw less\ndocs/trouble.md#out-of-memory lists more ways.")
        assert caught.value.exit_code == errors.FAILED


@pytest.mark.long
def test_a_real_allocation_that_fails_on_a_cpu_is_told():
    with pytest.raises(OutOfMemory, match="DefaultCPUAllocator"), oom.explained("trying", lambda: ""):
        torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.long
def test_what_failed_holds_no_memory_when_advice_is_asked_for():
    class Large:
        alive = 0

        def __init__(self):
            Large.alive += 1

        def __del__(self):
            Large.alive -= 1

    def fails():
        held = [Large()]
        assert held
        raise torch.OutOfMemoryError("full")

    with pytest.raises(OutOfMemory, match="0 alive"), oom.explained("it", lambda: f"{Large.alive} alive"):
        fails()


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 12, 100])
def test_the_largest_size_is_found_in_few_attempts(limit):
    sizes, tried = oom.divisors(48, 24), []

    def fits(size):
        tried.append(size)
        return size <= limit

    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert oom.largest_that_fits(sizes, fits) == max((size for size in sizes if size <= limit), default=None)
    assert len(tried) <= 4


def limited(toy, limit):
    """A loss that has room for `limit` samples."""

    def loss_fn(net, batch):
        if len(batch.names) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return toy.loss_fn(net, batch)

    return loss_fn


@pytest.mark.long
def test_an_attempt_moves_no_weight_and_takes_what_an_optimizer_will_take(toy):
    state = toy.state()
    before = [p.detach().clone() for p in state.net.parameters()]
    batch = toy.batch(0, 8)
    assert not oom.update_fits(state, batch, limited(toy, 4), nullcontext)
    assert oom.update_fits(state, batch.rows(0, 4), limited(toy, 4), nullcontext)
    assert all(torch.equal(a, b) for a, b in zip(before, state.net.parameters(), strict=True))
    assert all(p.grad is None for p in state.net.parameters())
    assert state.step == 0
    assert {"0.exp_avg", "3.exp_avg_sq"} < state.optimizer.tensors().keys(), "the moments' room counts"


@pytest.mark.long
def test_an_optimizer_without_room_does_not_fit(toy, monkeypatch):
    state = toy.state()

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(adamw_ema, "move", full)
    assert not oom.update_fits(state, toy.batch(0), toy.loss_fn, nullcontext)


def test_other_errors_of_an_attempt_are_not_hidden(toy):
    def broken(net, batch):
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        oom.update_fits(toy.state(), toy.batch(0), broken, nullcontext)


def test_a_part_of_a_batch_is_one_with_all_of_each_sample(toy):
    whole = toy.batch(0, 6)
    part = whole.rows(0, 2)
    assert part.names == whole.names[:2]
    assert np.array_equal(part.keys, whole.keys[:2])
    assert torch.equal(part.pixels_BCHW, whole.pixels_BCHW[:2])
    assert torch.equal(part.draws["scale"], whole.draws["scale"][:2])
    state = toy.state()
    loss = step.backward(state.net, [part], toy.loss_fn, 2, nullcontext, state.see)
    assert torch.isfinite(loss)
