"""LayerNorm and RMSNorm: forward and backward beside torch's own operators in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from daguerre.kernels.row_norms import layer_norm, rms_norm

TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(3, 7, 10), (5, 320), (2, 1, 1, 6), (37, 64), (1, 2048), (0, 8)]


def inputs(shape, dtype, affine, of_weights=torch.float32):
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=torch.float64) * 2 + 3).to(dtype).requires_grad_()
    numbers = [torch.randn(shape[-1], dtype=torch.float64).to(of_weights).requires_grad_() for _ in range(2)]
    return [x, *(number if held else None for number, held in zip(numbers, affine, strict=True))]


def gap(ours, theirs):
    """Largest difference over the largest number."""
    return float((ours.detach().double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torch(computed_by, shape, dtype, affine):
    of_weights = torch.float64 if dtype == torch.float64 else torch.float32
    given = inputs(shape, dtype, affine, of_weights)
    y = layer_norm(*given, 1e-5)
    dy = torch.randn(shape, dtype=torch.float64).to(dtype)
    ours = [y, *torch.autograd.grad(y, [t for t in given if t is not None], dy)]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    expected = F.layer_norm(wide[0], shape[-1:], *wide[1:], 1e-5)
    theirs = [expected.detach(), *torch.autograd.grad(expected, [t for t in wide if t is not None], dy.double())]
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert not other.numel() or gap(one, other) <= TOLERANCES[dtype]
    assert [t.dtype for t in ours] == [dtype, dtype, *[of_weights] * sum(affine)]


@pytest.mark.parametrize("learns", [(True, False), (False, True), (False, False)])
def test_only_what_is_trained_gets_a_gradient(computed_by, learns):
    given = inputs((37, 6), torch.float32, (True, True))
    expected = torch.autograd.grad(layer_norm(*given).square().sum(), given)
    for tensor, asked in zip(given[1:], learns, strict=True):
        tensor.requires_grad_(asked)
    layer_norm(*given).square().sum().backward()
    assert torch.equal(given[0].grad, expected[0])
    for tensor, asked, gradient in zip(given[1:], learns, expected[1:], strict=True):
        assert torch.equal(tensor.grad, gradient) if asked else tensor.grad is None


def test_gradients_are_those_of_small_differences(computed_by):
    given = inputs((3, 2, 5), torch.float64, (True, True), torch.float64)
    assert torch.autograd.gradcheck(lambda *t: layer_norm(*t, 1e-3), given)


def test_more_rows_than_programs_and_the_same_bits_each_time(computed_by):
    def once():
        given = inputs((5000, 6), torch.float32, (True, True))
        y = layer_norm(*given)
        return [
            y.detach(),
            *torch.autograd.grad(y, given, torch.randn(y.shape, generator=torch.Generator().manual_seed(1))),
        ]

    ours = once()
    wide = [t.detach().double().requires_grad_() for t in inputs((5000, 6), torch.float32, (True, True))]
    y = F.layer_norm(wide[0], (6,), *wide[1:])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).double()
    for one, other in zip(ours, [y.detach(), *torch.autograd.grad(y, wide, dy)], strict=True):
        assert gap(one, other) <= 5e-6
    assert all(torch.equal(a, b) for a, b in zip(once(), ours, strict=True))


def test_a_far_mean_costs_no_digits(computed_by):
    torch.manual_seed(0)
    x = torch.randn(4, 320) + 1e4
    assert gap(layer_norm(x, None, None), F.layer_norm(x.double(), (320,))) <= 1e-3


def test_rows_of_any_layout_give_the_same(computed_by):
    torch.manual_seed(2)
    x = torch.randn(4, 5, 12)
    assert torch.equal(layer_norm(x.transpose(0, 1), None, None), layer_norm(x, None, None).transpose(0, 1))


def test_tensors_without_memory_see_shapes():
    with FakeTensorMode():
        x, weight, bias = inputs((2, 3, 8), torch.bfloat16, (True, True))
        y = layer_norm(x, weight, bias)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        y.sum().backward()
        assert (x.grad.dtype, weight.grad.dtype, bias.grad.shape) == (torch.bfloat16, torch.float32, (8,))


@pytest.mark.parametrize("of_weights", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norms_are_those_of_float64(computed_by, shape, dtype, of_weights):
    """In the type of the rows or another one, with a weight of any type."""
    if of_weights is not None and dtype == torch.float64:
        of_weights = torch.float64
    given = [t for t in inputs(shape, dtype, (of_weights is not None, False), of_weights)[:2] if t is not None]
    wide = [t.detach().double().requires_grad_() for t in given]
    weight, wide_weight = (None, None) if of_weights is None else (given[1], wide[1])
    expected = F.rms_norm(wide[0], shape[-1:], wide_weight, 1e-6)
    dy = torch.randn(shape, dtype=torch.float64).to(dtype)
    theirs = [expected.detach(), *torch.autograd.grad(expected, wide, dy.double())]
    for result in {dtype, torch.promote_types(dtype, torch.float32)}:
        y = rms_norm(given[0], weight, 1e-6, result)
        ours = [y, *torch.autograd.grad(y, given, dy.to(result))]
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape
            assert not other.numel() or gap(one, other) <= TOLERANCES[dtype if one.dtype != of_weights else of_weights]
        assert [t.dtype for t in ours] == [result, dtype, *([] if of_weights is None else [of_weights])]


def test_gradients_of_rms_norms_are_those_of_small_differences(computed_by):
    x, weight, _ = inputs((3, 2, 5), torch.float64, (True, False), torch.float64)
    assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, 1e-3), (x, weight))


def test_rms_norms_of_many_rows_have_the_same_bits_each_time(computed_by):
    def once(learns):
        x, weight, _ = inputs((5000, 6), torch.float32, (True, False))
        y = rms_norm(x, weight.requires_grad_(learns), 1e-6)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        return [y.detach(), *torch.autograd.grad(y, [x, weight] if learns else [x], dy)]

    x, weight, _ = inputs((5000, 6), torch.float32, (True, False))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    y = F.rms_norm(wide[0], (6,), wide[1], 1e-6)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).double()
    ours = once(True)
    for one, other in zip(ours, [y.detach(), *torch.autograd.grad(y, wide, dy)], strict=True):
        assert gap(one, other) <= 5e-6
    assert all(torch.equal(a, b) for a, b in zip(once(True), ours, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(once(False), ours[:2], strict=True)), "of a weight that is not trained"


def test_rms_norms_of_zeros_and_of_any_layout(computed_by):
    torch.manual_seed(2)
    x = torch.randn(4, 5, 12)
    assert torch.equal(rms_norm(x.transpose(0, 1), None, 1e-6), rms_norm(x, None, 1e-6).transpose(0, 1))
    zeros = torch.zeros(3, 8, requires_grad=True)
    rms_norm(zeros, None, 1e-6).sum().backward()
    assert torch.allclose(zeros.grad, torch.full((3, 8), 1e3))


def test_rms_norms_without_memory_see_shapes():
    with FakeTensorMode():
        x, weight, _ = inputs((2, 3, 8), torch.bfloat16, (True, False))
        y = rms_norm(x, weight, 1e-6, torch.float32)
        assert (y.shape, y.dtype) == (x.shape, torch.float32)
        y.sum().backward()
        assert (x.grad.dtype, weight.grad.dtype, weight.grad.shape) == (torch.bfloat16, torch.float32, (8,))
