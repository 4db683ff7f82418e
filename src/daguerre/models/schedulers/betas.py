"""Schedulers of Stable Diffusion's pipelines: tables of betas, EDM's, and flow by the solvers that serve both.

Measured differences are in docs/export.md, reasons in docs/samplers.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from daguerre.models.schedulers.flow_matching import flow_of
from daguerre.models.schedulers.scheduler import EQUAL_IN_LAW, Scheduler, Schedulers, follows_size, no_objective
from daguerre.objectives import edm
from daguerre.objectives.algebra import Diffusion
from daguerre.samplers.settings import SamplingSettings

PREDICTIONS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction", "flow": "flow_prediction"}
"""diffusers' names of what an objective predicts."""
EDM_PREDICTIONS = {"F": "epsilon", "v": "v_prediction"}
"""diffusers' names of what `edm` predicts, where "epsilon" means EDM's F and "v_prediction" its negative."""
FIRST_ORDER = ("ddim", "euler", "euler_ancestral")
"""Samplers that are DPM-Solver++ of order 1."""
SECOND_ORDER = ("dpmpp_2m", "dpmpp_2m_sde")
"""Samplers that are DPM-Solver++ of order 2."""
OF_THE_SDE = ("euler_ancestral", "dpmpp_2m_sde")
"""Those of them that are SDE-DPM-Solver++."""
_COSINE_STEPS = 1000


class BetaSchedulers(Schedulers):
    """Schedulers of pipelines whose networks read timesteps of a table of betas, or ln(sigma)/4 of EDM's levels."""

    def _objective_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        named, prediction = str(config.get("_class_name")), config.get("prediction_type", "epsilon")
        if named.startswith("EDM"):  # they call other targets epsilon and v_prediction than the classes below
            return _edm_of(config)
        if named.startswith("FlowMatch") or config.get("use_flow_sigmas"):
            return flow_of(config, None)
        # What a scheduler has saved names all its numbers. What only a file of weights tells is a part of them.
        betas = config.get("beta_schedule", "linear" if "_class_name" in config else "scaled_linear")
        predictions = {theirs: ours for ours, theirs in PREDICTIONS.items() if ours != "flow"}
        if prediction not in predictions or betas != "scaled_linear" or config.get("trained_betas") is not None:
            known = f"{', '.join(predictions)} on scaled_linear, EDM and flow"
            raise no_objective(f"predicts {prediction} on a {betas} schedule of its own", known)
        numbers = ("beta_start", "beta_end", "num_train_timesteps")
        schedule = {name: config[name] for name in numbers if name in config}
        if config.get("rescale_betas_zero_snr"):
            schedule["zero_terminal_snr"] = True
        return {"name": predictions[prediction], "schedule": schedule}

    def scheduler_of(self, objective: Diffusion, sampling: SamplingSettings) -> Scheduler:
        levels, notices = _visited(objective, sampling)
        chosen = _chosen(levels, sampling)
        chosen = replace(chosen, notices=[*chosen.notices, *notices])
        if (named := objective.settings.name) not in PREDICTIONS and levels.schedule.settings.name != "edm":
            chosen = chosen.differing(
                f"diffusers has no scheduler for the objective {named}: images of the pipeline are wrong; use "
                "`daguerre generate`"
            )
        clock, told = objective.noise_conditioning.clock, objective.noise_conditioning.name
        if type(clock) is type(objective.schedule):
            return chosen
        return chosen.differing(
            f"this run gives the network {told} (model.noise_conditioning), but diffusers gives it the time of the "
            "schedule, another number: images of the pipeline are wrong; use `daguerre generate`"
        )


def _chosen(levels: Diffusion, sampling: SamplingSettings) -> Scheduler:
    """The scheduler for an objective on the levels that are visited."""
    schedule = levels.schedule.settings
    if schedule.name == "edm":
        return _edm(levels, sampling)
    if sampling.eta > 0 and schedule.name == "scaled_linear":
        eta = f"eta is {sampling.eta}: give it to the call, pipe(prompt, eta={sampling.eta}); {EQUAL_IN_LAW}"
        return Scheduler("DDIMScheduler", _unclipped(levels, sampling), [eta])
    if sampling.sampler == "heun" and schedule.name == "scaled_linear" and not schedule.zero_terminal_snr:
        notices = [*_miscounted(sampling, 1000), *_no_fresh_noise(sampling, "HeunDiscreteScheduler")]
        return Scheduler("HeunDiscreteScheduler", _betas(levels) | _common(levels, sampling), notices)
    if sampling.sampler == "lcm" and schedule.name != "linear_flow":
        return _lcm(levels, sampling)
    return _multistep(levels, sampling)


def _visited(objective: Diffusion, sampling: SamplingSettings) -> tuple[Diffusion, list[str]]:
    """The objective on levels that a pipeline can visit, and messages where these or the network's conditioning differ.

    A scheduler tells the network the time of its own table, so that table must be the one that the network knows.
    """
    wanted, conditioning = objective.sampled(sampling), objective.noise_conditioning
    clock, schedule = conditioning.clock, wanted.schedule
    if type(clock) is not type(schedule):
        return wanted, []  # no table of theirs has the number that the network knows
    if not schedule.variance_preserving:  # there the time is the level
        if not follows_size(wanted, sampling):
            return wanted, []
        px = f"{wanted.sampled_px:,}"
        return wanted, [
            f"flow_shift={schedule.settings.shift:.4f} is for images of {px} pixels: change it for other sizes"
        ]
    theirs = objective.on(clock.settings)
    notices = []
    if conditioning.name == "cosine_time":
        first = theirs.schedule.time(torch.ones((), dtype=torch.float64))
        apart = f"{float(first) * 1000:.1f}, and this run {float(theirs.c_noise(first)):.1f}"
        notices.append(f"at the first step diffusers gives the network {apart}")
    return theirs, notices + _other_levels(wanted, clock.settings.shift, sampling)


def _other_levels(wanted: Diffusion, shift: float, sampling: SamplingSettings) -> list[str]:
    """A message if a pipeline visits the levels of `shift`, and this run others; and how Euler's steps visit them."""
    settings = wanted.schedule.settings
    if settings.shift == shift:
        return []
    notice = (
        f"diffusers visits the noise levels of the network's own timesteps, those of shift {shift:g}; this run samples "
        f"with shift {settings.shift:.4g}, so images differ"
    )
    grid = wanted.grid(sampling.num_inference_steps, sampling.timestep_spacing)
    c_noise_N = wanted.c_noise(grid.t_N)
    by_euler = sampling.sampler in ("ddim", "euler") and sampling.eta == 0 and bool(grid.a[0] > 0)
    if settings.name == "scaled_linear" and by_euler and (c_noise_N.diff() < 0).all():
        # else diffusers finds its place by the timestep, which levels beyond the table have in common
        sigmas = ", ".join(f"{sigma:.6g}" for sigma in (grid.s / grid.a).tolist())
        notice += f": EulerDiscreteScheduler made from this config gives ours where the call is given sigmas=[{sigmas}]"
    return [notice]


def _edm(objective: Diffusion, sampling: SamplingSettings) -> Scheduler:
    schedule, own = objective.schedule.settings, objective.settings
    assert isinstance(own, edm.Settings)
    config = {
        "sigma_min": schedule.sigma_min,
        "sigma_max": schedule.sigma_max,
        "rho": schedule.rho,
        "sigma_data": own.sigma_data,
        "sigma_schedule": "karras",
        "prediction_type": EDM_PREDICTIONS[own.prediction],
        "final_sigmas_type": "zero",
    }
    class_name = "EDMEulerScheduler" if sampling.sampler in ("ddim", "euler") else "EDMDPMSolverMultistepScheduler"
    notices = _no_fresh_noise(sampling, class_name)
    if class_name == "EDMEulerScheduler":
        return Scheduler(class_name, config, notices)
    if sampling.sampler not in (*FIRST_ORDER, *SECOND_ORDER):
        notices.append(_no_such(sampling.sampler, "edm", f"{class_name} (dpmpp_2m)"))
    return Scheduler(class_name, config | _solver(sampling), notices)


def _edm_of(config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {theirs: ours for ours, theirs in EDM_PREDICTIONS.items()}
    if (prediction := config.get("prediction_type", "epsilon")) not in kinds:
        raise no_objective(f"predicts {prediction} with EDM's scaling", f"{', '.join(kinds)} with it")
    usual = {"sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}
    schedule = {"name": "edm", **{name: config.get(name, value) for name, value in usual.items()}}
    own = {"prediction": kinds[prediction], "sigma_data": config.get("sigma_data", 0.5)}
    return {"name": "edm", **own, "schedule": schedule}


def _lcm(objective: Diffusion, sampling: SamplingSettings) -> Scheduler:
    """LCM's scheduler takes trailing times of those that it was distilled at, here of all there are."""
    config = _unclipped(objective, sampling)
    num_times = config["original_inference_steps"] = config["num_train_timesteps"]
    num_times -= objective.schedule.settings.name == "cosine"
    notices = [EQUAL_IN_LAW]
    if sampling.timestep_spacing != "trailing" or num_times % sampling.num_inference_steps:
        notices.append(f"LCMScheduler has trailing spacing only, rounded where the steps do not divide {num_times}")
    return Scheduler("LCMScheduler", config, notices)


def _multistep(objective: Diffusion, sampling: SamplingSettings) -> Scheduler:
    """UniPC, or DPM-Solver++; of order 1 the latter is DDIM, which is Euler's step on every path."""
    name = objective.schedule.settings.name
    unipc = sampling.sampler == "unipc"
    class_name = "UniPCMultistepScheduler" if unipc else "DPMSolverMultistepScheduler"
    solver = {"solver_order": 2, "solver_type": "bh2", "predict_x0": True} if unipc else _solver(sampling)
    config = _common(objective, sampling) | solver | {"final_sigmas_type": "zero", "lower_order_final": True}
    if name == "linear_flow":
        shift = objective.schedule.settings.shift
        config |= {"use_flow_sigmas": True, "flow_shift": shift, "num_train_timesteps": 1000}
    else:
        config |= _betas(objective)
    if name == "cosine":
        config["timestep_spacing"] = "linspace"  # on 1001 points these are the times 1, 1 - 1/n, ..., 1/n
    notices = [*_level_notices(objective, sampling, class_name), *_no_fresh_noise(sampling, class_name)]
    if sampling.sampler == "dpmpp_2m_sde" and objective.schedule.settings.zero_terminal_snr:
        notices.append("diffusers' second step extrapolates from pure noise, whose level it takes for 2^-24")
    if sampling.sampler not in (*FIRST_ORDER, *SECOND_ORDER, "unipc"):
        what = "zero terminal SNR" if name == "scaled_linear" else name
        notices.append(_no_such(sampling.sampler, what, f"{class_name} (dpmpp_2m)"))
    return Scheduler(class_name, config, notices)


def _solver(sampling: SamplingSettings) -> dict[str, Any]:
    """DPM-Solver++ of the order and the kind that a sampler is; 2M in place of those that it is not."""
    return {
        "solver_order": 1 if sampling.sampler in FIRST_ORDER else 2,
        "algorithm_type": "sde-dpmsolver++" if sampling.sampler in OF_THE_SDE else "dpmsolver++",
        "solver_type": "midpoint",
    }


def _common(objective: Diffusion, sampling: SamplingSettings) -> dict[str, Any]:
    return {
        "prediction_type": PREDICTIONS.get(objective.settings.name, "epsilon"),
        "timestep_spacing": "trailing" if sampling.levels else sampling.timestep_spacing,
        "steps_offset": 1,  # Stable Diffusion's, in leading spacing; the pipeline warns of anything else
    }


def _unclipped(objective: Diffusion, sampling: SamplingSettings) -> dict[str, Any]:
    return _betas(objective) | _common(objective, sampling) | {"clip_sample": False, "set_alpha_to_one": True}


def _betas(objective: Diffusion) -> dict[str, Any]:
    """The noise levels: diffusers' own scaled linear betas where they are these, else a table."""
    schedule = objective.schedule.settings
    if schedule.name == "cosine":
        table = _table(objective, torch.linspace(0, 1, _COSINE_STEPS + 1, dtype=torch.float64))
        return {"num_train_timesteps": _COSINE_STEPS + 1, "trained_betas": table}
    config: dict[str, Any] = {
        "num_train_timesteps": schedule.num_train_timesteps,
        "rescale_betas_zero_snr": schedule.zero_terminal_snr,
    }
    if schedule.shift != 1:
        times = torch.arange(schedule.num_train_timesteps, dtype=torch.float64)
        return config | {"trained_betas": _table(objective, times)}
    linear = {"beta_schedule": "scaled_linear", "beta_start": schedule.beta_start, "beta_end": schedule.beta_end}
    return config | linear


def _table(objective: Diffusion, t_N: torch.Tensor) -> list[float]:
    """Betas 1 - a_t^2 / a_{t-1}^2 of the levels at the times t_N."""
    variance = objective.path(t_N)[0] ** 2
    before = torch.cat([variance.new_ones(1), variance[:-1]])
    return (1 - variance / before).tolist()


def _level_notices(objective: Diffusion, sampling: SamplingSettings, class_name: str) -> list[str]:
    """Messages where a multistep scheduler visits other noise levels."""
    schedule = objective.schedule.settings
    if schedule.name == "linear_flow":
        notice = (
            "diffusers starts flow at time 0.999 and gives the network integer timesteps: images are close (about "
            "1/255 to 4/255 a pixel)"
        )
        last = f"{class_name} does not end at objective.schedule.terminal={schedule.terminal}: images differ"
        return [notice, *([] if schedule.terminal is None else [last])]
    if schedule.name == "cosine":
        if _COSINE_STEPS % sampling.num_inference_steps == 0:
            return []
        return [
            f"times are rounded to 1/{_COSINE_STEPS}; this has no effect if the number of steps divides {_COSINE_STEPS}"
        ]
    if sampling.timestep_spacing == "trailing":
        return _miscounted(sampling, schedule.num_train_timesteps)
    return [
        f"{class_name} lays {sampling.timestep_spacing} spacing on one point more than there are steps, "
        "so its noise levels differ; trailing spacing is the same everywhere"
    ]


def _miscounted(sampling: SamplingSettings, num_timesteps: int) -> list[str]:
    """A rounding in diffusers' `arange` gives some numbers of steps one too many, at time -1."""
    steps = sampling.num_inference_steps
    if sampling.timestep_spacing != "trailing" or len(np.arange(num_timesteps, 0, -num_timesteps / steps)) == steps:
        return []
    return [f"diffusers makes {steps + 1} of {steps} trailing steps by a rounding error; choose another number"]


def _no_fresh_noise(sampling: SamplingSettings, class_name: str) -> list[str]:
    """A message if fresh noise is another's, or if a scheduler adds none where the sampler here does."""
    if sampling.sampler in OF_THE_SDE:
        return [EQUAL_IN_LAW]
    lost = [name for name in ("eta", "s_churn") if getattr(sampling, name) > 0]
    return [f"{class_name} adds no fresh noise, so images are those of {name}=0" for name in lost]


def _no_such(sampler: str, what: str, instead: str) -> str:
    return f"diffusers has no {sampler} for {what} in StableDiffusionPipeline; exported with {instead} in its place"
