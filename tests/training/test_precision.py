"""Compute types, loss scale, attention kernels, the whole process' settings: what they do and what is refused."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from quick_cases import chosen
from torch.nn.functional import scaled_dot_product_attention

from daguerre import plugins
from daguerre.errors import UserError
from daguerre.training import device, step
from daguerre.training.guard import READ_EVERY, NonFiniteError
from daguerre.training.loop import train
from daguerre.training.precision import dtypes
from daguerre.training.precision.dtypes import Precision
from daguerre.training.precision.loss_scaling import DynamicScale
from daguerre.training.settings import EMASettings, TrainingSettings, bytes_of
from daguerre.types import LossTerms

CPU = torch.device("cpu")


def settings(**given):
    return TrainingSettings(duration="1 step", **given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "fp32"),
        ({"mixed_precision": "no"}, "fp32"),
        ({"mixed_precision": "bf16"}, "bf16"),
        ({"mixed_precision": "fp16"}, "fp16"),
        ({"weights_dtype": "bfloat16"}, "bf16 with weights of bf16"),
        ({"weights_dtype": "float16"}, "fp16 with weights of fp16"),
        ({"attention": "flash"}, "fp32, attention: flash"),
        ({"attention": "fused", "mixed_precision": "bf16"}, "bf16, attention: flash"),
    ],
)
def test_what_is_chosen_on_a_cpu(given, text):
    chosen = dtypes.choose(settings(**given), CPU)
    assert str(chosen) == text
    with chosen.forward():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == chosen.compute
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_a_cpu_computes_16_bits_in_float32(masked):
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (16, 5, 5))
    mask = torch.zeros(2, 1, 16, 5, dtype=torch.bfloat16).masked_fill(torch.rand(2, 1, 16, 5) < 0.3, -1e4)
    given = {"attn_mask": mask} if masked else {}
    with dtypes.choose(settings(mixed_precision="bf16"), CPU).forward():
        found = scaled_dot_product_attention(q, k, v, scale=0.3, **given)
    wide = {name: tensor.float() for name, tensor in given.items()}
    exact = scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.3, **wide)
    assert found.dtype == torch.bfloat16
    assert found.equal(exact.bfloat16())
    dy = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(y, (q, k, v), dy.to(y.dtype)) for y in (found, exact)), strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize(
    ("weights_dtype", "mixed_precision"),
    [("bfloat16", "no"), ("bfloat16", "fp16"), ("float16", "no"), ("float16", "bf16")],
)
def test_weights_of_16_bits_are_computed_with_as_they_are(weights_dtype, mixed_precision):
    with pytest.raises(ValidationError, match=f"does not work with weights_dtype={weights_dtype}"):
        settings(weights_dtype=weights_dtype, mixed_precision=mixed_precision)


def test_weights_of_float16_are_warned_about():
    assert "bfloat16 needs the same memory" in dtypes.choose(settings(weights_dtype="float16"), CPU).notices()[0]
    assert not dtypes.choose(settings(weights_dtype="bfloat16"), CPU).notices()


@pytest.mark.parametrize(("text", "size"), [("59GB", 59 * 10**9), ("40 GiB", 40 * 2**30), ("512MB", 512 * 10**6)])
def test_sizes_are_read(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["59", "GB", "5.9.1GB", "59 gigabytes", "0GB", "-1GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValidationError, match="is not a size: write a number and one of MB"):
        settings(max_device_memory=text)


def test_a_cap_of_memory_is_refused_on_a_cpu():
    with pytest.raises(UserError, match="max_device_memory=59GB has no effect on a CPU"):
        device.prepare(settings(max_device_memory="59GB"), CPU)


def test_matmul_precision_is_set_for_the_process():
    try:
        device.prepare(settings(matmul_precision="medium"), CPU)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        device.prepare(settings(), CPU)
    assert torch.get_float32_matmul_precision() == "highest"


# Attention


def attention(dim=8):
    q = torch.randn(1, 2, 6, dim, requires_grad=True)
    return scaled_dot_product_attention(q, q, q).grad_fn.name()


@pytest.mark.parametrize(("name", "kernel"), [("flash", "Flash"), ("fused", "Flash"), ("math", "UnsafeView")])
def test_the_chosen_kernel_computes_and_frozen_networks_are_free(name, kernel):
    chosen = dtypes.choose(settings(attention=name), CPU)
    with chosen.forward():
        assert kernel in attention()
        with chosen.frozen():
            assert "Flash" in attention()
        assert kernel in attention()
    with chosen.attention():
        assert kernel in attention()
    assert "Flash" in attention()


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_a_kernel_that_the_device_has_not_is_refused(name):
    with pytest.raises(UserError, match=rf"training.attention={name}: .* for fp32 on a CPU; there are flash, math"):
        dtypes.choose(settings(attention=name), CPU)


def test_a_kernel_that_cannot_compute_a_model_is_a_users_error():
    refused = pytest.raises(UserError, match=r"training.attention: cudnn cannot compute .* auto lets torch choose")
    with refused, Precision(kernels=("cudnn",)).forward():
        attention()
    with pytest.raises(RuntimeError, match="another one"), Precision(kernels=("flash",)).forward():
        raise RuntimeError("another one")


@pytest.mark.parametrize(
    ("capability", "compute", "kernels"),
    [
        ((9, 0), torch.bfloat16, ("cudnn", "flash", "efficient")),
        ((8, 0), torch.float16, ("flash", "efficient", "cudnn")),
        ((7, 5), torch.float16, ("efficient",)),
        ((9, 0), torch.float32, ("efficient",)),
    ],
)
def test_kernels_of_gpus_by_generation_and_type(monkeypatch, capability, compute, kernels):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dtypes.available_kernels(compute, torch.device("cuda")) == (*kernels, "math")


# The scale of the loss


def fp16(toy, **changes):
    """A toy state with a scaler, though its net computes in float32."""
    state = toy.state(**changes)
    state.scaler = DynamicScale(CPU)
    return state


def update(state, batch, loss_fn):
    arguments = {"learning_rate": 0.01, "max_grad_norm": 0.05, "autocast": nullcontext}
    return bool(step.update(state, [batch], loss_fn, **arguments))


def overflowing(toy, limit):
    """A loss whose gradient overflows once it is scaled by more than `limit`."""

    class Limited(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return torch.where(gradient.abs() > limit / 4, torch.inf, gradient)

    def loss_fn(net, batch):
        terms = toy.loss_fn(net, batch)
        return LossTerms(Limited.apply(terms.loss_B), terms.quantile_B)

    return loss_fn


def weights(state):
    return [p.detach().clone() for p in state.net.parameters()]


def test_a_scale_that_is_a_power_of_two_changes_no_bit(toy):
    plain, scaled = toy.state(), fp16(toy)
    for number in range(6):
        assert update(plain, toy.batch(number), toy.loss_fn)
        assert update(scaled, toy.batch(number), toy.loss_fn)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(scaled), strict=True))
    assert plain.meter.read() == scaled.meter.read()


def test_an_overflow_halves_the_scale_moves_nothing_and_is_no_fault(toy):
    state, loss_fn = fp16(toy), overflowing(toy, 2.0**14)
    before = weights(state)
    for _ in range(2):
        assert update(state, toy.batch(0), loss_fn)
        assert all(torch.equal(a, b) for a, b in zip(before, weights(state), strict=True))
    assert state.scaler.read() == {"learning/loss_scale": 2.0**14, "learning/loss_scale_overflows": 2}
    assert update(state, toy.batch(0), loss_fn)
    assert not torch.equal(before[0], weights(state)[0])
    assert state.scaler.read()["learning/loss_scale"] == 2.0**14


def test_the_scale_doubles_after_a_quiet_stretch_up_to_its_limit():
    scaler, one = DynamicScale(CPU), torch.ones(())
    for _ in range(1999):
        scaler.moved(one, one)
    assert scaler.scale == 2.0**16
    scaler.moved(one, one)
    assert scaler.scale == 2.0**17
    for _ in range(9):
        scaler._quiet.fill_(1999)
        scaler.moved(one, one)
    assert scaler.scale == 2.0**24


def test_a_loss_that_is_not_finite_is_a_fault_and_leaves_the_scale(toy):
    state = fp16(toy)
    assert not update(state, toy.batch(0, poison=True), toy.loss_fn)
    assert state.scaler.scale == 2.0**16


@pytest.mark.parametrize(("log_every", "stopped"), [(1, 16 + 3), (10**10, READ_EVERY)])
def test_a_gradient_that_no_scale_makes_finite_is_told_as_a_fault_at_last(toy, log_every, stopped):
    state, plan = fp16(toy), toy.plan(total_steps=100, log_every=log_every)
    with pytest.raises(NonFiniteError):
        list(train(state, toy.batches(), overflowing(toy, 0.0), plan, nullcontext))
    assert state.step == stopped


def test_the_scale_goes_on_where_it_was(toy):
    loss_fn = overflowing(toy, 2.0**13)
    whole, first, second = fp16(toy), fp16(toy), fp16(toy, seed=1)
    for number in range(8):
        update(whole, toy.batch(number), loss_fn)
    for number in range(2):
        update(first, toy.batch(number), loss_fn)
    second.load(first.tensors(), first.document())
    for number in range(2, 8):
        update(second, toy.batch(number), loss_fn)
    for name, tensor in whole.tensors()["scaler"].items():
        assert torch.equal(tensor, second.tensors()["scaler"][name])
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))


def test_the_scale_is_logged(toy):
    values = [u.values for u in train(fp16(toy), toy.batches(), toy.loss_fn, toy.plan(total_steps=4), nullcontext)]
    assert values[-1]["learning/loss_scale"] == 2.0**16
    assert values[-1]["learning/loss_scale_overflows"] == 0


def convolutions(net, batch):
    """A loss of a net with the layers of a UNet."""
    x_BCHW = (batch.pixels_BCHW.float() / 255).expand(-1, 3, 4, 4)
    loss_B = (net(x_BCHW).float() - x_BCHW.flip(1)).square().flatten(1).mean(1)
    return LossTerms(loss_B, torch.linspace(0, 0.99, len(loss_B)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("weights_dtype", "mixed_precision"),
    chosen(
        [("float32", "bf16"), ("float32", "fp16"), ("bfloat16", "auto"), ("float16", "auto")],
        lambda weights, mixed: (weights, mixed) in (("float32", "bf16"), ("float16", "auto")),
    ),
)
def test_training_in_16_bits_learns_what_float32_learns(toy, weights_dtype, mixed_precision):
    def losses(chosen):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Conv2d(8, 3, 1)
        )
        optimizer = plugins.find("optimizers", "adamw").Settings(learning_rate=0.01)
        state = toy.TrainState.start(net, toy.NothingLearnt(), optimizer, EMASettings(), chosen)
        plan = toy.plan(total_steps=60, log_every=30, warmup_steps=0)
        lines = train(state, toy.batches(), convolutions, plan, chosen.forward)
        return [u.values["learning/loss"] for u in lines if u.values]

    whole = losses(Precision())
    found = losses(dtypes.choose(settings(weights_dtype=weights_dtype, mixed_precision=mixed_precision), CPU))
    assert found == pytest.approx(whole, rel=0.05)
    assert found[1] < 0.5 * found[0]


# A GPU, as torch would describe it


@pytest.fixture
def h200(monkeypatch):
    """What torch says of one; the fraction that is set comes out in the list."""
    fractions = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=150 * 10**9))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def set_fraction(share, device):
        fractions.append((share, torch._utils._get_device_index(device)))  # which torch asks as well

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    return fractions


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "bf16"),
        ({"mixed_precision": "no", "attention": "fused"}, "fp32, attention: efficient"),
        ({"attention": "fused"}, "bf16, attention: cudnn, else flash, else efficient"),
        ({"weights_dtype": "float16", "attention": "flash"}, "fp16 with weights of fp16, attention: flash"),
    ],
)
def test_what_is_chosen_on_a_gpu(h200, given, text):
    assert str(dtypes.choose(settings(**given), torch.device("cuda"))) == text


def test_flash_attention_in_float32_is_refused_on_a_gpu(h200):
    with pytest.raises(UserError, match="no such kernel for fp32 on H200; there are efficient"):
        dtypes.choose(settings(attention="flash", mixed_precision="no"), torch.device("cuda"))


def test_a_gpu_without_bf16_is_told_what_it_can(h200, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UserError, match="this GPU has no bf16; use"):
        dtypes.choose(settings(), torch.device("cuda"))
    assert str(dtypes.choose(settings(mixed_precision="fp16"), torch.device("cuda"))) == "fp16"


def test_memory_of_a_gpu_is_capped(h200):
    device.prepare(settings(max_device_memory="60GB"), torch.device("cuda"))
    assert h200 == [(0.4, 3)]
    device.prepare(settings(), torch.device("cuda"))
    assert h200[1:] == [(1.0, 3)], "what another variant of a bench had set does not stay"
    with pytest.raises(UserError, match=r"max_device_memory=200GB: H200 has 150.0 GB"):
        device.prepare(settings(max_device_memory="200GB"), torch.device("cuda"))
