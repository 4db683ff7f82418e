"""One algebra for every diffusion objective: path, target, solve, loss, and the denoiser that samplers see.

A path x_t = a x0 + s eps and a linear target y = p x0 + q eps. Given x_t and y, one 2x2 solve gives both x0 and
eps. (a, s) at a time is in levels/schedules.py, c_noise in levels/noise_conditioning.py, and (p, q) in the objectives'
own files; guidance and samplers are not here.

Shape letters: B samples, C channels, H and W height and width (pixels or latents), N steps of a sampler. The four
coefficients and d = a q - s p are [B], or 0-dim for one level for all samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from daguerre import keys as keyed
from daguerre.errors import UserError
from daguerre.objectives import distances, masks, weights
from daguerre.objectives.adaptive import AdaptiveWeight
from daguerre.objectives.levels import noise_conditioning, schedules, times
from daguerre.objectives.levels.noise_conditioning import NoiseConditioning
from daguerre.objectives.masks import ElementMean
from daguerre.objectives.noise import noise, perturbation
from daguerre.objectives.objective import Draws, Example, Net, Nets, NothingLearnt, Objective
from daguerre.objectives.settings import DiffusionSettings, ScheduleSettings
from daguerre.types import IMAGE, Cond, Grid, LossTerms, Stateful

Target = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""target(a, s) -> (p, q)."""
InputScale = Callable[[Tensor, Tensor], Tensor]
"""input_scale(a, s) -> c_in: the network sees c_in x_t."""


class Visits(Protocol):
    """Settings of sampling, as far as they say which noise levels are visited."""

    def shift_at(self, area_px: float) -> float | None:
        """The shift of these levels for images of this area in pixels; None: as in training."""


def unscaled(a: Tensor, s: Tensor) -> Tensor:
    """c_in = 1: for paths on which x_t has about unit variance at every level."""
    return torch.ones_like(a)


@dataclass(frozen=True, kw_only=True)
class DiffusionDraws(Draws):
    """Noise, noise level and what follows from it: all float32."""

    noise: Tensor
    """eps [B, C, h, w]."""
    perturbation: Tensor | None = None
    """Further noise [B, C, h, w] of the network's input alone."""
    quantile: Tensor
    """The level [B] as a quantile of the time law, in [0, 1): 0 is the clean end."""
    c_noise: Tensor
    """The network's noise-level input [B]."""
    c_in: Tensor
    """Scale [B] of the network's input."""
    a: Tensor
    """Signal level [B]."""
    s: Tensor
    """Noise level [B]."""
    p: Tensor
    """Coefficient [B] of the target's x0."""
    q: Tensor
    """Coefficient [B] of the target's eps."""
    weight: Tensor
    """Weight [B] of the error of y."""
    threshold: Tensor | None = None
    """Error [B] from which on the loss is a straight line; None without one."""


@dataclass(frozen=True, eq=False)
class Diffusion(Objective):
    """Every diffusion objective. Coefficients are float64 on the CPU and rounded to float32 once, per batch."""

    drawn: ClassVar[type[DiffusionDraws]] = DiffusionDraws

    settings: DiffusionSettings
    schedule: schedules.Schedule
    target: Target
    noise_conditioning: NoiseConditioning
    """The network's noise conditioning."""
    input_scale: InputScale = unscaled
    cell_px: float = 1.0
    """Pixels of an image for each cell [h, w] of its clean sample."""
    sampled_px: int = 1
    """Area in pixels of the images that a run samples, for which its export is made."""
    learnt: Stateful = field(init=False)
    elements: ElementMean = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", masks.build(self.settings.mask))
        weighting = self.settings.weighting
        adaptive = weighting.name == "adaptive"
        learnt = AdaptiveWeight(weighting.adaptive_buckets, weighting.adaptive_decay) if adaptive else NothingLearnt()
        object.__setattr__(self, "learnt", learnt)

    @property
    def diffusion(self) -> Diffusion:
        return self

    def with_diffusion(self, diffusion: Diffusion) -> Diffusion:
        return diffusion

    def at(self, shape: tuple[int, ...], sampling: Visits | None = None) -> Diffusion:
        """The objective on the noise levels of clean samples of `shape` (C, h, w): those that are trained, or that this
        sampling visits.

        Only the levels change, not the network's input for a level. UserError for a shift of a schedule without one.
        """
        return self.on(self._levels(math.prod(shape[1:]) * self.cell_px, sampling))

    def sampled(self, sampling: Visits | None = None) -> Diffusion:
        """The objective on the noise levels of images of `sampled_px`; otherwise as `at`."""
        return self.on(self._levels(self.sampled_px, sampling))

    def _levels(self, area_px: float, sampling: Visits | None) -> ScheduleSettings:
        schedule = self.settings.schedule
        shift = None if sampling is None else sampling.shift_at(area_px)
        if shift is None:
            return schedule.at(area_px)
        if not schedule.acts("shift"):
            raise UserError(
                f"sampling.shift is {shift:g}, and schedule {schedule.name} has no shift: remove it; sigma_max, "
                "sigma_min and rho of objective.schedule say where its samplers stop",
                code="unused",
                setting="sampling.shift",
            )
        return schedule.shifted(shift)

    def on(self, settings: ScheduleSettings) -> Diffusion:
        """The objective on the noise levels of another schedule of its kind; what is learnt is shared."""
        if settings is self.settings.schedule:
            return self
        # Not `replace`: that runs __post_init__, and the copy would learn weights of its own.
        moved = copy(self)
        object.__setattr__(moved, "schedule", schedules.build(settings))
        return moved

    def times(self, quantile_B: Tensor) -> Tensor:
        """Training times [B] float64 at quantiles [B] float64 of the time law: 0 is the clean end."""
        return self.schedule.time(times.law(self.settings.times, quantile_B))

    def path(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(a, s) at times t, float64."""
        return self.schedule.path(t)

    def level(self, sigma: float) -> tuple[float, float, float]:
        """(t, a, s) where s/a is `sigma`, or at the noisiest level with some signal if the path has none so noisy."""
        ratio = torch.tensor(sigma, dtype=torch.float64, device="cpu")
        t = self.schedule.time_of(torch.ones_like(ratio), ratio)
        a, s = self.path(t)
        return float(t), float(a), float(s)

    def c_noise(self, t: Tensor) -> Tensor:
        """c_noise: the network's noise-level input, float64, at times t float64."""
        return self.noise_conditioning.at(self.schedule, t)

    def with_noise_conditioning(self, name: str, scale: float) -> Diffusion:
        """A fresh copy of this objective, nothing learnt yet, for a network conditioned on `name`; see
        noise_conditioning.choose. UserError where pure noise has no such number."""
        conditioning = noise_conditioning.choose(name, self.schedule, self.settings.schedule, scale)
        last = self.schedule.time(torch.ones((), dtype=torch.float64, device="cpu"))
        if not conditioning.at(self.schedule, last).isfinite():
            raise UserError(
                f"model.noise_conditioning is {name}, and this objective's schedule begins at pure noise, whose sigma "
                "is infinite: choose timestep, cosine_time or flow_time",
                code="conflict",
                setting="model.noise_conditioning",
            )
        return replace(self, noise_conditioning=conditioning)

    def weight(self, a: Tensor, s: Tensor) -> Tensor:
        """Weight of closed form of the squared error of y at (a, s), float64; 1 where weights are learnt."""
        p, q = self.target(a, s)
        return weights.weight(self.settings.weighting, a, s, a * q - s * p)

    def draws(
        self, seed: int, keys: np.ndarray, shape: tuple[int, ...], *, quantile: float | None = None
    ) -> DiffusionDraws:
        """All that `loss` needs. A fixed `quantile` is free of input perturbation and of timestep bias."""
        drawn = {"noise": noise(self.settings.noise, seed, keys, shape)}
        if quantile is None:
            uniform_B = torch.from_numpy(keyed.batch_uniforms(seed, "time", keys))
            quantile_B = times.biased(self.settings.timestep_bias, self.settings.schedule.num_steps, uniform_B)
            if self.settings.noise.input_perturbation:
                drawn["perturbation"] = perturbation(self.settings.noise, seed, keys, shape)
        else:
            assert 0 <= quantile < 1, quantile
            quantile_B = torch.full((len(keys),), quantile, dtype=torch.float64, device="cpu")
        # With a shift by size each bucket has its own levels.
        levels = self.at(shape)
        rounded_B = (quantile_B * 2.0**24).floor() * 2.0**-24  # to nearest could give 1
        return DiffusionDraws(**drawn, quantile=rounded_B.float(), **levels.level_at(levels.times(quantile_B)))

    def level_at(self, t_B: Tensor) -> dict[str, Tensor]:
        """The fields of the draws that follow from a time: at times [B] float64, each [B] float32."""
        a_B, s_B = self.path(t_B)
        p_B, q_B = self.target(a_B, s_B)
        level = {
            "c_noise": self.c_noise(t_B),
            "c_in": self.input_scale(a_B, s_B),
            "a": a_B,
            "s": s_B,
            "p": p_B,
            "q": q_B,
            "weight": self.weight(a_B, s_B),
        }
        if self.settings.loss.acts("huber_c"):
            share_B = t_B / self.settings.schedule.last_time
            level["threshold"] = distances.thresholds(self.settings.loss, share_B, s_B / a_B)
        # Rounded once, at the end: in float32 on the way the weights of the widest time laws overflow.
        return {name: value_B.float() for name, value_B in level.items()}

    def error(self, net: Net, x0_BCHW: Tensor, cond: Cond, draws: DiffusionDraws) -> Tensor:
        """The prediction of y less y [B, C, h, w], float32, on clean samples with noise of the draws."""
        x0_BCHW, eps_BCHW = x0_BCHW.float(), draws.noise
        a, s, p, q, c_in = (per_sample(each, x0_BCHW) for each in (draws.a, draws.s, draws.p, draws.q, draws.c_in))
        seen_BCHW = eps_BCHW if draws.perturbation is None else eps_BCHW + draws.perturbation
        x_BCHW = a * x0_BCHW + s * seen_BCHW
        y_BCHW = net(c_in * x_BCHW, draws.c_noise, cond)
        # float32 whatever the network computes in: the error is a small difference of numbers of the size of 1.
        return y_BCHW.float() - (p * x0_BCHW + q * eps_BCHW)

    def loss(self, nets: Nets, example: Example[DiffusionDraws]) -> LossTerms:
        """Weighted mean error of the prediction of y: squared, or by `settings.loss`."""
        draws = example.draws
        error_BCHW = self.error(nets.student, example.clean[IMAGE], example.cond[IMAGE], draws)
        apart_BCHW = distances.of(self.settings.loss, error_BCHW, draws.threshold)
        loss_B = draws.weight * self.elements.mean(apart_BCHW, draws.element_weight)
        if not isinstance(self.learnt, AdaptiveWeight):
            return LossTerms(loss_B=loss_B, quantile_B=draws.quantile)
        log_snr_B = 2.0 * (draws.a.log() - draws.s.log())
        return LossTerms(
            loss_B=self.learnt.weight(log_snr_B) * loss_B,
            quantile_B=draws.quantile,
            raw_loss_B=loss_B,
            log_snr_B=log_snr_B,
        )

    def predict(self, net: Net, x_BCHW: Tensor, t: Tensor | float, cond: Cond) -> Tensor:
        """The prediction y [B, C, h, w] at time t (a number, 0-dim or [B]), in the dtype of x_t."""
        t = torch.as_tensor(t, dtype=torch.float64, device="cpu")
        # On the CPU and from float64, as in training: a sampler must call the network by exactly the numbers it has
        # learnt.
        c_in = per_sample(self.input_scale(*self.path(t)), x_BCHW)
        c_noise = self.c_noise(t).to(torch.float32).expand(len(x_BCHW))
        return net(c_in * x_BCHW, c_noise.to(x_BCHW.device), cond).to(x_BCHW.dtype)

    def solve(self, x_BCHW: Tensor, y_BCHW: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """(x0, eps) [B, C, h, w] from x_t and y at (a, s), 0-dim or [B] float64.

        The inverse of the path and the target: x0 = (q x_t - s y)/d, eps = (a y - p x_t)/d.
        """
        p, q = self.target(a, s)
        d = a * q - s * p
        # Divided in float64 before anything meets x: at Stable Diffusion's noisiest level eps has d = 1 / 15, and
        # roundings grow by its inverse.
        x0_of_x, x0_of_y, eps_of_x, eps_of_y = (per_sample(c, x_BCHW) for c in (q / d, -s / d, -p / d, a / d))
        return x0_of_x * x_BCHW + x0_of_y * y_BCHW, eps_of_x * x_BCHW + eps_of_y * y_BCHW

    def denoise(self, net: Net, x_BCHW: Tensor, t: Tensor | float, cond: Cond) -> Tensor:
        """x0 [B, C, h, w] as the network sees it in x_t at time t (a number, 0-dim or [B])."""
        y_BCHW = self.predict(net, x_BCHW, t, cond)
        return self.solve(x_BCHW, y_BCHW, *self.path(torch.as_tensor(t, dtype=torch.float64, device="cpu")))[0]

    def grid(self, num_steps: int, spacing: str | list[float] = "trailing") -> Grid:
        """The noise levels of a sampler with `num_steps` calls of the denoiser. UserError where there are none.
        `spacing` may be the levels themselves, s / (a + s), the noisiest first."""
        if isinstance(spacing, str):
            return self.grid_at(self.schedule.stops(num_steps, spacing))
        s_N = torch.tensor(spacing, dtype=torch.float64, device="cpu")
        return self.grid_at(self.schedule.time_of(1 - s_N, s_N))

    def grid_at(self, t_N: Tensor) -> Grid:
        """The grid that visits the times `t_N` float64, noisiest first, and ends clean."""
        a_N, s_N = self.path(t_N)
        a, s = torch.cat([a_N, a_N.new_ones(1)]), torch.cat([s_N, s_N.new_zeros(1)])
        preserving = self.schedule.variance_preserving
        frame = torch.where(a > 0, a, 1.0) if preserving else torch.ones_like(a)
        return Grid(t_N=t_N, a=a, s=s, frame=frame, prior_std=1.0 if preserving else float(s[0]))


def build(settings: DiffusionSettings, target: Target, input_scale: InputScale = unscaled) -> Diffusion:
    """The objective that predicts `target` on the schedule of `settings`, conditioned on its time."""
    schedule = schedules.build(settings.schedule)
    conditioning = noise_conditioning.choose("auto", schedule, settings.schedule)
    return Diffusion(settings, schedule, target, conditioning, input_scale)


def per_sample(value: Tensor, x_BCHW: Tensor) -> Tensor:
    """Coefficients [B] as [B, 1, 1, 1] in the dtype and on the device of x; 0-dim ones stay (they act as numbers)."""
    if value.ndim == 0:
        return value
    return value.to(x_BCHW.device, x_BCHW.dtype).reshape(-1, *[1] * (x_BCHW.ndim - 1))
