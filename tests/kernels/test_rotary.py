"""Rotary positions: forward and backward beside diffusers' own functions in float64, and attention that calls them."""

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from daguerre.kernels import rotary as kernel
from daguerre.kernels.rotary import rotary

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(2, 3, 5, 8), (1, 70, 2, 6), (2, 1, 4, 128), (1, 2, 0, 8)]
FORMS = {"neighbours": -1, "halves": -2}


def gap(ours, theirs):
    return float((ours.double() - theirs).detach().abs().max()) if theirs.numel() else 0.0


def given(shape, dtype, rows):
    """x, and two tables of numbers that are no cosines and sines: each has its own effect."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return x, *(torch.rand(rows, shape[-1], dtype=torch.float64, generator=generator) for _ in range(2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_angles_turn_as_those_of_diffusers(computed_by, shape, dtype, sequence_dim, form):
    x, cos, sin = given(shape, dtype, shape[sequence_dim])
    how = {"use_real_unbind_dim": FORMS[form], "sequence_dim": sequence_dim}
    y = kernel._by_angles(x, (cos, sin) if dtype == torch.float64 else (cos.float(), sin.float()), **how)
    wide = x.detach().double().requires_grad_()
    # diffusers' own computes in float32: its formula in float64.
    a, b = kernel._pairs(wide, form == "halves")
    turned = torch.cat([-b, a], -1) if form == "halves" else torch.stack([-b, a], -1).flatten(-2)
    c, s = (t[None, None] if sequence_dim == 2 else t[None, :, None] for t in (cos, sin))
    expected = wide * c + turned * s
    dy = torch.randn(shape, dtype=torch.float64)
    ours, theirs = torch.autograd.grad(y, x, dy.to(dtype)), torch.autograd.grad(expected, wide, dy)
    scale = 1 + float(expected.detach().abs().max()) if expected.numel() else 1
    assert gap(y, expected) <= TOLERANCES[dtype] * scale
    assert gap(ours[0], theirs[0]) <= 2 * TOLERANCES[dtype] * scale
    assert (y.dtype, ours[0].dtype, y.shape) == (dtype, dtype, x.shape)
    if not x.numel():  # of which diffusers cannot make pairs
        return
    its = apply_rotary_emb(x, (cos, sin), **how)
    assert gap(its, expected) <= max(TOLERANCES[dtype], 1e-6) * scale


@pytest.mark.parametrize("batch", [None, 1, 2])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_complex_numbers_turn_as_those_of_diffusers(computed_by, dtype, batch):
    """One table for all samples, or one for each."""
    x, _, angles = given((2, 7, 3, 8), dtype, 7 * (batch or 1))
    numbers = torch.polar(torch.ones(7 * (batch or 1), 4, dtype=torch.float64), 9 * angles[:, :4])
    numbers = numbers if batch is None else numbers.view(batch, 7, 4)
    y = kernel._by_numbers(x, numbers if dtype == torch.float64 else numbers.to(torch.complex64))
    wide = x.detach().double().requires_grad_()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * numbers.unsqueeze(-2)
    expected = torch.view_as_real(pairs).flatten(3)
    dy = torch.randn(x.shape, dtype=torch.float64)
    ours, theirs = torch.autograd.grad(y, x, dy.to(dtype)), torch.autograd.grad(expected, wide, dy)
    assert gap(y, expected) <= 4 * TOLERANCES[dtype]
    assert gap(ours[0], theirs[0]) <= 6 * TOLERANCES[dtype]
    assert torch.allclose(y.double().norm(), x.double().norm(), rtol=1e-2), "a rotation keeps lengths"


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("paired", [False, True])
def test_gradients_are_those_of_small_differences(computed_by, halves, paired):
    x, cos, sin = given((2, 3, 2, 6), torch.float64, 3)
    assert torch.autograd.gradcheck(lambda t: rotary(t, cos, None if paired else sin, 2, halves), x)


def test_rows_of_any_layout_give_the_same(computed_by):
    x, cos, sin = given((2, 3, 4, 6), torch.float32, 4)
    cos, sin = cos.float(), sin.float()
    again = x.detach().transpose(1, 3).contiguous().transpose(1, 3)
    assert torch.equal(rotary(again, cos, sin, 1), rotary(x, cos, sin, 1))
    assert torch.equal(rotary(x, cos.T.contiguous().T, sin, 1), rotary(x, cos, sin, 1))


def test_other_tables_are_left_to_diffusers():
    x = torch.randn(2, 3, 4, 6)
    numbers = torch.polar(torch.ones(2, 4, 3), torch.rand(2, 4, 3))
    for rows, table, real in ((x, numbers[:, :3], False), (x, (torch.rand(1, 6), torch.rand(1, 6)), True)):
        assert torch.equal(kernel._by_angles(rows, table, real), apply_rotary_emb(rows, table, real))


def test_processors_that_turn_nothing_stay():
    class Another(FluxAttnProcessor):
        def __call__(self, attn, hidden_states):
            return hidden_states

    layer = nn.Linear(2, 2)
    layer.processor = Another()
    assert kernel.enable(nn.Sequential(layer)) == 0
    layer.processor = FluxAttnProcessor()
    assert kernel.enable(nn.Sequential(layer)) == 1
    assert isinstance(layer.processor, FluxAttnProcessor)
    assert type(layer.processor).__name__ == "FluxAttnProcessor"
    assert kernel.enable(nn.Sequential(layer)) == 0, "once"
    assert FluxAttnProcessor.__call__.__globals__["apply_rotary_emb"] is apply_rotary_emb, "that of others stays"


def test_tensors_without_memory_see_shapes():
    with FakeTensorMode():
        x = torch.empty(2, 5, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        y = rotary(x, torch.empty(5, 8), torch.empty(5, 8), 3)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        y.sum().backward()
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
