"""GroupNorm with SiLU: forward and backward beside torch's own operators in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from daguerre.kernels.group_norm_silu import group_norm_silu, plain

SHAPES = [
    # B, C, H, W, groups
    pytest.param((2, 32, 4, 4, 8), id="small"),
    pytest.param((1, 320, 3, 5, 32), id="groups of ten"),
    pytest.param((2, 64, 17, 16, 32), id="odd height, several parts"),
    pytest.param((3, 6, 1, 1, 2), id="one place"),
    pytest.param((1, 2560, 2, 2, 32), id="widest"),
    pytest.param((1, 32, 40, 40, 32), id="groups of one"),
    pytest.param((1, 100, 7, 9, 4), id="no power of two"),
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def inputs(shape, dtype, of_weights):
    torch.manual_seed(sum(shape))
    B, C, H, W, _ = shape
    x = (torch.randn(B, C, H, W, dtype=torch.float64) * 2 + 3).to(dtype).requires_grad_()
    weight, bias = (torch.randn(C, dtype=torch.float64).to(of_weights).requires_grad_() for _ in range(2))
    return x, weight, bias, torch.randn(B, C, H, W, dtype=torch.float64).to(dtype)


def gap(ours, theirs):
    """Largest difference over the largest number."""
    return float((ours.detach().double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torch(computed_by, shape, silu):
    for dtype, of_weights in [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]:
        x, weight, bias, dy = inputs(shape, dtype, of_weights)
        y = group_norm_silu(x, weight, bias, shape[-1], 1e-5, silu)
        ours = (y, *torch.autograd.grad(y, (x, weight, bias), dy))
        wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        expected = plain(*wide, shape[-1], 1e-5, silu)
        theirs = (expected.detach(), *torch.autograd.grad(expected, wide, dy.double()))
        gaps = [gap(a, b) for a, b in zip(ours, theirs, strict=True)]
        assert max(gaps) <= TOLERANCES[dtype], (dtype, gaps)
        assert [t.dtype for t in ours] == [dtype, dtype, of_weights, of_weights]
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in ours[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types(computed_by, dtype):
    x, weight, bias, dy = inputs((2, 32, 5, 4, 8), dtype, dtype)
    y = group_norm_silu(x, weight, bias, 8)
    ours = (y, *torch.autograd.grad(y, (x, weight, bias), dy))
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = plain(*wide, 8, 1e-5, True)
    theirs = (expected.detach(), *torch.autograd.grad(expected, wide, dy.double()))
    assert max(gap(a, b) for a, b in zip(ours, theirs, strict=True)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("silu", [True, False])
def test_gradients_are_those_of_small_differences(computed_by, silu):
    x, weight, bias, _ = inputs((2, 4, 2, 3, 2), torch.float64, torch.float64)
    assert torch.autograd.gradcheck(lambda *given: group_norm_silu(*given, 2, 1e-3, silu), (x, weight, bias))


def test_a_far_mean_costs_no_digits(computed_by):
    """Sums of squares would lose everything here."""
    torch.manual_seed(0)
    x = torch.randn(1, 32, 16, 16) + 1e4
    y = group_norm_silu(x, torch.ones(32), torch.zeros(32), 8, 1e-5, False)
    assert gap(y, plain(x.double(), None, None, 8, 1e-5, False)) <= 1e-3


def test_every_run_gives_the_same_bits(computed_by):
    def once():
        x, weight, bias, dy = inputs((2, 64, 17, 16, 32), torch.float32, torch.float32)
        y = group_norm_silu(x, weight, bias, 32)
        return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_an_image_in_any_layout_gives_the_same(computed_by):
    x, weight, bias, _ = inputs((2, 32, 4, 6, 8), torch.float32, torch.float32)
    last = x.detach().contiguous(memory_format=torch.channels_last)
    strided = torch.stack([x.detach(), x.detach()], -1)[..., 0]
    expected = group_norm_silu(x, weight, bias, 8)
    assert all(torch.equal(group_norm_silu(t, weight, bias, 8), expected) for t in (last, strided))


def test_tensors_without_memory_see_shapes():
    with FakeTensorMode():
        x = torch.empty(2, 32, 5, 5, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(32, requires_grad=True)
        y = group_norm_silu(x, weight, torch.empty(32), 8)
        assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
        y.sum().backward()
        assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_what_is_no_image_is_refused():
    with pytest.raises(RuntimeError, match="4 dims"):
        group_norm_silu(torch.zeros(2, 8, 4), torch.ones(8), torch.ones(8), 2)
    with pytest.raises(RuntimeError, match="7 channels do not divide into 2"):
        group_norm_silu(torch.zeros(2, 7, 4, 4), torch.ones(7), torch.ones(7), 2)
