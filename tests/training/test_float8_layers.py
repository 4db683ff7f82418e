"""Trained layers in float8: results and gradients beside float64, types, which layers multiply so, refusals."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from daguerre.errors import UserError
from daguerre.training import device
from daguerre.training.precision import float8
from daguerre.training.precision.float8 import Float8Linear

BOUND = {"tensorwise": 0.06, "rowwise": 0.045}
"""Norm of an error as a share of the exact norm, of Gaussian numbers. e5m2 (tensorwise gradients) errs twice as far."""
IN, OUT = 128, 96


def layer(scaling: str, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(IN, OUT, dtype=dtype)
    made.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    assert float8.enable([made], scaling) == 1
    return made


def numbers(seed: int, *shape: int, spread: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(*shape, generator=generator)
    return made * torch.logspace(-4, 4, shape[1])[None, :, None] if spread else made


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("scaling", BOUND)
def test_all_three_products_are_those_of_float64_within_the_bound(scaling, narrow):
    own = layer(scaling)
    # 21 rows a sample: 42, to which zeros are added where rows are summed over.
    x, dy = numbers(1, 2, 21, IN).requires_grad_(True), numbers(2, 2, 21, OUT)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
        y = own(x)
    assert y.dtype == (torch.bfloat16 if narrow else torch.float32)
    y.backward(dy.to(y.dtype))
    assert own.weight.grad.dtype == x.grad.dtype == torch.float32
    exact_x, exact_w = x.detach().double(), own.weight.detach().double()
    exact = {
        "y": (y, F.linear(exact_x, exact_w, own.bias.detach().double())),
        "dx": (x.grad, dy.double() @ exact_w),
        "dw": (own.weight.grad, dy.double().flatten(0, 1).t() @ exact_x.flatten(0, 1)),
    }
    for name, (found, wanted) in exact.items():
        error = float((found.detach().double() - wanted).norm() / wanted.norm())
        # and is really of three binary digits: bf16's error would be .003
        assert 0.02 < error <= BOUND[scaling], (name, error)
    torch.testing.assert_close(own.bias.grad, dy.sum((0, 1)), rtol=2e-2, atol=1e-1 if narrow else 1e-4)


def test_rows_of_other_sizes_have_scales_of_their_own():
    """By one scale for all, rows a million times smaller than the largest would be zero."""
    x = numbers(3, 1, 40, IN, spread=True)
    exact = F.linear(x, layer("rowwise").weight)
    errors = {}
    for scaling in BOUND:
        own = layer(scaling)
        y = own(x) - own.bias
        errors[scaling] = ((y - exact).norm(dim=-1) / exact.norm(dim=-1)).amax()
    assert errors["rowwise"] <= 0.06 < 0.9 < errors["tensorwise"]  # of the worst row


def test_few_rows_compute_as_before():
    own = layer("tensorwise")
    x = numbers(4, 2, 8, IN)
    assert torch.equal(own(x), F.linear(x, own.weight, own.bias))


def test_weights_of_16_bits_get_gradients_of_theirs():
    own = layer("rowwise", torch.bfloat16)
    own(numbers(5, 1, 32, IN).bfloat16()).float().square().sum().backward()
    assert own.weight.grad.dtype == own.bias.grad.dtype == torch.bfloat16


def test_only_trained_layers_of_even_sizes_multiply_so():
    layers = [
        nn.Linear(IN, OUT),
        nn.Linear(IN, OUT).requires_grad_(False),
        nn.Linear(IN, OUT + 8),
        nn.Conv2d(16, 16, 1),
    ]
    before = [m.state_dict() for m in layers]
    assert float8.enable(layers, "rowwise") == 1
    assert [isinstance(m, Float8Linear) for m in layers] == [True, False, False, False]
    assert [*layers[0].state_dict()] == [*before[0]]
    assert layers[0].weight.dtype == torch.float32


def test_results_are_those_of_torchaos_layers():
    """Of the recipes that it calls tensorwise and rowwise, without the scales of powers of two of the latter; sums are
    in another order there, and results of bf16."""
    torchao = pytest.importorskip("torchao.float8")
    for scaling in BOUND:
        own = layer(scaling, torch.bfloat16)
        theirs = nn.Sequential(nn.Linear(IN, OUT, dtype=torch.bfloat16))
        theirs[0].load_state_dict(own.state_dict())
        config = torchao.Float8LinearConfig.from_recipe_name(scaling)
        config = replace(config, round_scales_to_power_of_2=False)
        torchao.convert_to_float8_training(theirs, config=config)
        results = []
        for net in (own, theirs):
            x = numbers(6, 32, IN).bfloat16().requires_grad_(True)
            y = net(x)
            y.backward(numbers(7, 32, OUT).bfloat16())
            results.append((y, x.grad, next(net.parameters()).grad))
        for ours, other in zip(*results, strict=True):
            assert (ours - other).float().norm() <= 6e-3 * other.float().norm()


def test_a_gpu_without_float8_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    settings = SimpleNamespace(base_precision="no", float8="rowwise")
    with pytest.raises(UserError, match=r"training.float8=rowwise: products of float8 need .* 8.9 on, .* this is A100"):
        device.prepare(settings, torch.device("cuda", 0))
