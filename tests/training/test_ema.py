"""Averages: the three forms, post-hoc profiles against their closed form, what checkpoints hold of them."""

import math

import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from pydantic import ValidationError

from daguerre.config import config as configs
from daguerre.config import overrides
from daguerre.training import post_hoc
from daguerre.training.ema import EMA, decay_at, profile_file
from daguerre.training.settings import EMASettings
from daguerre.training.state import adopt


def move(net, step):
    """Weights that wander, a function of the step."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) * 0.1)


@pytest.mark.parametrize("decay", [0.5, 0.9999])
def test_the_default_equals_diffusers(toy, decay):
    net = toy.Net()
    theirs = EMAModel(net.parameters(), decay=decay)
    ours = EMA.of(EMASettings(decay=decay), dict(net.named_parameters()))
    for step in range(1, 40):
        move(net, step)
        theirs.step(net.parameters())
        ours.update(step)
    for a, b in zip(ours.averages.values(), theirs.shadow_params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_decays_in_closed_form():
    settings = EMASettings()
    assert [decay_at(settings, n) for n in (1, 2, 11)] == [0.0, 2 / 11, 11 / 20]
    assert decay_at(settings, 10**6) == 0.9999
    mindone = EMASettings(name="mindone")
    assert decay_at(mindone, 1000) == pytest.approx(0.39343, abs=5e-6)
    assert decay_at(mindone, 1000) == 0.9999 * -math.expm1(-0.5)
    assert decay_at(mindone, 10**6) == pytest.approx(0.9999)
    assert decay_at(EMASettings(name="mindone", decay=0.5, ramp_steps=10), 10) == pytest.approx(0.5 * (1 - math.e**-1))


def test_stable_cascades_form_moves_every_so_manieth_update_and_copies_before_its_start(toy):
    """Its trainer: where i % ema_iters == 0, lerp with beta = ema_beta if i > ema_start_iters else 0."""
    net = toy.Net()
    ours = EMA.of(
        EMASettings(name="stable_cascade", every_steps=3, start_steps=7, decay=0.9), dict(net.named_parameters())
    )
    theirs = {n: p.detach().clone() for n, p in net.named_parameters()}
    for i in range(1, 20):
        move(net, i)
        ours.update(i)
        if i % 3 == 0:
            beta = 0.9 if i > 7 else 0.0
            theirs = {n: beta * theirs[n] + (1 - beta) * p.detach() for n, p in net.named_parameters()}
        for name, average in ours.averages.items():
            torch.testing.assert_close(average, theirs[name], rtol=1e-5, atol=1e-6)


def test_stable_cascades_settings_as_its_readers_write_them():
    given = ["--ema_start_iters", "5000", "--ema_iters", "100", "--ema_beta", "0.9"]
    loaded = configs.load("quickstart", overrides.split(given).overrides)
    dumped = loaded.config.ema.model_dump(exclude={"enabled", "post_hoc", "path"})
    assert dumped == {"name": "stable_cascade", "decay": 0.9, "every_steps": 100, "start_steps": 5000}
    assert loaded.notices == ()


@pytest.mark.parametrize(
    "given", [["ema.name=mindone"], ["ema.enabled=false", "ema.post_hoc=[0.05,0.1]"], ["ema_iters=7"]]
)
def test_a_dumped_config_is_read_back(given, tmp_path):
    config = configs.load("quickstart", given).config
    (tmp_path / "again.yaml").write_text(configs.dump(config))
    assert configs.load(str(tmp_path / "again.yaml")).config == config


@pytest.mark.parametrize(
    ("name", "field"), [("diffusers", "ramp_steps"), ("mindone", "every_steps"), ("mindone", "start_steps")]
)
def test_what_has_no_effect_is_refused(name, field):
    with pytest.raises(ValidationError, match=f"{field}.*: no effect with '{name}'"):
        EMASettings(name=name, **{field: 5})
    for path in ("ema.decay=0.9", "ema.name=mindone"):
        with pytest.raises(configs.ConfigError, match=r"no effect while ema\.enabled is false"):
            configs.load("quickstart", ["ema.enabled=false", path])


# post-hoc


@pytest.mark.parametrize("width", [0.01, 0.05, 0.1, 0.25, post_hoc.LARGEST_WIDTH])
def test_exponents_give_their_width_back(width):
    g = post_hoc.exponent(width)
    assert (g + 1) ** 0.5 / ((g + 2) * (g + 3) ** 0.5) == pytest.approx(width, rel=1e-9)
    x = (np.arange(200_000) + 0.5) / 200_000
    p = (g + 1) * x**g
    mean = (p * x).mean()
    assert math.sqrt((p * (x - mean) ** 2).mean()) == pytest.approx(width, rel=1e-3)


def test_exponents_of_the_paper():
    assert post_hoc.exponent(0.05) == pytest.approx(16.97, abs=0.005)
    assert post_hoc.exponent(0.10) == pytest.approx(6.94, abs=0.005)
    with pytest.raises(ValueError, match=r"up to 0\.2887, got 0\.3"):
        post_hoc.exponent(0.3)


def weights_of(steps, g):
    """What each update's weights count in a power-function average: (i/t)^(g+1) - ((i-1)/t)^(g+1)."""
    edges = (np.arange(steps + 1) / steps) ** (g + 1)
    return np.diff(edges)


@pytest.mark.parametrize("width", [0.05, 0.2])
def test_a_running_profile_is_the_closed_form(width):
    g, steps = post_hoc.exponent(width), 300
    values = np.random.default_rng(0).normal(size=steps)
    average = 123.0
    for step, value in enumerate(values, 1):
        beta = post_hoc.decay_at(step, g)
        average = beta * average + (1 - beta) * value
    assert average == pytest.approx(weights_of(steps, g) @ values, rel=1e-9)


@pytest.mark.parametrize("pair", [((100, 16.97), (100, 6.94)), ((40, 2.0), (100, 6.94)), ((100, 0.0), (30, 5.0))])
def test_inner_products_are_the_integral(pair):
    (t_a, g_a), (t_b, g_b) = pair
    n = 400_000
    x = (np.arange(n) + 0.5) / n * min(t_a, t_b)
    product = (g_a + 1) * (x / t_a) ** g_a / t_a * (g_b + 1) * (x / t_b) ** g_b / t_b
    assert post_hoc.inner_product(t_a, g_a, t_b, g_b) == pytest.approx(product.sum() * min(t_a, t_b) / n, rel=1e-6)


@pytest.mark.parametrize("width", [0.05, 0.1])
def test_a_width_that_was_kept_is_rebuilt_as_itself(width):
    kept = [(step, w) for step in (250, 500, 750, 1000) for w in (0.05, 0.1)]
    factors, error = post_hoc.coefficients(kept, 1000, width)
    assert error < 1e-5
    assert factors == pytest.approx([1.0 if pair == (1000, width) else 0.0 for pair in kept], abs=1e-4)


@pytest.mark.parametrize("width", [0.03, 0.07, 0.15, 0.2])
def test_other_widths_are_rebuilt_near_their_own_average(toy, width):
    """The run's weights wander; the average that was never kept is computed beside it."""
    net, steps = toy.Net(), 400
    ema, history, saved = EMA.of(EMASettings(post_hoc=[0.05, 0.1]), dict(net.named_parameters())), [], {}
    for step in range(1, steps + 1):
        move(net, step)
        ema.update(step)
        history.append(net.inner.weight.detach().double().clone())
        if step % 20 == 0:
            for kept, profile in ema.profiles.items():
                saved[step, kept] = {name: average.clone() for name, average in profile.items()}
    expected = sum(w * h for w, h in zip(weights_of(steps, post_hoc.exponent(width)), history, strict=True))
    found = post_hoc.rebuild(list(saved), lambda *key: saved[key], width)
    assert found.tensors.keys() == dict(net.named_parameters()).keys()
    distance = (found.tensors["inner.weight"] - expected).norm() / (history[-1] - expected).norm()
    assert distance < 0.05
    alone = post_hoc.rebuild(list(saved)[-2:], lambda *key: saved[key], width)
    assert alone.error > found.error, "two profiles of one moment know less than those of twenty"


def kept_evenly(count, steps=2000):
    """Checkpoints over a whole run, each with the profiles of two widths."""
    return [(steps * (i + 1) // count, width) for i in range(count) for width in (0.05, 0.1)]


def error_of(kept, width, walk):
    """Of the rebuilt average of weights that walked so, against the power-function average itself; as a share of its
    norm, and of its distance from the last weights."""
    averages = [weights_of(step, post_hoc.exponent(w)) @ walk[:step] for step, w in kept]
    factors, _ = post_hoc.coefficients(kept, len(walk), width)
    expected = weights_of(len(walk), post_hoc.exponent(width)) @ walk
    distance = np.linalg.norm(np.array(factors) @ np.array(averages) - expected)
    return distance / np.linalg.norm(expected), distance / np.linalg.norm(walk[-1] - expected)


def walks(steps=2000, size=50):
    """Weights with a mean: around a constant, away from it, and from zero to it."""
    rng = np.random.default_rng(0)
    constant, noise = rng.normal(size=size), rng.normal(size=(steps, size))
    around = constant + 0.15 * noise.cumsum(0) / np.arange(1, steps + 1)[:, None] ** 0.5
    away = constant + 0.1 * noise.cumsum(0) / steps**0.5
    towards = constant * (1 - np.exp(-np.arange(steps) * 5 / steps))[:, None] + 0.02 * noise
    return {"around": around, "away": away, "towards": towards}


@pytest.mark.parametrize(("count", "width"), [(20, 0.25), (5, 0.15), (20, 0.01), (2, 0.28), (1, 0.2), (100, 0.15)])
def test_a_rebuilt_average_of_what_stands_still_is_that(count, width):
    factors, _ = post_hoc.coefficients(kept_evenly(count), 2000, width)
    assert sum(factors) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("count", "width"), [(20, 0.25), (5, 0.15), (20, 0.15), (10, 0.03)])
@pytest.mark.parametrize("walk", ["around", "away"])
def test_weights_with_a_mean_keep_it(count, width, walk):
    assert error_of(kept_evenly(count), width, walks()[walk])[0] < 5e-3


@pytest.mark.parametrize(
    ("kept", "width"),
    [
        *[(kept_evenly(count), width) for count, width in [(20, 0.28), (20, 0.25), (5, 0.2), (2, 0.15), (20, 0.01)]],
        (kept_evenly(20)[-10:], 0.15),
        (kept_evenly(20)[-20:], 0.2),
        *[(kept_evenly(count), width) for count, width in [(20, 0.15), (20, 0.03), (10, 0.15), (5, 0.1)]],
    ],
)
def test_the_error_is_large_where_the_average_is_poor(kept, width):
    """A twentieth of the way between the average and the last weights counts as poor."""
    _, error = post_hoc.coefficients(kept, 2000, width)
    worst = max(error_of(kept, width, walk)[1] for walk in walks().values())
    assert (error > post_hoc.POOR) == (worst > 0.05), (error, worst)


def test_profiles_are_part_of_the_state_and_restart_with_other_weights(toy):
    settings = EMASettings(decay=0.9, post_hoc=[0.05, 0.1])
    first, second = (toy.state(seed, ema=settings) for seed in range(2))
    for step in range(1, 8):
        move(first.net, step)
        first.ema.update(step)
    tensors = first.tensors()
    assert {"model", "ema", "post_hoc_0_05", "post_hoc_0_1"} <= tensors.keys()
    second.load(tensors, first.document())
    for file, entries in tensors.items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, second.tensors()[file][key])
    net = toy.Net()
    adopt(net, tensors)
    fresh = toy.state(ema=settings, net=net)
    for name, p in fresh.net.named_parameters():
        assert all(torch.equal(entries[name], p) for entries in fresh.ema.tensors().values())
        assert torch.equal(p, tensors["ema"][name])


def test_profiles_that_mean_nothing_are_refused():
    assert profile_file(0.05) == "post_hoc_0_05"
    with pytest.raises(ValidationError, match=r"widths are from 0.01 to 0.28"):
        EMASettings(post_hoc=[0.5])
    with pytest.raises(configs.ConfigError, match=r"ema\.post_hoc"):
        configs.load("quickstart", ["optimizer.name=schedule_free", "ema.enabled=false", "ema.post_hoc=[0.1]"])


def test_averages_that_do_not_fit_are_refused_by_name(toy):
    state = toy.state()
    files = {"ema": {"other": torch.zeros(1)}}
    with pytest.raises(ValueError, match=r"the saved averages do not match.*inner\.bias"):
        state.ema.load(files)
