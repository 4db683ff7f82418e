"""Global response normalisation: forward and backward beside diffusers' module in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.unets.unet_stable_cascade import GlobalResponseNorm, SDCascadeResBlock
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from daguerre.kernels import swap
from daguerre.kernels.response_norm import response_norm

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def plain(x, gamma, beta, gelu=False):
    x = F.gelu(x) if gelu else x
    return functional_call(GlobalResponseNorm(x.shape[-1]), {"gamma": gamma, "beta": beta}, x)


def inputs(shape, dtype):
    torch.manual_seed(0)
    x, gamma, beta = (torch.randn(s, dtype=torch.float64) for s in (shape, shape[-1:], (1, 1, 1, shape[-1])))
    return [t.to(dtype).requires_grad_() for t in (2 * x, gamma, beta)]


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(3, 4, 4, 10), (2, 1, 5, 260), (2, 9, 10, 64), (1, 1, 1, 1), (0, 2, 2, 8)])
def test_values_and_gradients_are_those_of_diffusers(computed_by, shape, dtype, gelu):
    given = inputs(shape, dtype)
    y = response_norm(*given, gelu)
    dy = torch.randn(shape, dtype=torch.float64).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = plain(*wide, gelu)
    found = [y, *torch.autograd.grad(y, given, dy)]
    theirs = [expected, *torch.autograd.grad(expected, wide, dy.double())]
    for ours, other in zip(found, theirs, strict=True):
        assert (ours.dtype, ours.shape) == (dtype, other.shape)
        size = max(1.0, float(other.detach().abs().max()) if other.numel() else 1.0)
        assert torch.allclose(ours.detach().double(), other.detach(), rtol=0, atol=size * TOLERANCES[dtype])


@pytest.mark.parametrize("gelu", [False, True])
def test_gradients_are_those_of_small_differences(computed_by, gelu):
    given = inputs((2, 2, 3, 4), torch.float64)
    assert torch.autograd.gradcheck(lambda *tensors: response_norm(*tensors, gelu), given)


def test_channels_of_zeros_have_the_gradients_of_diffusers(computed_by):
    x, gamma, beta = inputs((2, 3, 3, 6), torch.float64)
    x.data[..., 2] = 0
    x.data[1] = 0
    both = [torch.autograd.grad(f(x, gamma, beta).square().sum(), (x, gamma, beta)) for f in (response_norm, plain)]
    for ours, other in zip(*both, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.allclose(ours, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_block_of_stable_cascade_computes_the_same(bf16):
    torch.manual_seed(1)
    block = SDCascadeResBlock(8)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.5)
    changed = copy.deepcopy(block)
    assert swap.responses(changed) == 1
    assert changed.state_dict().keys() == block.state_dict().keys()
    x = torch.randn(2, 8, 4, 4)
    found = []
    for each in (block, changed):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y = each(x)
        y.float().square().mean().backward()
        found.append([y, *(p.grad for p in each.parameters())])
    for ours, other in zip(*found[::-1], strict=True):
        assert (ours - other).norm() <= (2e-2 if bf16 else 1e-6) * other.norm()
    assert any(not torch.equal(a, b) for a, b in zip(*found, strict=True)), "something else has computed it"


def test_tensors_without_memory_see_shapes():
    with FakeTensorMode():
        x, gamma, beta = inputs((2, 3, 3, 8), torch.float32)
        y = response_norm(x, gamma, beta)
        assert y.shape == x.shape
        y.sum().backward()
        assert (x.grad.shape, gamma.grad.shape, beta.grad.shape) == (x.shape, gamma.shape, beta.shape)


def test_what_is_no_image_is_refused():
    with pytest.raises(RuntimeError, match="4 dims, B H W C; got"):
        response_norm(torch.zeros(2, 5), torch.zeros(5), torch.zeros(5))
