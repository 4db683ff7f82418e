"""Settings that objectives share: schedule, time law, weighting, noise. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from daguerre.settings import Settings


class ObjectiveSettings(Settings):
    """What every objective's `Settings` starts from. An objective's file narrows `name` and adds its own fields."""

    name: str
    """Name of the objective: a file in objectives."""


class ScheduleSettings(Settings):
    """How much signal and noise there is at each time."""

    name: Literal["scaled_linear", "cosine", "linear_flow", "edm"] = "scaled_linear"
    """scaled_linear: Stable Diffusion's 1000 betas; cosine: Stable Cascade's; linear_flow: (1 - t, t); edm: (1, sigma)."""
    num_train_timesteps: int = Field(1000, ge=2)
    """Timesteps of a discrete schedule (scaled_linear)."""
    beta_start: float = Field(0.00085, gt=0, lt=1)
    """First beta of scaled_linear."""
    beta_end: float = Field(0.012, gt=0, lt=1)
    """Last beta of scaled_linear."""
    shift: float = Field(1.0, gt=0)
    """Noise-to-signal ratio is multiplied by this (log-SNR minus 2 ln shift): above 1 for larger pictures."""
    zero_terminal_snr: bool = False
    """Shift and scale sqrt(alphas_cumprod) so that the last timestep is pure noise (arXiv 2305.08891, algorithm 1)."""


class TimesSettings(Settings):
    """The law from which training times are drawn."""

    name: Literal["uniform", "log_normal", "logit_normal"] = "uniform"
    """uniform over the schedule; log_normal: ln sigma ~ N(mean, std) (EDM); logit_normal: logit t ~ N(mean, std) (SD3)."""
    mean: float = 0.0
    """Mean of the normal law (EDM: -1.2)."""
    std: float = Field(1.0, gt=0)
    """Standard deviation of the normal law (EDM: 1.2)."""


class WeightingSettings(Settings):
    """Weight of each noise level in the loss."""

    name: Literal["none", "min_snr", "p2"] = "none"
    """none: 1 in prediction space; min_snr: arXiv 2303.09556; p2: arXiv 2204.00227."""
    snr_gamma: float = Field(5.0, gt=0)
    """min_snr: SNR above this counts as this."""
    p2_k: float = Field(1.0, gt=0)
    """p2: k of 1 / (k + SNR)^gamma."""
    p2_gamma: float = Field(1.0, ge=0)
    """p2: gamma of 1 / (k + SNR)^gamma."""


class NoiseSettings(Settings):
    """What the noise is made of."""

    offset: float = Field(0.0, ge=0)
    """Offset noise: this times one more normal number a sample and channel is added to the noise; the target includes it."""
