"""One pass over clip factor, AdamW, skip flag and average, beside torch's optimizer and the passes one by one."""

import pytest
import torch

from daguerre.kernels import adamw_ema
from daguerre.kernels.adamw_ema import Rule, Tensors, move

SHAPES = [(5,), (16, 8, 3, 3), (4097,), (128, 33), ()]
UPDATES = 6


def gradients(update):
    torch.manual_seed(update)
    return [torch.randn(shape) for shape in SHAPES]


def start(dense=torch.contiguous_format):
    torch.manual_seed(100)
    weights = [torch.randn(shape) for shape in SHAPES]
    weights = [w.to(memory_format=dense) if w.ndim == 4 else w for w in weights]
    zeros = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    return Tensors(
        weights, [torch.empty_like(w) for w in weights], *zeros, torch.zeros(()), [w.clone() for w in weights]
    )


def rule(update):
    return Rule(1e-2 * update, 0.1, 0.9, 0.999, 1e-8, 1.0 if update == 1 else 0.3)


def moved(tensors, factor=None, skipped=()):
    for update in range(1, UPDATES + 1):
        for own, given in zip(tensors.gradients, gradients(update), strict=True):
            own.copy_(given if update not in skipped else given * float("nan"))
        move(tensors, rule(update), torch.tensor(update in skipped), factor)
    return tensors


def by_torch(factor, skipped=()):
    """torch.optim.AdamW over gradients that were multiplied before, and torch.lerp after it."""
    weights = [torch.nn.Parameter(w) for w in start().parameters]
    averages = [w.detach().clone() for w in weights]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False)
    for update in range(1, UPDATES + 1):
        for p, given in zip(weights, gradients(update), strict=True):
            p.grad = given * factor
        optimizer.param_groups[0]["lr"] = rule(update).learning_rate
        if update not in skipped:
            optimizer.step()
        for a, p in zip(averages, weights, strict=True):
            a.lerp_(p.detach(), rule(update).average)
    return weights, averages, optimizer.state


@pytest.mark.parametrize("skipped", [(), (1,), (3, 4)])
@pytest.mark.parametrize("factor", [None, 0.37])
def test_numbers_are_those_of_one_pass_after_the_other(computed_by, factor, skipped):
    ours = moved(start(), None if factor is None else torch.tensor(factor), skipped)
    weights, averages, state = by_torch(factor or 1.0, skipped)
    for i, p in enumerate(weights):
        assert torch.allclose(ours.parameters[i], p.detach(), rtol=1e-6, atol=1e-6)
        assert torch.allclose(ours.averages[i], averages[i], rtol=1e-6, atol=1e-6)
        assert torch.allclose(ours.exp_avg[i], state[p]["exp_avg"], rtol=1e-5, atol=1e-7)
        assert torch.allclose(ours.exp_avg_sq[i], state[p]["exp_avg_sq"], rtol=1e-5, atol=1e-9)
        assert float(ours.step) == float(state[p]["step"]) == UPDATES - len(skipped)


def test_a_skipped_update_changes_no_bit_but_of_the_averages(computed_by):
    tensors = start()
    before = [w.clone() for w in tensors.parameters]
    for own in tensors.gradients:
        own.fill_(float("inf"))
    for average in tensors.averages:
        average.zero_()
    move(tensors, rule(2), torch.tensor(True), torch.tensor(float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(tensors.parameters, before, strict=True))
    assert not any(m.any() for m in (*tensors.exp_avg, *tensors.exp_avg_sq))
    assert float(tensors.step) == 0
    assert all(torch.allclose(a, 0.3 * w) for a, w in zip(tensors.averages, before, strict=True))


def test_without_averages_and_with_averages_that_stand_still(computed_by):
    full = moved(start())
    bare = start()
    bare = moved(Tensors(bare.parameters, bare.gradients, bare.exp_avg, bare.exp_avg_sq, bare.step))
    assert all(torch.equal(a, b) for a, b in zip(full.parameters, bare.parameters, strict=True))
    still = start()
    for own, given in zip(still.gradients, gradients(1), strict=True):
        own.copy_(given)
    move(still, Rule(0.1, 0.0, 0.9, 0.999, 1e-8, 0.0), torch.tensor(False), None)
    assert all(torch.equal(a, b) for a, b in zip(still.averages, start().averages, strict=True))


def test_any_dense_layout_gives_the_same(computed_by):
    usual, last = moved(start()), moved(start(torch.channels_last))
    assert all(torch.equal(a, b) for a, b in zip(usual.parameters, last.parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(usual.averages, last.averages, strict=True))


@pytest.mark.long
def test_layouts_that_differ_are_left_to_torch(interpreter):
    tensors = start()
    assert adamw_ema._triton(tensors) is not None
    mixed = [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in tensors.exp_avg]
    odd = Tensors(tensors.parameters, tensors.gradients, mixed, tensors.exp_avg_sq, tensors.step, tensors.averages)
    assert adamw_ema._triton(odd) is None
    moved(odd)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(odd.parameters, moved(start()).parameters, strict=True))


STRIDED = [((16, 8, 1, 1), (8, 1, 8, 8)), ((16, 1, 3, 3), (9, 1, 3, 1)), ((1, 5), (1, 1))]
"""A convolution of size 1, a depthwise one: under autocast their gradients are strided so on images with channels last.
The weights' own strides differ, the places of their numbers do not."""


def strided(shape, of_gradient):
    torch.manual_seed(0)
    row = [torch.rand(shape) for _ in range(4)]
    row[1] = torch.empty_strided(shape, of_gradient).copy_(row[1])
    assert row[1].stride() != row[0].stride()
    return row


@pytest.mark.parametrize(("shape", "of_gradient"), STRIDED)
def test_strides_of_dims_of_size_1_are_none(shape, of_gradient):
    assert adamw_ema._one_layout(strided(shape, of_gradient))


@pytest.mark.long
@pytest.mark.parametrize(("shape", "of_gradient"), STRIDED)
def test_tensors_so_strided_go_by_the_kernel(shape, of_gradient, interpreter):
    ours, theirs = ([[t] for t in strided(shape, of_gradient)] for _ in range(2))
    assert adamw_ema._triton(Tensors(*ours, torch.zeros(()))) is not None
    move(Tensors(*ours, torch.zeros(())), rule(1), torch.tensor(False), None)
    adamw_ema._by_torch(Tensors(*theirs, torch.zeros(())), rule(1), torch.tensor(False), None)
    assert all(torch.allclose(a[0], b[0], rtol=1e-6, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("other", [(1, 8), (16, 1)])
def test_another_order_of_elements_or_a_gap_is_no_equal_layout(other):
    weight, wide = torch.zeros(8, 8), torch.empty_strided((8, 8), other)
    assert not adamw_ema._one_layout([weight, wide])
    assert not adamw_ema._one_layout([wide, weight])


@pytest.mark.long
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", [1, 255, 1024, 1025, 3072, 4095])
def test_any_size_at_any_address(size, offset, interpreter):
    """Whole pieces and the last one, by wide loads and by narrow ones; what lies behind a tensor stays."""
    torch.manual_seed(0)
    memory = torch.rand(5, size + 8)
    theirs = memory.clone()
    for rows, computed in ((memory, move), (theirs, adamw_ema._by_torch)):
        weight, gradient, first, second, average = ([row[offset : offset + size]] for row in rows)
        tensors = Tensors(weight, gradient, first, second, torch.zeros(()), average)
        computed(tensors, rule(2), torch.tensor(False), torch.tensor(0.5))
    inside = torch.tensor([0, 2, 3, 4])  # gradients are spent
    assert torch.allclose(memory[inside], theirs[inside], rtol=1e-6, atol=1e-6)
    assert torch.equal(memory[:, offset + size :], theirs[:, offset + size :])
