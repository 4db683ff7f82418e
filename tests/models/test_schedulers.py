"""The contract of a family's schedulers, for every family with a pipeline: an objective that is exported and opened
again is the same function of the weights, or is refused; nothing that differs is silent."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from quick_cases import quick_where
from torch import Tensor

from daguerre import plugins
from daguerre.errors import UserError
from daguerre.families.pretrained import catalogue
from daguerre.models.compatibility import differences
from daguerre.models.schedulers.betas import BetaSchedulers
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers, other_sampling
from daguerre.models.settings import DenoiserSettings
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.draw import draw, initial_noise
from daguerre.samplers.settings import SamplingSettings


class FlowFamily(DenoiserSettings):
    """What shared code asks of a family with a flow-matching transformer, such as FLUX."""

    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    time_scale: ClassVar[float] = 1.0


FAMILIES: dict[str, Any] = {name: catalogue.pretrained()[name] for name in catalogue.pipelines().values()}
FAMILIES["like FLUX"] = FlowFamily
OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("eps", {}),
    ("v", {"zero_terminal_snr": True}),
    ("v", {"beta_end": 0.02}),
    ("x0", {"shift": 2.0}),
    ("eps", {"name": "cosine"}),
    ("v", {"name": "cosine", "shift": 2.0}),
    ("flow", {}),
    ("flow", {"shift": 3.0}),
    ("flow", {"resolution_shift": {"name": "linear_mu"}}),
    ("flow", {"resolution_shift": {"name": "linear_mu", "high_px": 16 * 8192**0.5, "high_mu": 0.9}, "terminal": 0.02}),
    ("flow", {"resolution_shift": {"name": "area"}}),
    ("edm", {"sigma_max": 120.0}),
]
CONDITIONINGS = ("auto", "timestep", "log_sigma", "cosine_time", "flow_time")


def built(family: Any, section: dict[str, Any], conditioning: str) -> Diffusion:
    module = plugins.find("objectives", section["name"])
    objective = module.build(module.Settings.model_validate(section))
    return objective.with_noise_conditioning(conditioning, family.time_scale)


def read_back(family: Any, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The objective of a config, or the reason for which there is none."""
    try:
        return family.schedulers.objective_of(config), ""
    except UserError as refusal:
        return {}, str(refusal)


def assert_same_function(ours: Diffusion, opened: Diffusion) -> None:
    """On one path; at each noise level that is visited, equal inputs, numbers of the level and targets."""
    assert type(opened.schedule) is type(ours.schedule)
    for quantile in (0.02, 0.3, 0.7, 0.98):
        t = opened.times(torch.tensor(quantile, dtype=torch.float64))
        a, s = opened.path(t)
        assert opened.target(a, s) == ours.target(a, s)
        assert opened.input_scale(a, s) == ours.input_scale(a, s)
        told = ours.noise_conditioning(a, s)
        assert float(opened.c_noise(t)) == pytest.approx(float(told), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "conditioning"),
    quick_where(lambda case: case[1] == "auto" or case[0] in ("sd", "like FLUX"), product(FAMILIES, CONDITIONINGS)),
)
def test_what_is_exported_is_opened_as_it_was_or_refused(name, conditioning):
    family, opened_any = FAMILIES[name], False
    default = family.model_fields["noise_conditioning"].default
    for objective, schedule in OBJECTIVES:
        try:
            ours = built(family, {"name": objective, "schedule": schedule}, conditioning)
        except UserError:
            continue  # pure noise has no such number
        for sampler in plugins.names("samplers"):
            sampling = SamplingSettings(sampler=sampler, guidance_scale=1.0)
            plan = family.schedulers.scheduler_of(ours, sampling)
            config = {"_class_name": plan.class_name, **plan.config}
            assert all(isinstance(value, int | float | str | bool | list) for value in config.values())
            section, refused = read_back(family, config)
            if refused:
                assert "no objective here" in refused or plan.notices[0] in refused
                continue
            opened, opened_any = built(family, section, default), True
            assert_same_function(ours, opened)
            if objective == "flow":  # what a pipeline visits is read back, too
                if name == "like FLUX":
                    assert opened.settings.schedule.terminal == ours.settings.schedule.terminal
                for px in (256, 768):
                    want, found = (each.settings.schedule.at(px**2).shift for each in (ours, opened))
                    by_size = ours.settings.schedule.resolution_shift.name != "none"
                    if name == "like FLUX" and ours.settings.schedule.resolution_shift.name != "area":
                        assert found == pytest.approx(want)
                    assert by_size or found == pytest.approx(want)
            if conditioning == default:
                assert differences(opened.settings, ours) == []
    assert opened_any or conditioning != default


@pytest.mark.parametrize(
    "schedule", [{}, {"shift": 3.0}, {"resolution_shift": {"name": "linear_mu"}}, {"terminal": 0.02}]
)
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_flow_visits_the_levels_of_the_pipeline_and_draws_its_images(schedule, steps):
    """FluxPipeline's own loop over FlowMatchEulerDiscreteScheduler, on a network whose answer depends on the time."""
    ours = built(FlowFamily, {"name": "flow", "schedule": schedule}, "auto")
    ours = ours.at((4, 8, 12))  # no cell_px: the area is 96 px, of 96 / 256 tokens
    sampling = SamplingSettings(sampler="euler", num_inference_steps=steps, guidance_scale=1.0)
    plan = FlowFamily.schedulers.scheduler_of(
        built(FlowFamily, {"name": "flow", "schedule": schedule}, "auto"), sampling
    )
    assert plan.notices == []
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(plan.config)
    config = scheduler.config
    mu = calculate_shift(
        96 / 256, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    if steps == 1 and "terminal" in schedule:
        pytest.skip("diffusers divides 0 by 0")
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    grid = ours.grid(steps)
    torch.testing.assert_close(scheduler.sigmas.double(), grid.s, rtol=1e-5, atol=1e-6)

    def net(x_BCHW: Tensor, c_noise_B: Tensor, cond: Any) -> Tensor:
        return torch.tanh(3 * x_BCHW.roll(1, -1)) * (0.2 + c_noise_B.view(-1, 1, 1, 1)) - x_BCHW

    x = initial_noise([1, 2], (4, 8, 12))
    for t in scheduler.timesteps:
        x = scheduler.step(net(x, t.expand(2) / 1000, {}), t, x, return_dict=False)[0]
    found = draw(ours, net, {}, None, (4, 8, 12), [1, 2], sampling)
    assert (found - x).abs().max() < 2 / 255 / 4


CLASS = {"_class_name": "FlowMatchEulerDiscreteScheduler"}


def test_a_shift_by_size_and_steps_is_written_for_pipelines_that_know_it():
    """Others have the number of the sampled images; what was trained is read back from either."""
    ours = built(FlowFamily, {"name": "flow", "schedule": {"resolution_shift": {"name": "linear_mu"}}}, "auto")
    ours = replace(ours, sampled_px=1024**2)
    sampling = SamplingSettings(sampler="euler", num_inference_steps=50, shift="empirical")
    klein = FlowMatching(token_px=16, empirical=True)
    plan = klein.scheduler_of(ours, sampling)
    assert (plan.notices, plan.config["max_shift"]) == ([], 1.15)
    assert klein.sampling_of(plan.config) == {"shift": "empirical"}
    assert klein.objective_of(CLASS | plan.config)["schedule"]["resolution_shift"]["name"] == "linear_mu"
    still = klein.scheduler_of(built(FlowFamily, {"name": "flow", "schedule": {"shift": 3.0}}, "auto"), sampling)
    opened = built(FlowFamily, klein.objective_of(CLASS | still.config), "auto")
    assert [opened.settings.schedule.at(px**2).shift for px in (256, 2048)] == pytest.approx([3.0, 3.0])
    for schedulers, shift in ((FlowFamily.schedulers, "empirical"), (klein, None)):
        given = sampling.model_copy(update={"shift": shift})
        plan = schedulers.scheduler_of(ours, given)
        wanted = np.exp(2.0234) if shift else np.exp(1.15)
        assert plan.config["shift"] == pytest.approx(wanted, rel=1e-4)
        assert "is for images of 1,048,576 pixels" in plan.notices[0]
        assert schedulers.sampling_of(plan.config) == {}


FLUX = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "base_image_seq_len": 256, "base_shift": 0.5,
    "max_image_seq_len": 4096, "max_shift": 1.15, "num_train_timesteps": 1000, "shift": 3.0,
    "use_dynamic_shifting": True,
}  # fmt: skip
"""scheduler_config.json of FLUX.1 dev."""


def test_published_configs_of_flow():
    """FLUX.1's shift is 3.158 at 1024 px; Qwen-Image's 2.0008, and its last level 0.02; Z-Image's 6 at any size."""
    flux, schedulers = FlowFamily.schedulers.objective_of(FLUX), FlowFamily.schedulers
    schedule = built(FlowFamily, flux, "auto").settings.schedule
    assert [schedule.at(px**2).shift for px in (256, 1024, 2048)] == pytest.approx([1.6487, 3.1582, 25.28], rel=1e-4)
    assert (schedule.resolution_shift.low_px, schedule.resolution_shift.high_px) == (256, 1024)
    qwen = schedulers.objective_of(FLUX | {"max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02})
    qwen_image = built(FlowFamily, qwen, "auto")
    assert qwen_image.settings.schedule.at(1024**2).shift == pytest.approx(2.0008, abs=1e-4)
    grid = qwen_image.on(qwen_image.settings.schedule.at(1024**2)).grid(50)
    assert [float(grid.s[i]) for i in (0, 1, -3, -2, -1)] == pytest.approx([1, 0.9897, 0.0585, 0.02, 0], abs=5e-4)
    z_image = schedulers.objective_of({"_class_name": FLUX["_class_name"], "shift": 6.0, "use_dynamic_shifting": False})
    assert z_image == {"name": "flow", "schedule": {"name": "linear_flow", "shift": 6.0}}


WRONG_KINDS = [
    ("sd", "prediction_type", []),
    ("sd", "rescale_betas_zero_snr", "false"),  # would be true
    ("sd", "_class_name", ["FlowMatchEulerDiscreteScheduler"]),
    ("flux", "base_image_seq_len", 10**400),
    ("flux", "use_flow_sigmas", 1),
    ("cascade_c", "prediction_type", {}),
    ("cascade_c", "s", "x"),
]


@pytest.mark.parametrize(
    ("schedulers", "config", "said"),
    [
        (FlowFamily.schedulers, {"_class_name": "DDIMScheduler", "beta_schedule": "linear"}, "is DDIMScheduler, which"),
        (FlowFamily.schedulers, FLUX | {"time_shift_type": "linear"}, "time_shift_type linear"),
        (FlowFamily.schedulers, FLUX | {"invert_sigmas": True}, "from the clean end"),
        (FlowFamily.schedulers, FLUX | {"max_shift": "much"}, 'damaged: max_shift is "much", and must be a finite'),
        (FlowFamily.schedulers, FLUX | {"max_image_seq_len": None}, "is no number of tokens"),
        (BetaSchedulers(), FLUX, "do not tell it"),
        (BetaSchedulers(), {"_class_name": "EDMEulerScheduler", "prediction_type": "sample"}, "with EDM's scaling"),
        *[(FAMILIES[name].schedulers, {key: value}, f"damaged: {key} is") for name, key, value in WRONG_KINDS],
        (FAMILIES["cascade_c"].schedulers, {"_class_name": "DDIMScheduler"}, "is DDIMScheduler with"),
        (FAMILIES["cascade_c"].schedulers, {"_class_name": "DDPMWuerstchenScheduler", "scaler": 2.0}, "scaler 2"),
    ],
)
def test_a_scheduler_without_an_objective_is_refused_with_the_reason(schedulers, config, said):
    with pytest.raises(UserError, match=said):
        schedulers.objective_of(config)


def test_flow_of_a_unet_is_read_back():
    """Static shifts of the solvers that serve flow, and of FlowMatchEulerDiscreteScheduler."""
    solver = {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0}
    flow = {"name": "flow", "schedule": {"name": "linear_flow", "shift": 3.0}}
    assert BetaSchedulers().objective_of(solver | {"prediction_type": "flow_prediction"}) == flow
    assert BetaSchedulers().objective_of({"_class_name": FLUX["_class_name"], "shift": 3.0}) == flow


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (FLUX, []),
        (FLUX | {"stochastic_sampling": True}, ["sampler=lcm"]),
        (FLUX | {"use_karras_sigmas": True}, ["use_karras_sigmas"]),
        (FLUX | {"_class_name": "FlowMatchLCMScheduler"}, ["sampler=lcm"]),
    ],
)
def test_a_kind_of_sampling_that_is_not_the_usual_one_is_said(config, said):
    lines = other_sampling(config)
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))
