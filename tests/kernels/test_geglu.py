"""GEGLU: forward and backward beside torch's own operators in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from daguerre.kernels.geglu import geglu, plain

TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(3, 7, 10), (2, 2600), (1, 3, 2), (0, 8)])
def test_values_and_gradients_are_those_of_torch(computed_by, shape, dtype):
    torch.manual_seed(0)
    x = (2 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_()
    y = geglu(x)
    dy = torch.randn(y.shape, dtype=torch.float64).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    expected = plain(wide)
    (theirs,) = torch.autograd.grad(expected, wide, dy.double())
    for ours, other in ((y, expected.detach()), (dx, theirs)):
        assert (ours.dtype, ours.shape) == (dtype, other.shape)
        assert torch.allclose(ours.detach().double(), other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_gradients_are_those_of_small_differences(computed_by):
    torch.manual_seed(1)
    assert torch.autograd.gradcheck(geglu, (torch.randn(3, 6, dtype=torch.float64, requires_grad=True),))


def test_rows_of_any_layout_give_the_same(computed_by):
    torch.manual_seed(2)
    x = torch.randn(4, 5, 12)
    assert torch.equal(geglu(x.transpose(0, 1)), geglu(x).transpose(0, 1))


def test_tensors_without_memory_see_shapes():
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, requires_grad=True)
        y = geglu(x)
        assert y.shape == (2, 3, 4)
        y.sum().backward()
        assert x.grad.shape == x.shape


def test_an_odd_width_is_refused():
    with pytest.raises(RuntimeError, match="5 features do not halve"):
        geglu(torch.zeros(2, 5))
