"""Losses other than the squared error, against sd-scripts' formulas at the levels of its scheduler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from pydantic import ValidationError

from daguerre import plugins
from daguerre.objectives.objective import Example, Nets
from daguerre.types import IMAGE

KEYS = np.array([[i, 0, 0] for i in range(64)], dtype=np.int64)
SHAPE = (4, 8, 8)


def objective(objective="eps", **loss):
    module = plugins.find("objectives", objective)
    return module.build(module.Settings(name=objective, loss=loss))


def computed(own, net):
    """The loss and the draws of 64 clean samples."""
    draws = own.draws(0, KEYS, SHAPE)
    clean = torch.randn(len(KEYS), *SHAPE, generator=torch.Generator().manual_seed(1))
    return own.loss(Nets(net), Example({IMAGE: clean}, {IMAGE: {}}, draws)).loss_B, draws


def theirs(error, kind, schedule, c, scale, timesteps):
    """sd-scripts' `get_huber_threshold_if_needed` and `conditional_loss`."""
    if kind == "l1":
        return error.abs().flatten(1).mean(1)
    scheduler = DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear")
    if schedule == "exponential":
        threshold = torch.exp(math.log(c) / 1000 * timesteps) * scale
    elif schedule == "snr":
        alphas = scheduler.alphas_cumprod[timesteps.long()]
        threshold = (1 - c) / (1 + ((1 - alphas) / alphas).sqrt()) ** 2 + c
    else:
        threshold = torch.full_like(timesteps, c * scale)
    threshold = threshold.reshape(-1, 1, 1, 1)
    value = 2 * (torch.sqrt(error**2 + threshold**2) - threshold)
    return (value * threshold if kind == "huber" else value).flatten(1).mean(1)


@pytest.mark.parametrize("kind", ["l1", "huber", "smooth_l1"])
@pytest.mark.parametrize(
    ("schedule", "c", "scale"), [("snr", 0.1, 1.0), ("exponential", 0.2, 1.5), ("constant", 0.3, 2)]
)
def test_a_loss_is_that_of_sd_scripts(kind, schedule, c, scale):
    given = {} if kind == "l1" else {"huber_c": c, "huber_schedule": schedule}
    given |= {"huber_scale": scale} if given and schedule != "snr" else {}
    loss, draws = computed(objective(name=kind, **given), lambda x, t, cond: 0.5 * x)
    clean = torch.randn(len(KEYS), *SHAPE, generator=torch.Generator().manual_seed(1))
    a, s = (each.reshape(-1, 1, 1, 1) for each in (draws.a, draws.s))
    error = 0.5 * (a * clean + s * draws.noise) - draws.noise
    torch.testing.assert_close(loss, theirs(error, kind, schedule, c, scale, draws.c_noise), rtol=2e-5, atol=1e-7)


def test_near_its_target_huber_is_the_square_and_far_from_it_smooth_l1_is_twice_the_size():
    loss, _ = computed(objective(name="huber", huber_c=1, huber_schedule="constant"), lambda x, t, cond: x)
    square, _ = computed(objective(), lambda x, t, cond: x)
    assert (loss <= square).all()
    own = objective(name="smooth_l1", huber_c=1e-3, huber_schedule="constant")
    far, _ = computed(own, lambda x, t, cond: 1e4 * torch.ones_like(x))
    torch.testing.assert_close(far, torch.full_like(far, 2e4), rtol=1e-3, atol=0)


def test_flow_and_edm_have_thresholds_at_their_own_levels():
    flow = objective("flow", name="huber", huber_schedule="exponential", huber_c=0.5)
    draws = flow.draws(0, KEYS, SHAPE)
    torch.testing.assert_close(draws.threshold, 0.5**draws.s)
    edm = objective("edm", name="huber").draws(0, KEYS, SHAPE)
    torch.testing.assert_close(edm.threshold, 0.9 / (1 + edm.s / edm.a) ** 2 + 0.1)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("eps", {"loss": {"huber_c": 0.2}}, "no effect with 'l2'"),
        ("eps", {"loss": {"name": "huber", "huber_scale": 2}}, "no effect with huber_schedule=snr"),
        ("edm", {"loss": {"name": "huber", "huber_schedule": "exponential"}}, "edm has no last time"),
        ("dpo", {"diffusion": {"name": "eps", "loss": {"name": "l1"}}}, "dpo has a distance of its own"),
        ("lcm", {"diffusion": {"name": "eps", "loss": {"name": "l1"}}}, "lcm has a distance of its own"),
    ],
)
def test_what_has_no_effect_is_refused(kind, given, message):
    with pytest.raises(ValidationError, match=message):
        plugins.find("objectives", kind).Settings(name=kind, **given)
