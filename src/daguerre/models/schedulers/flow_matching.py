"""Flow matching: diffusers' FlowMatch schedulers, with a static shift or one that follows the number of tokens.

Lipman et al. 2022 (arXiv 2210.02747); the shifts are those of Esser et al. 2024 (arXiv 2403.03206) and of FLUX.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daguerre.errors import UserError
from daguerre.models.schedulers.scheduler import EQUAL_IN_LAW, Scheduler, Schedulers, follows_size, no_objective
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.levels.schedules import LinearFlow
from daguerre.objectives.settings import ResolutionShiftSettings
from daguerre.samplers.settings import SamplingSettings

EULER = "FlowMatchEulerDiscreteScheduler"
_SHIFTS = {
    "low": ("base_image_seq_len", 256, "base_shift", 0.5),
    "high": ("max_image_seq_len", 4096, "max_shift", 1.15),
}
"""The two ends of a shift that follows the size, in diffusers' names, with its defaults: tokens, and ln shift there."""


@dataclass(frozen=True)
class FlowMatching(Schedulers):
    """Schedulers of a pipeline that calls FlowMatchEulerDiscreteScheduler with the noise levels 1, 1 - 1/n, ..., 1/n.

    Those levels become ours under any shift. A pipeline that gives none (SD3's) lets the scheduler apply a static shift
    twice, and needs schedulers of its own.
    """

    token_px: int
    """Side in pixels of the square of an image that is one token of the network."""
    empirical: bool = False
    """Whether the pipeline shifts by FLUX.2's number of tokens and steps (`sampling.shift=empirical`) wherever its
    scheduler's shift follows the size, whose numbers are then those of the training alone."""

    def _objective_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return flow_of(config, self.token_px)

    def scheduler_of(self, objective: Diffusion, sampling: SamplingSettings) -> Scheduler:
        """FlowMatchEulerDiscreteScheduler: Euler's steps, or LCM's."""
        schedule = objective.settings.schedule
        if objective.settings.name != "flow" or not isinstance(objective.noise_conditioning.clock, LinearFlow):
            told = objective.noise_conditioning.name
            return Scheduler(EULER, {"num_train_timesteps": 1000}).differing(
                f"this run predicts {objective.settings.name} on the schedule {schedule.name} with the noise "
                f"conditioning {told}, and the pipeline takes flow on linear_flow with its time alone: its images of "
                "these weights are wrong; use `daguerre generate`"
            )
        levels = objective.sampled(sampling).schedule.settings
        config: dict[str, Any] = {"num_train_timesteps": 1000}
        notices = list[str]()
        linear = schedule.resolution_shift.name == "linear_mu"
        if sampling.shift == "empirical" if self.empirical else sampling.shift is None and linear:
            # The pipeline computes the shift of its own number of tokens, so that one folder is right at any size.
            config |= self._by_tokens(objective)
        else:
            config["shift"] = levels.shift
            if follows_size(objective, sampling):
                px = f"{objective.sampled_px:,}"
                notices.append(f"shift={levels.shift:.4f} is for images of {px} pixels: change it for other sizes")
        if schedule.terminal is not None:
            config["shift_terminal"] = schedule.terminal
        if sampling.levels:
            notices.append(f"give the call of the pipeline sigmas={sampling.levels}, or images differ")
        # The same class in diffusers: it draws fresh noise at each level instead of going along the line.
        if sampling.sampler == "lcm":
            config["stochastic_sampling"] = True
            notices.append(EQUAL_IN_LAW)
        elif sampling.sampler not in ("ddim", "euler") or sampling.eta > 0:
            what = f"{sampling.sampler} with eta={sampling.eta:g}" if sampling.eta > 0 else sampling.sampler
            notices.append(f"{EULER} has Euler's steps alone, and this run samples with {what}: images differ")
        return Scheduler(EULER, config, notices)

    def sampling_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"shift": "empirical"} if self.empirical and config.get("use_dynamic_shifting") else {}

    def _by_tokens(self, objective: Diffusion) -> dict[str, Any]:
        """A shift that is linear in the area is linear in the number of tokens; any other is written as it is for the
        images that are sampled."""
        shift = objective.settings.schedule.resolution_shift
        if shift.name != "linear_mu":
            level = math.log(objective.sampled().schedule.settings.shift)
            shift = ResolutionShiftSettings(name="linear_mu", low_mu=level, high_mu=level)
        config: dict[str, Any] = {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
        for end, (tokens, _, mu, _) in _SHIFTS.items():
            number = (getattr(shift, f"{end}_px") / self.token_px) ** 2
            # Their numbers are whole; a side is the root of one, so its square is off by rounding.
            config[tokens] = round(number) if math.isclose(number, round(number), rel_tol=1e-9) else number
            config[mu] = getattr(shift, f"{end}_mu")
        return config


def flow_of(config: Mapping[str, Any], token_px: int | None) -> dict[str, Any]:
    """The objective of a scheduler's config, of any class that samples flow. A shift that follows the number of tokens
    needs their `token_px`; None for pipelines that do not tell the scheduler this number. UserError as from
    `Schedulers.objective_of`."""
    named, prediction = str(config.get("_class_name")), config.get("prediction_type", "flow_prediction")
    known = "FlowMatchEulerDiscreteScheduler, and schedulers with use_flow_sigmas and flow_prediction"
    if not (named.startswith("FlowMatch") or config.get("use_flow_sigmas")) or prediction != "flow_prediction":
        raise no_objective(f"is {named}, which predicts {config.get('prediction_type', 'epsilon')}", known)
    if config.get("invert_sigmas"):  # the network would read each time as another level
        raise no_objective("counts noise levels from the clean end (invert_sigmas)", known)
    schedule: dict[str, Any] = {"name": "linear_flow"}
    if config.get("use_dynamic_shifting"):
        schedule["resolution_shift"] = _by_area(config, token_px)
    else:
        # One number with two names: solvers that also serve tables of betas call it flow_shift.
        schedule["shift"] = config.get("flow_shift" if config.get("use_flow_sigmas") else "shift", 1.0)
    if config.get("shift_terminal"):
        schedule["terminal"] = config["shift_terminal"]
    return {"name": "flow", "schedule": schedule}


def _by_area(config: Mapping[str, Any], token_px: int | None) -> dict[str, Any]:
    if token_px is None:
        raise UserError(
            "its scheduler's shift follows the number of tokens (use_dynamic_shifting), which pipelines of this class "
            "do not tell it. Give its recipe or run",
            code="unsupported",
        )
    if (kind := config.get("time_shift_type", "exponential")) != "exponential":
        raise no_objective(f"has a shift of time_shift_type {kind}", "exponential")
    section: dict[str, Any] = {"name": "linear_mu"}
    for end, (tokens, usual_tokens, mu, usual_mu) in _SHIFTS.items():
        number = config.get(tokens, usual_tokens)
        if not isinstance(number, int | float) or number <= 0:
            raise UserError(f"its scheduler's {tokens} is {number!r}, which is no number of tokens", code="damaged")
        section[f"{end}_px"] = token_px * math.sqrt(number)
        section[f"{end}_mu"] = config.get(mu, usual_mu)
    return section
