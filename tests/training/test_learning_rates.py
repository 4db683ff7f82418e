"""Learning rates against diffusers and transformers, and against closed forms where these have none."""

import math

import pytest
import torch
from diffusers.optimization import get_scheduler
from pydantic import ValidationError
from transformers.optimization import get_wsd_schedule

from daguerre.training import schedules
from daguerre.training.settings import LRSchedulerSettings

STEPS = 30


def theirs(make):
    """The learning rates of an outside schedule over a run of `STEPS` updates from a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def ours(settings, warmup, decay=0):
    return [schedules.factor(settings, step, warmup, STEPS, decay) for step in range(STEPS)]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_equals_diffusers(name, warmup):
    their_name = "constant_with_warmup" if name == "constant" else name
    rates = theirs(lambda o: get_scheduler(their_name, o, num_warmup_steps=warmup, num_training_steps=STEPS))
    assert ours(LRSchedulerSettings(name=name), warmup) == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("warmup", [0, 7])
def test_polynomial_equals_diffusers_with_its_final_rate(power, warmup):
    rates = theirs(lambda o: get_scheduler("polynomial", o, None, warmup, STEPS, power=power))
    settings = LRSchedulerSettings(name="polynomial", power=power, final=1e-7)
    assert ours(settings, warmup) == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("cycles", [1, 3, 4])
@pytest.mark.parametrize("warmup", [0, 7])
def test_restarts_equal_diffusers(cycles, warmup):
    rates = theirs(lambda o: get_scheduler("cosine_with_restarts", o, None, warmup, STEPS, num_cycles=cycles))
    settings = LRSchedulerSettings(name="cosine_with_restarts", num_cycles=cycles)
    assert ours(settings, warmup) == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_warmup_stable_decay_equals_transformers(shape, final):
    rates = theirs(
        lambda o: get_wsd_schedule(
            o, 5, 10, num_stable_steps=15, decay_type="1-sqrt" if shape == "sqrt" else shape, min_lr_ratio=final
        )
    )
    settings = LRSchedulerSettings(name="warmup_stable_decay", decay_shape=shape, final=final, decay="10 steps")
    found = ours(settings, 5, 10)
    # Theirs warms up from the final rate, ours from zero; from the peak on they are one.
    assert found[5:] == pytest.approx(rates[5:], abs=1e-12)
    assert found[:5] == [0, 0.2, 0.4, 0.6, 0.8]


def test_warmup_stable_decay_closed_form():
    settings = LRSchedulerSettings(name="warmup_stable_decay", decay_shape="sqrt")
    assert [schedules.factor(settings, step, 10, 100, 20) for step in (0, 5, 10, 80, 85, 100, 120)] == pytest.approx(
        [0, 0.5, 1, 1, 1 - math.sqrt(0.25), 0, 0]
    )
    squeezed = [schedules.factor(settings, step, 10, 20, 50) for step in (10, 20)]
    assert squeezed == [1, 0], "a decay that does not fit begins after the warm-up"


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay"])
def test_falls_end_at_the_final_share_and_stay_there(name):
    settings = LRSchedulerSettings(name=name, final=0.25)
    assert [schedules.factor(settings, step, 3, STEPS, 6) for step in (STEPS, STEPS + 5)] == pytest.approx([0.25] * 2)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("constant", "final", 0.1),
        ("cosine", "power", 2.0),
        ("cosine", "num_cycles", 2),
        ("linear", "decay", "5 steps"),
        ("polynomial", "decay_shape", "cosine"),
    ],
)
def test_what_has_no_effect_is_refused_and_not_written(name, field, value):
    with pytest.raises(ValidationError, match=f"{field}.*: no effect with '{name}'"):
        LRSchedulerSettings(name=name, **{field: value})
    assert field not in LRSchedulerSettings(name=name).model_dump()
