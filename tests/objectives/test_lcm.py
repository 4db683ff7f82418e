"""Latent consistency against closed forms: levels, boundary, the guided step, and zero loss of the exact answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, LCMScheduler
from pydantic import ValidationError
from torch import Tensor, nn

from daguerre.objectives import lcm
from daguerre.objectives.networks.teacher import TEACHER, Teacher
from daguerre.objectives.objective import AVERAGE, REFERENCE, Example, Nets
from daguerre.samplers.guidance import CLASSIFIER_FREE, Embedded
from daguerre.types import IMAGE

SHAPE = (3, 2, 2)
SD = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def built(name: str = "eps", **more: Any) -> lcm.Consistency:
    own = {key: more.pop(key) for key in ("schedule", "times") if key in more}
    return lcm.build(lcm.Settings(diffusion={"name": name, **own}, **more))


def drawn(made: lcm.Consistency, count: int, quantile: float | None = None) -> lcm.ConsistencyDraws:
    keys = np.stack([np.arange(count), np.zeros(count), np.zeros(count)], 1).astype(np.int64)
    return made.draws(3, keys, SHAPE, quantile=quantile)


def loss_of(made: lcm.Consistency, student: Any, teacher: Any, x0: Tensor, draws: Any, **more: Any) -> Tensor:
    cond, null = ({"text": torch.full((len(x0), 1), value)} for value in (1.0, 0.0))
    example = Example({IMAGE: x0}, {IMAGE: cond}, draws, null={IMAGE: null})
    role = TEACHER if made.settings.teacher else REFERENCE
    return made.loss(Nets(student, {role: teacher, **more}, CLASSIFIER_FREE), example).loss_B


def test_levels_are_those_of_fifty_steps_on_a_thousand_timesteps():
    made = built()
    found = [drawn(made, 1, (i + 0.5) / 50) for i in range(50)]
    assert [int(each.c_noise) for each in found] == [20 * i + 19 for i in range(50)]
    assert [int(each.end_c_noise) for each in found] == [0, *(20 * i + 19 for i in range(49))]
    flow = [drawn(built("flow", times={"name": "uniform"}), 1, (i + 0.5) / 50) for i in range(50)]
    assert [float(each.s) for each in flow] == pytest.approx([(i + 1) / 50 for i in range(50)])
    assert [float(each.end_s) for each in flow] == pytest.approx([i / 50 for i in range(50)])
    shifted = drawn(built("flow", schedule={"shift": 3.0}), 1, 0.5)
    assert float(shifted.s) == pytest.approx(3 * 0.52 / (1 + 2 * 0.52))


def test_the_boundary_is_that_of_diffusers():
    draws, scheduler = drawn(built(), 40), LCMScheduler()
    scheduler.set_timesteps(4, original_inference_steps=50)
    for level in (draws.start, draws.end):
        for row in range(len(draws.quantile)):
            expected = scheduler.get_scalings_for_boundary_condition_discrete(level.c_noise[row])
            assert [float(level.c_skip[row]), float(level.c_out[row])] == pytest.approx(
                [float(each) for each in expected], abs=1e-7
            )
    clean = drawn(built("flow"), 1, 0.0).end
    assert [float(clean.c_skip), float(clean.c_out)] == [1.0, 0.0]


def test_scales_are_drawn_evenly_by_the_samples_keys():
    made = built(guidance_min=2.0, guidance_max=4.0)
    draws = drawn(made, 2000)
    counts = np.histogram(draws.scale.numpy(), bins=8, range=(2, 4))[0]
    assert ((counts - 250) ** 2 / 250).sum() < 24.3  # chi-square of 7 degrees, one in a thousand
    assert abs(np.corrcoef(draws.scale, draws.quantile)[0, 1]) < 0.1
    assert torch.equal(drawn(made, 3).scale, draws.scale[:3])


@pytest.mark.parametrize(("name", "theirs"), [("eps", "epsilon"), ("v", "v_prediction")])
def test_the_teachers_step_is_guided_ddim(name: str, theirs: str):
    made, count = built(name), 6
    draws, x = drawn(made, count), torch.randn(count, *SHAPE)
    answers = {1.0: torch.randn(count, *SHAPE), 0.0: torch.randn(count, *SHAPE)}

    def net(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        assert torch.equal(c_noise, torch.cat([draws.c_noise, draws.c_noise]))
        return torch.cat([answers[float(part[0])] for part in cond["text"].chunk(2)])

    sides = {"text": torch.ones(count, 1)}, {"text": torch.zeros(count, 1)}
    found = made.step(Teacher(net, CLASSIFIER_FREE), x, sides, draws)
    scheduler = DDIMScheduler(**SD, prediction_type=theirs, clip_sample=False, set_alpha_to_one=False)
    scheduler.set_timesteps(50)
    for row in range(count):
        # The authors' notation: cond + w (cond - null), where w is the scale less 1.
        w = draws.scale[row] - 1
        guided = answers[1.0][row] + w * (answers[1.0][row] - answers[0.0][row])
        expected = scheduler.step(guided[None], int(draws.c_noise[row]), x[row : row + 1]).prev_sample
        torch.testing.assert_close(found[row], expected[0], rtol=2e-5, atol=2e-5)


def test_on_a_flow_the_teachers_step_is_eulers_at_its_embedded_scale():
    made, count = built("flow"), 5
    draws, x, velocity = drawn(made, count), torch.randn(count, *SHAPE), torch.randn(count, *SHAPE)
    seen = []

    def net(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        seen.append(cond["guidance"])
        return velocity

    found = made.step(Teacher(net, Embedded()), x, ({"text": torch.ones(count, 1)}, {}), draws)
    torch.testing.assert_close(found, x + (draws.end_s - draws.s).view(-1, 1, 1, 1) * velocity, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen[0], draws.scale)


@pytest.mark.parametrize("distance", ["l2", "pseudo_huber"])
@pytest.mark.parametrize("target", ["student", "average"])
def test_the_loss_is_the_published_formula(distance: str, target: str):
    made, count = built(distance=distance, target=target), 4
    draws, x0 = drawn(made, count), torch.randn(count, *SHAPE)
    t, end = draws.c_noise.long(), draws.end_c_noise.long()
    alphas = DDIMScheduler(**SD).alphas_cumprod.double()

    def teacher(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        return x.roll(1, 1) * (1 + cond["text"].view(-1, 1, 1, 1))

    def student(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        return 0.3 * x.roll(1, 2) + 1e-3 * c_noise.view(-1, 1, 1, 1)

    def average(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        return 0.2 * x.roll(1, 2)

    def image(net: Any, x: Tensor, t: Tensor) -> Tensor:
        a, s, u = (each.view(-1, 1, 1, 1) for each in (alphas[t].sqrt(), (1 - alphas[t]).sqrt(), 20.0 * t))
        seen = (x - s * net(x, t.double(), {}).double()) / a
        return x / (1 + u**2) + u / (1 + u**2).sqrt() * seen

    a, s, b, r = (
        each.view(-1, 1, 1, 1)
        for each in (alphas[t].sqrt(), (1 - alphas[t]).sqrt(), alphas[end].sqrt(), (1 - alphas[end]).sqrt())
    )
    x = a * x0.double() + s * draws.noise.double()
    w = (draws.scale.double() - 1).view(-1, 1, 1, 1)
    eps = 2 * x.roll(1, 1) + w * x.roll(1, 1)
    lower = b * (x - s * eps) / a + r * eps
    error = image(student, x, t) - image(average if target == "average" else student, lower, end)
    apart = error**2 if distance == "l2" else (error**2 + 1e-6).sqrt() - 1e-3
    found = loss_of(made, student, teacher, x0, draws, **{AVERAGE: average})
    torch.testing.assert_close(found.double(), apart.mean((1, 2, 3)), rtol=1e-4, atol=1e-6)


WIDTH = 0.5
"""Standard deviation of Gaussian data."""


@pytest.mark.parametrize("name", ["eps", "v", "x0", "flow"])
def test_the_exact_answer_on_gaussian_data_has_no_loss_as_steps_grow(name: str):
    """Data N(0, w^2): the way of x is x / sqrt(a^2 w^2 + s^2), so its end w x / sqrt(a^2 w^2 + s^2). The loss that is
    left is the solver's own error, which a step of half the size has a fourth of."""
    left = []
    for steps in (50, 100):
        made = built(name, solver_steps=steps, distance="l2")
        draws = drawn(made, 64, 0.5 - 1 / 200)
        x0 = WIDTH * torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))
        levels = {
            float(level.c_noise[0]): (level.a[0].double(), level.s[0].double()) for level in (draws.start, draws.end)
        }

        def answer(x: Tensor, c_noise: Tensor, image: Any, made: Any = made, levels: Any = levels) -> Tensor:
            a, s = levels[float(c_noise[0])]
            p, q = made.inner.target(a, s)
            x0 = image(x.double(), a, s)
            return (p * x0 + q * (x.double() - a * x0) / s).float()

        def teacher(x: Tensor, c_noise: Tensor, cond: Any, answer: Any = answer) -> Tensor:
            return answer(x, c_noise, lambda x, a, s: a * WIDTH**2 * x / (a**2 * WIDTH**2 + s**2))

        def student(x: Tensor, c_noise: Tensor, cond: Any, answer: Any = answer) -> Tensor:
            return answer(x, c_noise, lambda x, a, s: WIDTH * x / (a**2 * WIDTH**2 + s**2).sqrt())

        left.append(float(loss_of(made, student, teacher, x0, draws).mean().sqrt()))
    assert left[0] < 2e-3
    assert left[1] < 0.35 * left[0], left


def test_gradients_reach_the_student_alone_also_under_autocast():
    torch.manual_seed(0)
    made, count = built(), 3
    draws, x0 = drawn(made, count), torch.randn(count, *SHAPE)
    found = []
    for bf16 in (False, True):
        torch.manual_seed(0)
        student, teacher = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1).requires_grad_(False)

        def net(x: Tensor, c_noise: Tensor, cond: Any, student: nn.Module = student) -> Tensor:
            return student(x)

        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(made, net, lambda x, c_noise, cond, teacher=teacher: teacher(x), x0, draws)
        loss.sum().backward()
        found.append(student.weight.grad)
    assert found[1] is not None
    assert float((found[0] - found[1]).norm()) < 0.1 * float(found[0].norm())


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"solver_steps": 30}, "choose a divisor of the 1000 timesteps"),
        ({"diffusion": {"name": "edm"}}, "edm has no first and last time"),
        ({"diffusion": {"name": "eps", "weighting": {"name": "min_snr"}}}, "weighting has no effect"),
        ({"diffusion": {"name": "eps", "mask": {}}}, "mask has no effect"),
        ({"guidance_min": 9, "guidance_max": 4}, "swap them"),
        ({"distance": "l2", "distance_c": 0.1}, "no effect with distance=l2"),
    ],
)
def test_what_has_no_meaning_is_refused(values: Any, why: str):
    with pytest.raises(ValidationError, match=why):
        lcm.Settings.model_validate(values)


def test_generation_needs_no_teacher():
    settings = lcm.Settings(teacher={"path": "somewhere"})
    assert [*settings.networks] == [TEACHER]
    assert lcm.build(settings).needs.networks == ()
    assert lcm.build(settings.in_use()).needs.networks == (REFERENCE,)
    assert not settings.in_use().networks
