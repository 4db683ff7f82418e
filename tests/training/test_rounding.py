"""Weights of 16 bits: rounding without bias, updates of any size, and the same numbers whatever happened before."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from quick_cases import chosen
from torch import nn

from daguerre import plugins
from daguerre.training import step
from daguerre.training.ema import EMA
from daguerre.training.precision import stochastic_rounding
from daguerre.training.precision.dtypes import Precision
from daguerre.training.precision.loss_scaling import DynamicScale
from daguerre.training.precision.stochastic_rounding import Place, Rounding, random_bits
from daguerre.training.settings import EMASettings
from daguerre.training.state import TrainState, evaluating

CPU = torch.device("cpu")
NAMES = [name for name in plugins.names("optimizers") if name != "adamw_8bit"]
NARROW = [torch.bfloat16, torch.float16]
RATES = {"prodigy": 1.0, "lion": 0.003}
BY_CHANCE = Rounding(stochastic=True, seed=1)


def units(dtype):
    """Numbers of many sizes with the two of `dtype` around each, as float32."""
    torch.manual_seed(0)
    sizes = torch.logspace(-7 if dtype == torch.float16 else -30, 4, 200)
    wide = torch.cat([sizes, -sizes]) * (1 + torch.rand(400))
    lower = wide.to(dtype)
    lower = torch.where(lower.float().abs() > wide.abs(), torch.nextafter(lower, torch.zeros_like(lower)), lower)
    upper = torch.nextafter(lower, torch.sign(wide).to(dtype) * torch.inf)
    return wide, lower.float(), upper.float()


@pytest.mark.parametrize("dtype", chosen(NARROW, lambda dtype: dtype is torch.bfloat16))
def test_a_number_becomes_one_of_its_neighbours_with_the_odds_of_how_near_it_is(dtype):
    wide, lower, upper = units(dtype)
    draws = 4000
    found = torch.stack([BY_CHANCE.narrowed(wide, dtype, Place(number, 0)).float() for number in range(draws)])
    assert ((found == lower) | (found == upper)).all()
    share = ((wide - lower) / (upper - lower)).double()
    error = (found == upper).double().mean(0) - share
    spread = (share * (1 - share) / draws).sqrt()
    assert (error.abs() <= 5 * spread + 1e-9).all()
    assert abs(float((error / spread.clamp(min=1e-9)).mean())) < 4 / len(wide) ** 0.5, "no bias over all sizes"


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("stochastic", [True, False])
def test_numbers_that_fit_stay_what_they_are(dtype, stochastic):
    torch.manual_seed(0)
    kept = torch.cat([torch.randn(3000), torch.logspace(-8, 4, 300), torch.zeros(3)]).to(dtype)
    rounded = Rounding(stochastic).narrowed(kept.float(), dtype, Place(5, 7))
    assert torch.equal(rounded.view(torch.int16), kept.view(torch.int16))


def test_bits_are_those_of_the_published_hash_on_numbers_without_sign():
    key = 0x123456789ABCDEF0
    x = np.arange(1000, dtype=np.uint32) + np.uint32(key & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x ^= np.uint32(key >> 32)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    assert (random_bits(1000, key, CPU).numpy().view(np.uint32) == x).all()


def test_bits_are_even_and_independent_of_the_last_update():
    keys = [int(k) for k in np.random.default_rng(0).integers(0, 2**63, 2)]
    first, second = (random_bits(2**18, key, CPU).numpy().view(np.uint32) for key in keys)
    for bit in range(32):
        ones, others = (first >> bit) & 1, (second >> bit) & 1
        for share in (ones.mean(), others.mean(), (ones ^ others).mean(), (ones[1:] ^ ones[:-1]).mean()):
            assert share == pytest.approx(0.5, abs=5 * 0.5 / 2**9)


def make(toy, name="adamw", seed=0, dtype=torch.bfloat16, stochastic=True, **optimizer):
    torch.manual_seed(seed)
    chosen = plugins.find("optimizers", name).Settings
    ema = EMASettings(enabled=False) if chosen.averages_weights else EMASettings(decay=0.9)
    given = {"learning_rate": RATES.get(name, 0.01), **optimizer}
    precision = Precision(weights=dtype, stochastic=stochastic)
    return TrainState.start(toy.Net(), toy.NothingLearnt(), chosen(**given), ema, precision, 3)


def update(toy, state, batch, rate=0.01):
    settings = {"learning_rate": rate, "max_grad_norm": 0.05, "autocast": nullcontext}
    return step.update(state, [batch], toy.loss_fn, **settings)


def snapshot(state):
    return {f"{file}/{key}": t.clone() for file, tensors in state.tensors().items() for key, t in tensors.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", chosen(NAMES, lambda name: name in ("adamw", "prodigy")))
def test_every_optimizer_moves_them_with_moments_of_float32(toy, name):
    state = make(toy, name)
    losses = []
    for number in range(100):
        update(toy, state, toy.batch(number % 5), RATES.get(name, 0.01))
        losses.append(state.meter.read()["learning/loss"])
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert all(p.dtype == torch.bfloat16 for p in state.net.parameters())
    assert all(p.grad is None for p in state.net.parameters())
    tensors = state.tensors()
    assert {t.dtype for t in tensors["optimizer"].values() if t.is_floating_point() and t.ndim} == {torch.float32}
    assert {t.dtype for t in tensors["ema"].values()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_one_update_is_that_of_float32_to_half_a_unit(toy, name):
    narrow, wide = make(toy, name, stochastic=False), toy.state(0, name, learning_rate=RATES.get(name, 0.01))
    with torch.no_grad():
        for p, q in zip(narrow.net.parameters(), wide.net.parameters(), strict=True):
            q.copy_(p)
    wide.parameters[0].grad = None
    gradients = [torch.randn(p.shape) for p in wide.parameters]
    for state in (narrow, wide):
        for p, gradient in zip(state.parameters, gradients, strict=True):
            p.grad = gradient.to(torch.bfloat16).to(p.dtype)
        state.optimizer.step(0.01, torch.tensor(False), torch.tensor(0.5))
    for p, q in zip(narrow.net.parameters(), wide.net.parameters(), strict=True):
        assert torch.equal(p, q.to(torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop_at", [1, 4])
def test_stopped_and_restored_it_goes_on_equal_to_the_bit(toy, name, stop_at):
    whole, first, second = make(toy, name), make(toy, name), make(toy, name, seed=1)
    for number in range(7):
        update(toy, whole, toy.batch(number, poison=number == 2))
    for number in range(stop_at):
        update(toy, first, toy.batch(number, poison=number == 2))
    tensors = {f: {k: t.clone() for k, t in entries.items()} for f, entries in first.tensors().items()}
    second.load(tensors, first.document())
    for number in range(stop_at, 7):
        update(toy, second, toy.batch(number, poison=number == 2))
    expected, found = snapshot(whole), snapshot(second)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == found[key].dtype
        assert torch.equal(tensor, found[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_an_update_that_is_not_finite_moves_nothing(toy, name):
    state = make(toy, name)
    update(toy, state, toy.batch(0))
    before = snapshot(state)
    update(toy, state, toy.batch(1, poison=True))
    after = snapshot(state)
    for key in before:
        if key.startswith(("model/", "optimizer/")) and not key.endswith(("step", ".number")):
            assert torch.equal(before[key], after[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_updates_far_below_a_unit_count_on_average_and_are_lost_to_the_nearest(toy, name):
    """2^14 weights of 1, whose neighbour below is 1 - 2^-8, are moved by a few 1e-5 in each of ten updates."""

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(128, 128))

    def moved(stochastic, dtype):
        chosen = plugins.find("optimizers", name).Settings(weight_decay=0.0)
        ema = EMASettings(enabled=False)
        state = TrainState.start(
            Many(), toy.NothingLearnt(), chosen, ema, Precision(weights=dtype, stochastic=stochastic)
        )
        for number in range(10):
            generator = torch.Generator().manual_seed(number)
            gradient = torch.eye(128)[torch.randperm(128, generator=generator)] * 100 + 1
            state.net.weight.grad = gradient.to(dtype)
            rate = {"prodigy": 0.05, "came": 2e-6}.get(name, 2e-5)
            state.optimizer.step(rate, torch.tensor(False), None, number)
        return float((state.net.weight.detach().float() - 1).double().mean())

    exact = moved(True, torch.float32)
    assert 0 < abs(exact) < 2.0**-10
    assert moved(False, torch.bfloat16) == 0
    # Each weight is 1 or a neighbour: the spread of their mean is at most (2^-8 / 2) / 128.
    assert moved(True, torch.bfloat16) == pytest.approx(exact, abs=4 * 2.0**-9 / 128)


def test_seed_and_update_decide_how_it_is_rounded():
    wide = torch.linspace(1, 1.001, 500)
    rounded = [Rounding(True, seed).narrowed(wide, torch.bfloat16, Place(number, piece)) for seed, number, piece in
               [(0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]  # fmt: skip
    assert torch.equal(rounded[0], rounded[1])
    assert not any(torch.equal(rounded[0], other) for other in rounded[2:])


@pytest.mark.parametrize("name", NAMES)
def test_large_models_are_widened_piece_by_piece(toy, name, monkeypatch):
    """All but Prodigy, whose estimate needs every gradient at once."""
    whole = make(toy, name, stochastic=False)
    monkeypatch.setattr(stochastic_rounding, "PIECE_NUMBERS", 24)
    cut = make(toy, name, stochastic=False)
    assert all(sum(p.numel() for p in g["params"]) <= 24 for part in cut.optimizer.parts
               for g in part.optimizer.param_groups)  # fmt: skip
    for number in range(5):
        for state in (whole, cut):
            update(toy, state, toy.batch(number))
    for p, q in zip(whole.net.parameters(), cut.net.parameters(), strict=True):
        assert torch.equal(p, q)
    for a, b in zip(whole.ema.averages.values(), cut.ema.averages.values(), strict=True):
        assert torch.equal(a, b)


def test_float32_weights_are_never_cut(toy, monkeypatch):
    monkeypatch.setattr(stochastic_rounding, "PIECE_NUMBERS", 4)
    assert [len(piece) for piece in stochastic_rounding.pieces(list(toy.Net().parameters()))] == [4]


def test_an_error_within_an_update_leaves_weights_and_their_memory(toy, monkeypatch):
    state = make(toy)
    before, places = snapshot(state), [p.data_ptr() for p in state.net.parameters()]
    optimizer = state.optimizer.parts[0].optimizer

    def full():
        raise RuntimeError("full")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", full)
        with pytest.raises(RuntimeError, match="full"):
            update(toy, state, toy.batch(0))
    assert len(optimizer.param_groups) == 2
    assert all(torch.equal(before[f"model/{n}"], p) for n, p in state.net.named_parameters())
    update(toy, state, toy.batch(0))
    assert [p.data_ptr() for p in state.net.parameters()] == places


def test_memory_formats_and_odd_sizes_are_kept():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 1, 1)).bfloat16().to(memory_format=torch.channels_last)
    strides = [p.stride() for p in net.parameters()]
    with stochastic_rounding.widened(list(net.parameters()), None, BY_CHANCE, Place(0, 0)):
        assert all(p.dtype == torch.float32 for p in net.parameters())
        for p in net.parameters():
            p.data += 1
    expected = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 1, 1))
    torch.manual_seed(0)
    for m in expected:
        m.reset_parameters()
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q.bfloat16().float() + 1, rtol=2**-7, atol=0)
    assert [p.stride() for p in net.parameters()] == strides


def test_averages_of_float32_follow_weights_of_16_bits(toy):
    state = make(toy)
    update(toy, state, toy.batch(0))
    for name, p in state.net.named_parameters():
        assert torch.equal(state.ema.averages[name], p.float())  # diffusers' form copies at first
    expected = {n: a.lerp(state.ema.parameters[n].float(), 0.25) for n, a in state.ema.averages.items()}
    EMA._move(state.ema, state.ema.averages, 0.25)
    assert all(torch.equal(expected[n], a) for n, a in state.ema.averages.items())
    with evaluating(state):
        assert all(p.dtype == torch.float32 for p in state.net.parameters())
    assert all(p.dtype == torch.bfloat16 for p in state.net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_an_update_never_asks_the_device(toy, monkeypatch, name, dtype):
    """With a scaler and rounding: nothing of an update is read by the host."""
    state = make(toy, name, dtype=dtype)
    state.scaler = DynamicScale(CPU)
    update(toy, state, toy.batch(0))
    batch = toy.batch(1)

    def asked(self, *args):
        raise AssertionError("the host waits for the device")

    valid = batch.valid_B.sum()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__int__", lambda self: 4 if torch.equal(self, valid) else asked(self))
        for method in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, method, asked)
        update(toy, state, batch)
    assert all(torch.isfinite(p).all() for p in state.net.parameters())


def test_what_stays_float32_among_weights_of_16_bits_is_not_rounded():
    exact, few = (torch.nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    for p in (few, exact):
        p.grad = torch.ones_like(p)
    with stochastic_rounding.widened([few, exact], torch.tensor(0.5), Rounding(True), Place(3, 0)):
        for p in (few, exact):
            assert p.grad is not None
            p.data.add_(p.grad, alpha=1e-5)
    assert torch.equal(exact, torch.ones(5) + 5e-6)
    assert few.dtype == torch.bfloat16
    assert ((few == 1) | (few == 1 + 2.0**-7)).all()
    with stochastic_rounding.widened([exact], None, Rounding(True), Place(4, 0)):
        exact.data.add_(1e-5)
    assert torch.equal(exact, torch.ones(5) + 5e-6 + 1e-5)
