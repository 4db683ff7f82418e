"""Layers of few bits: the error of each form, bytes, codes of other libraries, gradients, what is kept for them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from daguerre.errors import UserError
from daguerre.training.precision import quantized
from daguerre.training.precision.quantized import QuantizedLinear, dequantize, quantize

WITHOUT_LIBRARY = ("int8", "float8")
SHAPE = (40, 72)
BITS = {"nf4": 4 + 32 / 64, "int8": 8 + 32 / SHAPE[1], "float8": 8 + 32 / SHAPE[1]}
HALF_GAP = (1.0 - 0.6961928009986877) / 2
"""Of nf4's two levels that are farthest apart, -1 and the next one."""


def weight() -> torch.Tensor:
    """Rows of very different sizes, and one of zeros."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(SHAPE, generator=generator) * torch.logspace(-4, 2, SHAPE[0])[:, None]
    rows[7] = 0
    return rows


def layer(form: str) -> tuple[nn.Linear, QuantizedLinear]:
    """A layer and its quantised one, which has the same bias."""
    plain = nn.Linear(SHAPE[1], SHAPE[0]).requires_grad_(False)
    plain.weight.copy_(weight())
    return plain, QuantizedLinear(plain, form)


@pytest.mark.parametrize("form", quantized.Form.__args__)
def test_the_error_is_that_of_the_form(form):
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
    w = weight()
    codes, scale = quantize(w, form)
    found = dequantize(codes, scale, form, SHAPE, torch.float32)
    largest = w.abs().amax(1, keepdim=True)
    bound = {
        "int8": largest / 127 / 2,  # half a step
        "float8": torch.maximum(w.abs() / 16, largest / 448 / 2**10),  # half of the last of 3 binary digits
        "nf4": HALF_GAP * w.flatten().reshape(-1, 64).abs().amax(1).repeat_interleave(64).reshape(SHAPE),
    }[form]
    assert ((found - w).abs() <= bound * (1 + 1e-5)).all()
    assert torch.equal(found[7], torch.zeros(SHAPE[1]))
    # and no better than that: it is really of few bits
    assert len(codes[0].float().unique()) <= 256
    assert (found - w).abs().max() > 0.1 * bound.max()


@pytest.mark.parametrize("form", quantized.Form.__args__)
def test_bytes_are_those_of_the_form(form):
    """Without memory no library is needed, and the shapes are those that the library makes."""
    with torch.device("meta"):
        outline = QuantizedLinear(nn.Linear(SHAPE[1], SHAPE[0]), form)
    assert outline.numbers == math.prod(SHAPE)
    assert outline.held_bytes == math.prod(SHAPE) * BITS[form] / 8
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
    real = layer(form)[1]
    for name in ("codes", "scale"):
        theirs, ours = getattr(real, name), getattr(outline, name)
        assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)


def test_codes_are_those_of_other_libraries():
    functional = pytest.importorskip("bitsandbytes.functional")
    w = weight()
    codes, scale = quantize(w, "int8")
    theirs, largest, _ = functional.int8_vectorwise_quant(w)
    assert torch.equal(codes, theirs)
    assert torch.equal(scale[:, 0], largest / 127)


def test_codes_of_float8_are_torchaos():
    torchao = pytest.importorskip("torchao.quantization")
    w = weight() + 1e-6  # torchao divides by the zero of a row of zeros
    codes, scale = quantize(w, "float8")
    theirs = torchao.Float8Tensor.from_hp(w, granularity=torchao.PerRow())
    assert torch.equal(codes.float(), theirs.qdata.float())
    assert torch.equal(scale, theirs.scale)


@pytest.mark.parametrize("form", quantized.Form.__args__)
@pytest.mark.parametrize("narrow", [False, True])
def test_gradients_are_those_of_the_widened_weight_and_it_is_not_kept(form, narrow):
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
    plain, few = layer(form)
    plain.weight.copy_(few.weight)
    few.bias.requires_grad_(True)
    kept: list[torch.Tensor] = []
    results = []
    for own in (plain, few):
        x = torch.randn(3, 5, SHAPE[1], generator=torch.Generator().manual_seed(1)).requires_grad_(True)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
        kept.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow), hooks:
            y = own(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    assert all(t.numel() <= few.codes.numel() and (t is few.codes or t is few.scale or t is y) for t in kept)
    (y, dx), (own_y, own_dx) = results
    assert own_y.dtype == y.dtype == (torch.bfloat16 if narrow else torch.float32)
    assert own_dx.dtype == torch.float32
    close = 2e-2 if narrow else 1e-6  # the scale is applied in bfloat16, or before a sum
    assert (own_y - y).abs().max() <= close * y.abs().max()
    assert (own_dx - dx).abs().max() <= close * dx.abs().max()
    assert few.bias.grad.shape == few.bias.shape


def test_a_bias_that_is_trained_has_its_gradient():
    """Adapters may train biases alone."""
    _, few = layer("int8")
    few.bias.requires_grad_(True)
    x = torch.randn(4, SHAPE[1], generator=torch.Generator().manual_seed(2))
    F.mse_loss(few(x), torch.ones(4, SHAPE[0])).backward()
    twin = nn.Parameter(few.bias.detach().clone())
    F.mse_loss(F.linear(x, few.weight, twin), torch.ones(4, SHAPE[0])).backward()
    torch.testing.assert_close(few.bias.grad, twin.grad)


def test_a_library_that_is_not_here_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    quantized.check("int8", torch.device("cpu"))
    with pytest.raises(
        UserError, match=r"training.base_precision=nf4 needs bitsandbytes: .* install .*bitsandbytes"
    ) as it:
        quantized.check("nf4", torch.device("cpu"))
    assert it.value.code == "not_installed"
