"""Schedules: time to (a, s), the amounts of signal and noise, and back; where samplers stop.

All of it in float64 on the CPU, whatever torch's default device is. What is predicted and how it is weighted is in
algebra.py and weights.py; the law from which training times are drawn is in times.py; the input by which a network
knows a noise level is in noise_conditioning.py. SNR = (a/s)^2.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import acos, cos, hypot, pi
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from daguerre.errors import UserError
from daguerre.objectives.levels import elementwise
from daguerre.objectives.settings import ScheduleSettings


@dataclass(frozen=True, eq=False)
class Schedule(ABC):
    """Maps time to signal and noise. Later times are noisier."""

    settings: ScheduleSettings
    variance_preserving: ClassVar[bool] = True
    """Whether a^2 + s^2 = 1 at all times."""

    def time(self, drawn: Tensor) -> Tensor:
        """Training time of a number drawn from a time law (a share of the schedule, or sigma)."""
        return drawn

    @abstractmethod
    def path(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(a, s) at times t float64 of any shape."""

    @abstractmethod
    def time_of(self, a: Tensor, s: Tensor) -> Tensor:
        """Times float64 at which s/a is that of (a, s), of any path; the nearest time for ratios that no time has.

        Pure noise (a = 0) is the last time. A ratio above all finite ones is the noisiest time with some signal.
        """

    def stops(self, num_steps: int, spacing: str) -> Tensor:
        """Times [num_steps] float64 at which a sampler calls the denoiser, noisiest first. UserError if it cannot."""
        return even_stops(num_steps, spacing)


def from_sigma(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Variance-preserving (a, s) of the noise-to-signal ratio sigma in (0, inf]."""
    # Each from sigma itself: sqrt(1 - a^2) would lose the digits of a small sigma, and sigma / sqrt(1 + sigma^2) is inf
    # / inf at pure noise.
    return 1.0 / (1.0 + sigma**2).sqrt(), 1.0 / (1.0 + (1.0 / sigma) ** 2).sqrt()


def scaled_linear_sigmas(settings: ScheduleSettings) -> Tensor:
    """sigma = s/a [N] float64 of Stable Diffusion's betas, which are even in their square root; inf where a = 0."""
    # float64: small sigmas are the difference between 1 and a product of factors near 1.
    root = torch.linspace(
        settings.beta_start**0.5,
        settings.beta_end**0.5,
        settings.num_train_timesteps,
        dtype=torch.float64,
        device="cpu",
    )
    a = (1.0 - root**2).cumprod(0).sqrt()
    if settings.zero_terminal_snr:  # Lin et al. 2024 (arXiv 2305.08891), algorithm 1
        a = (a - a[-1]) * (a[0] / (a[0] - a[-1]))
    return settings.shift * (1.0 - a**2).sqrt() / a


@dataclass(frozen=True, eq=False)
class ScaledLinear(Schedule):
    """Discrete: t = 0..N-1 indexes a table of sigma.

    Between two timesteps sigma is a straight line, as in diffusers' EulerDiscreteScheduler; where its upper end is
    infinite (zero terminal SNR), any time above the lower one is pure noise. Training draws whole timesteps only.
    """

    sigma_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma_N", scaled_linear_sigmas(self.settings))

    def time(self, drawn: Tensor) -> Tensor:
        n = self.settings.num_train_timesteps
        return (drawn * n).floor().clamp(max=n - 1)

    def path(self, t: Tensor) -> tuple[Tensor, Tensor]:
        low = t.floor()
        low_sigma = self.sigma_N[low.long()]
        high_sigma = self.sigma_N[low.long().add(1).clamp(max=len(self.sigma_N) - 1)]
        between = low_sigma + (t - low) * (high_sigma - low_sigma)
        # With zero terminal SNR the upper end is infinite, and 0 times infinity is NaN on the whole timestep below it.
        return from_sigma(torch.where(t == low, low_sigma, between))

    def time_of(self, a: Tensor, s: Tensor) -> Tensor:
        """A time within 1e-9 of a whole timestep is that timestep, so that rounding in s/a changes none."""
        sigma, last = s / a, len(self.sigma_N) - 1
        known_N = self.sigma_N[self.sigma_N.isfinite()].numpy()  # np.interp makes NaN of an infinite end
        t = torch.from_numpy(np.asarray(np.interp(sigma.numpy(), known_N, np.arange(len(known_N)))))
        t = torch.where((t - t.round()).abs() < 1e-9, t.round(), t)
        return torch.where(sigma.isinf(), float(last), t)

    def stops(self, num_steps: int, spacing: str) -> Tensor:
        """As diffusers' DDIMScheduler (trailing, leading with steps_offset 1) and EulerDiscreteScheduler (all three).

        `linspace` times are not rounded, as in EulerDiscreteScheduler; DDIMScheduler rounds them.
        """
        n = self.settings.num_train_timesteps
        if not 1 <= num_steps <= n:
            raise UserError(
                f"num_inference_steps is {num_steps}: a schedule of {n} timesteps takes 1 to {n}",
                setting="sampling.num_inference_steps",
            )
        if spacing == "trailing":
            # arange with a step that is no whole number may give one time more, by rounding.
            times = np.round(np.arange(n, 0, -n / num_steps))[:num_steps] - 1
        elif spacing == "leading":
            self._check_leading(num_steps)
            times = (np.arange(num_steps) * (n // num_steps))[::-1] + 1.0
        else:
            if num_steps == 1:
                raise UserError(
                    "one step of linspace spacing would start at the clean end: use trailing",
                    code="conflict",
                    setting="sampling.timestep_spacing",
                )
            times = np.linspace(0, n - 1, num_steps)[::-1]
        return torch.from_numpy(times.copy())  # torch takes no negative strides

    def _check_leading(self, num_steps: int) -> None:
        n = self.settings.num_train_timesteps
        if self.settings.zero_terminal_snr:
            raise UserError(
                "timestep_spacing is leading, which never visits the last timestep, and zero_terminal_snr is on, "
                "which makes that timestep the only pure noise: use trailing (arXiv 2305.08891, section 3.3)",
                code="conflict",
                setting="sampling.timestep_spacing",
            )
        if num_steps == n:
            raise UserError(
                f"leading spacing takes at most {n - 1} steps on {n} timesteps: use trailing",
                code="conflict",
                setting="sampling.num_inference_steps",
            )


_VARIANCES = 1e-4, 0.9999
"""Bounds of a^2 of the cosine schedule."""


@dataclass(frozen=True, eq=False)
class Cosine(Schedule):
    """Continuous: t in [0, 1]; a^2 is a squared cosine, clamped as in Stable Cascade.

    Nichol and Dhariwal 2021 (arXiv 2102.09672, eq. 17). log-SNR lies in [-9.2102, 9.2102], before the shift and after.
    """

    offset: ClassVar[float] = 0.008

    def path(self, t: Tensor) -> tuple[Tensor, Tensor]:
        angle = (self.offset + t) / (1 + self.offset) * (pi / 2)
        variance = ((elementwise.cos(angle) / self._first()) ** 2).clamp(*_VARIANCES)
        noisiest, cleanest = (((1 - end) / end) ** 0.5 for end in _VARIANCES)
        return from_sigma((self.settings.shift * ((1 - variance) / variance).sqrt()).clamp(cleanest, noisiest))

    def _first(self) -> float:
        return cos(self.offset / (1 + self.offset) * (pi / 2))

    def time_of(self, a: Tensor, s: Tensor) -> Tensor:
        return elementwise.each(self._time_at, s / a)

    def _time_at(self, sigma: float) -> float:
        root_variance = 1 / hypot(1.0, sigma / self.settings.shift)
        angle = acos(root_variance * self._first())
        return min(1.0, max(0.0, angle / (pi / 2) * (1 + self.offset) - self.offset))


@dataclass(frozen=True, eq=False)
class LinearFlow(Schedule):
    """Continuous: t in [0, 1] is the amount of noise, (a, s) = (1 - t, t).

    The shift moves the times that are drawn and visited, t' = shift t / (1 + (shift - 1) t) (Esser et al. 2024,
    arXiv 2403.03206, eq. 23), so that t always names the noise level, as in diffusers.
    """

    variance_preserving: ClassVar[bool] = False

    def time(self, drawn: Tensor) -> Tensor:
        return self.settings.shift * drawn / (1 + (self.settings.shift - 1) * drawn)

    def path(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return 1.0 - t, t

    def time_of(self, a: Tensor, s: Tensor) -> Tensor:
        return s / (a + s)

    def stops(self, num_steps: int, spacing: str) -> Tensor:
        times = self.time(even_stops(num_steps, spacing))
        if self.settings.terminal is None or num_steps == 1:  # one step begins at pure noise, whatever its end
            return times
        # As diffusers' stretch_shift_to_terminal: the last signal is moved to its end, and the others in proportion.
        signal = 1 - times
        return 1 - signal * ((1 - self.settings.terminal) / signal[-1])


@dataclass(frozen=True, eq=False)
class EDM(Schedule):
    """Variance exploding: t is sigma itself, (a, s) = (1, sigma).

    Karras et al. 2022 (arXiv 2206.00364), eq. 5 and table 1.
    """

    variance_preserving: ClassVar[bool] = False

    def path(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(t), t

    def time_of(self, a: Tensor, s: Tensor) -> Tensor:
        return s / a

    def stops(self, num_steps: int, spacing: str) -> Tensor:
        check_trailing(num_steps, spacing)
        high, low = (v ** (1 / self.settings.rho) for v in (self.settings.sigma_max, self.settings.sigma_min))
        times = torch.linspace(high, low, num_steps, dtype=torch.float64, device="cpu")
        return times**self.settings.rho


def even_stops(num_steps: int, spacing: str) -> Tensor:
    """Times 1, 1 - 1/n, ..., 1/n of a continuous schedule on [0, 1]."""
    check_trailing(num_steps, spacing)
    return torch.arange(num_steps, 0, -1, dtype=torch.float64, device="cpu") / num_steps


def check_trailing(num_steps: int, spacing: str) -> None:
    """UserError where a continuous schedule is asked for what only a discrete one has."""
    if num_steps < 1:
        raise UserError(
            f"num_inference_steps is {num_steps}: it must be at least 1", setting="sampling.num_inference_steps"
        )
    if spacing != "trailing":
        raise UserError(
            f"timestep_spacing is {spacing}, which has no meaning on a continuous schedule: leave it at trailing",
            code="conflict",
            setting="sampling.timestep_spacing",
        )


def build(settings: ScheduleSettings) -> Schedule:
    kinds: dict[str, type[ScaledLinear | Cosine | LinearFlow | EDM]]
    kinds = {"scaled_linear": ScaledLinear, "cosine": Cosine, "linear_flow": LinearFlow, "edm": EDM}
    return kinds[settings.name](settings)
