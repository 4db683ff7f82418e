"""Objective `lcm`: a latent consistency model, which goes from any noise level to the image in one call.

Luo et al. 2023 (arXiv 2310.04378). A teacher makes one step of an ODE solver from a noise level to a lower one, guided
at a scale that is drawn for each sample. The student learns to answer with one image at both ends of that step, and so
at all levels; at the clean end its answer is the sample itself. Shape letters: B samples, C channels, h and w latent
height and width, N steps of the solver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from daguerre import keys as keyed
from daguerre.objectives import distances
from daguerre.objectives.algebra import Diffusion, DiffusionDraws, per_sample
from daguerre.objectives.levels import times
from daguerre.objectives.networks.teacher import TEACHER, Teacher, TeacherSettings
from daguerre.objectives.objective import AVERAGE, REFERENCE, Example, Needs, Net, Nets
from daguerre.objectives.wrapper import DiffusionWrapper, WrapperSettings
from daguerre.settings import Unused
from daguerre.types import IMAGE, Cond, LossTerms

_STEPS = 1000.0
"""Timesteps of a schedule whose time goes from 0 to 1, for the scalings of the boundary condition."""
_SCALE = 10.0 / 0.5
"""Factor of timesteps over the data's standard deviation in these scalings, those of the authors."""


class Settings(WrapperSettings):
    """Latent consistency distillation: images in 1 to 8 steps."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("mask",), lambda own: True, "images are compared whole"),
        Unused(("distance_c",), lambda own: own.distance == "l2", "no effect with distance=l2"),
    )

    name: Literal["lcm"] = "lcm"
    """All noise levels lead to one image, in one step."""
    teacher: TeacherSettings | None = Field(None, exclude_if=lambda own: own is None)
    """The model to learn from; `{path: PLACE}`. Default: the student as it is before its first update, which with a
    LoRA takes no memory but that of its first factors."""
    target: Literal["student", "average"] = "student"
    """Who says where the lower level leads to. student: the student itself, without gradient, as usual for a LoRA;
    average: its moving averages (ema), as usual where the whole network is trained."""
    guidance_min: float = Field(6.0, ge=0, allow_inf_nan=False)
    """Least scale of the teacher's guidance, in the notation of the family's pipeline."""
    guidance_max: float = Field(16.0, ge=0, allow_inf_nan=False)
    """Largest scale. One that is drawn evenly for each sample; a network that reads scales is given it."""
    solver_steps: int = Field(50, ge=2)
    """Steps into which the teacher's solver (DDIM; Euler on flow) cuts the schedule: levels that are one step apart are
    compared."""
    distance: Literal["pseudo_huber", "l2"] = "pseudo_huber"
    """Distance of two images. pseudo_huber: sqrt(d^2 + c^2) - c of each element; l2: d^2."""
    distance_c: float = Field(0.001, gt=0, allow_inf_nan=False)
    """pseudo_huber: differences d well above this c count by their size, those below by their square."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        inner = self.diffusion
        if self.guidance_min > self.guidance_max:
            raise ValueError(f"got guidance_min {self.guidance_min} and guidance_max {self.guidance_max}: swap them")
        if inner.schedule.name == "edm":
            raise ValueError("diffusion.schedule: edm has no first and last time, so its way cannot be cut into steps")
        if inner.schedule.acts("num_train_timesteps") and inner.schedule.num_train_timesteps % self.solver_steps:
            raise ValueError(
                f"solver_steps is {self.solver_steps}: choose a divisor of the {inner.schedule.num_train_timesteps} "
                "timesteps, such as 40 or 50, so that the last one is pure noise"
            )
        if inner.weighting.name != "none":
            raise ValueError(
                "diffusion.weighting has no effect: images are compared, at all levels with one weight: remove it"
            )
        if inner.noise.input_perturbation:
            raise ValueError("diffusion.noise.input_perturbation has no effect: the noise is not learnt: remove it")
        return self

    @property
    def learns_from_itself(self) -> bool:
        return self.teacher is None


class Level(NamedTuple):
    """A noise level of each sample: [B] each, as in `DiffusionDraws`."""

    c_noise: Tensor
    c_in: Tensor
    a: Tensor
    s: Tensor
    c_skip: Tensor
    """Share of the noisy sample in the answer: 1 at the clean end."""
    c_out: Tensor
    """Share of the image that the network means."""


@dataclass(frozen=True, kw_only=True)
class ConsistencyDraws(DiffusionDraws):
    """The draws of diffusion at the level from which the teacher goes, and the level that it reaches."""

    scale: Tensor
    """Guidance scale [B] of the teacher."""
    c_skip: Tensor
    c_out: Tensor
    end_c_noise: Tensor
    end_c_in: Tensor
    end_a: Tensor
    end_s: Tensor
    end_c_skip: Tensor
    end_c_out: Tensor

    @property
    def start(self) -> Level:
        """The noisier level."""
        return Level(*(getattr(self, name) for name in Level._fields))

    @property
    def end(self) -> Level:
        """The other one."""
        return Level(*(getattr(self, f"end_{name}") for name in Level._fields))


@dataclass(frozen=True, eq=False)
class Consistency(DiffusionWrapper):
    """|f(x, start) - f(x', end)|, where x' is one guided step of the teacher away from x, and f the boundary condition
    around the image that the network means: c_skip x + c_out x0."""

    drawn: ClassVar[type[ConsistencyDraws]] = ConsistencyDraws

    settings: Settings
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.settings
        roles = [REFERENCE] * (settings.teacher is None) + [AVERAGE] * (settings.target == "average")
        scales = (settings.guidance_min, settings.guidance_max)
        object.__setattr__(self, "needs", Needs(networks=tuple(roles), null=True, scales=scales))

    def draws(
        self, seed: int, keys: np.ndarray, shape: tuple[int, ...], *, quantile: float | None = None
    ) -> ConsistencyDraws:
        levels, settings = self.inner.at(shape), self.settings
        drawn = self.inner.draws(seed, keys, shape, quantile=quantile).tensors
        ends_of_step = solver_times(levels, drawn["quantile"].double(), settings.solver_steps)
        chance_B = torch.from_numpy(keyed.batch_uniforms(seed, "guidance", keys))
        scale_B = settings.guidance_min + (settings.guidance_max - settings.guidance_min) * chance_B
        start, end = (levels.level_at(t_B) | boundary(levels, t_B) for t_B in ends_of_step)
        ends = {f"end_{name}": end[name] for name in Level._fields}
        return ConsistencyDraws(**{**drawn, **start, **ends, "scale": scale_B.float()})

    def loss(self, nets: Nets, example: Example[ConsistencyDraws]) -> LossTerms:
        """The distance of both answers, mean over the elements of each sample."""
        draws, cond = example.draws, example.cond[IMAGE]
        start, end = draws.start, draws.end
        x0 = example.clean[IMAGE].float()
        x = per_sample(start.a, x0) * x0 + per_sample(start.s, x0) * draws.noise
        scaled = cond if nets.guidance is None else nets.guidance.with_scale(cond, draws.scale)
        with torch.no_grad():
            # Before the student's own pass, as roles are called by exchanging memory with it.
            lower = self.step(self.teacher(nets), x, (cond, example.null[IMAGE]), draws)
            target = self.image(
                nets[AVERAGE] if self.settings.target == "average" else nets.student, lower, scaled, end
            )
        # Autocast remembers the narrow copies of weights that a pass without gradient has made: no gradient would
        # reach the weights through them.
        torch.clear_autocast_cache()
        error = self.image(nets.student, x, scaled, start) - target
        is_l2 = self.settings.distance == "l2"
        apart = error.square() if is_l2 else distances.pseudo_huber(error, self.settings.distance_c)
        return LossTerms(self.elements.mean(apart, draws.element_weight), draws.quantile)

    def teacher(self, nets: Nets) -> Teacher:
        """The one that the settings name, or the student before its first update."""
        if self.settings.teacher is not None:
            named: Teacher = nets[TEACHER]
            return named
        assert nets.guidance is not None, "it needs the empty caption, so the family generates"
        return Teacher(nets[REFERENCE], nets.guidance)

    def step(self, teacher: Teacher, x: Tensor, sides: tuple[Cond, Cond], draws: ConsistencyDraws) -> Tensor:
        """x [B, C, h, w] at the lower level, by one step of DDIM (Song et al. 2020, arXiv 2010.02502, eq. 12 without
        fresh noise), which on a flow is Euler's: image and noise that the guided teacher sees stay as they are."""
        start, end = draws.start, draws.end
        y = teacher.guided(per_sample(start.c_in, x) * x, start.c_noise, *sides, draws.scale).float()
        x0, eps = self.inner.solve(x, y, start.a, start.s)
        return per_sample(end.a, x) * x0 + per_sample(end.s, x) * eps

    def image(self, net: Net, x: Tensor, cond: Cond, level: Level) -> Tensor:
        """The answer [B, C, h, w] float32 of a consistency model: c_skip x + c_out x0."""
        y = net(per_sample(level.c_in, x) * x, level.c_noise, cond).float()
        x0 = self.inner.solve(x, y, level.a, level.s)[0]
        return per_sample(level.c_skip, x) * x + per_sample(level.c_out, x) * x0


def solver_times(levels: Diffusion, quantile_B: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Times [B] float64 from which the solver goes and which it reaches, for quantiles [B] of the law of times: the
    schedule's share is cut into N equal steps. Of 1000 timesteps and 50 steps: 19, 39 ... 999, and 0, 19 ... 979."""
    schedule = levels.schedule
    # `clamp`, as a law with a long tail may give a share of 1 by rounding.
    index_B = (times.law(levels.settings.times, quantile_B) * num_steps).floor().clamp(max=num_steps - 1)
    shares = (index_B + 1) / num_steps, index_B / num_steps
    if schedule.settings.acts("num_train_timesteps"):
        start_B, end_B = ((share_B * schedule.settings.num_train_timesteps).round() - 1 for share_B in shares)
        return start_B, end_B.clamp(min=0)  # the first step ends at timestep 0, as in diffusers' script: there is no -1
    return schedule.time(shares[0]), schedule.time(shares[1])


def boundary(levels: Diffusion, t_B: Tensor) -> dict[str, Tensor]:
    """c_skip = 1 / (1 + u^2) and c_out = u / sqrt(1 + u^2) [B] float32 at times [B] float64, u = 20 timesteps: 1 and 0
    at the clean end, so that the answer there is the sample itself; 0 and 1, nearly, from the next step on."""
    u_B = _SCALE * (t_B if levels.schedule.settings.acts("num_train_timesteps") else _STEPS * t_B)
    return {"c_skip": (1 / (1 + u_B**2)).float(), "c_out": (u_B / (1 + u_B**2).sqrt()).float()}


def build(settings: Settings) -> Consistency:
    return Consistency(settings.inner(), settings)
