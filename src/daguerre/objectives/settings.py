"""Settings that objectives share: schedule, time law, weighting, noise; what cannot be combined is refused here.

No torch here. What holds for one objective alone (its defaults, its own refusals) is in that objective's file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from daguerre.errors import UserError
from daguerre.settings import Choice, Settings, Unused

if TYPE_CHECKING:
    from torch import nn

    from daguerre.objectives.networks.source import NetworkSource

CONTINUOUS_STEPS = 1000
"""Steps in which the timestep bias of a schedule without timesteps counts."""


class MaskSettings(Settings):
    """The loss of a sample by its mask: each element of the error counts by w = max(mask, outside_weight), where the
    mask is 1 for white, 0 for black, and averaged to the size of what is trained on. A sample without a mask has
    w = 1."""

    outside_weight: float = Field(0.1, ge=0, lt=1)
    """Weight of what the mask leaves out. Above 0 the rest of the image is still learnt a little, so that it does not
    come out as noise."""
    normalise: bool = False
    """Divide by the sum of the weights, not by the number of elements: samples with small masks then count as much as
    others."""


class NetworkSettings(Settings):
    """Base of the settings of a network that a loss is computed with besides the student."""

    splits: ClassVar[bool] = False
    """Whether a mesh may split its parameters."""

    @property
    def place(self) -> str | None:
        """The place of its weights; None for random ones."""
        return None

    def network(self, source: NetworkSource) -> nn.Module | Any:
        """The network, on the CPU: a module, or what the source gives with its facts. Its parameters that require a
        gradient are trained with the student, and kept by checkpoints. UserError for weights that are not there, or
        that are others than the settings ask for."""
        raise NotImplementedError


class ObjectiveSettings(Settings):
    """Base of every objective's `Settings`. An objective's file narrows `name` and adds its own fields."""

    reconstructs: ClassVar[bool] = False
    """Whether a net that is trained with it makes images again, rather than generates them."""

    name: str
    """Name of the objective: a file in objectives."""
    mask: MaskSettings | None = Field(None, exclude_if=lambda mask: mask is None)
    """Counts the parts of images by their masks; `{}` for the usual values. Default: all parts count equally."""

    @property
    def learns_from_itself(self) -> bool:
        """True if the student before its first update is its teacher, and so must be a model that generates."""
        return False

    @property
    def refers(self) -> bool:
        """True if the loss compares with the student before its first update (`REFERENCE`)."""
        return self.learns_from_itself

    @property
    def networks(self) -> Mapping[str, NetworkSettings]:
        """Settings of the networks that the loss is computed with besides the student, by role."""
        return {}

    def in_use(self) -> Self:
        """The settings without the frozen ones of these networks, where no loss is computed."""
        return self


class ResolutionShiftSettings(Choice):
    """The shift of a schedule by the size of the images: more of them in an image hide less of it at equal noise.

    Sizes are pixels of the image; of one that is not square its area counts.
    """

    acts_with: ClassVar[dict[str, tuple[str, ...]]] = {
        "base_px": ("area",),
        **dict.fromkeys(("low_px", "high_px", "low_mu", "high_mu"), ("linear_mu",)),
    }

    name: Literal["none", "area", "linear_mu"] = "none"
    """none: one shift for all sizes; area: times sqrt(area) / base_px (SD3, arXiv 2403.03206, eq. 23; simple
    diffusion, arXiv 2301.11093); linear_mu: e^mu, mu a straight line in the area (Flux)."""
    base_px: float = Field(512.0, ge=1e-3, le=1e6)
    """area: side of the square for which `shift` holds as it is."""
    low_px: float = Field(256.0, ge=1e-3, le=1e6)
    """linear_mu: side of the square that has low_mu."""
    high_px: float = Field(1024.0, ge=1e-3, le=1e6)
    """linear_mu: side of the square that has high_mu (Qwen-Image: 1448.1547)."""
    low_mu: float = Field(0.5, ge=-10, le=10)
    """linear_mu: ln shift at low_px."""
    high_mu: float = Field(1.15, ge=-10, le=10)
    """linear_mu: ln shift at high_px (Qwen-Image: 0.9)."""

    @model_validator(mode="after")
    def _sizes_rise(self) -> Self:
        if not self.low_px < self.high_px:
            raise ValueError(f"got low_px {self.low_px:g} and high_px {self.high_px:g}: low_px must be the smaller one")
        return self

    def factor(self, area_px: float) -> float:
        """The factor on `shift` for images of this area in pixels; at most e^100, at least e^-100."""
        area_px = min(area_px, 1e300)  # of a config that is not checked yet: a whole number of any size
        if self.name == "area":
            return math.sqrt(area_px) / self.base_px
        if self.name == "none":
            return 1.0
        share = (area_px - self.low_px**2) / (self.high_px**2 - self.low_px**2)
        return math.exp(max(-100.0, min(100.0, self.low_mu + (self.high_mu - self.low_mu) * share)))


class ScheduleSettings(Choice):
    """Amount of signal and noise at each time."""

    acts_with: ClassVar[dict[str, tuple[str, ...]]] = {
        "num_train_timesteps": ("scaled_linear",),
        "beta_start": ("scaled_linear",),
        "beta_end": ("scaled_linear",),
        "zero_terminal_snr": ("scaled_linear",),
        "shift": ("scaled_linear", "cosine", "linear_flow"),
        "resolution_shift": ("scaled_linear", "cosine", "linear_flow"),
        "terminal": ("linear_flow",),
        "sigma_min": ("edm",),
        "sigma_max": ("edm",),
        "rho": ("edm",),
    }
    instead: ClassVar[dict[str, str]] = {
        "shift": "add ln shift to times.mean, and multiply sigma_max by shift for sampling"
    }
    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("shift",), lambda own: own.resolution_shift.name == "linear_mu", "linear_mu sets the whole shift"),
    )

    name: Literal["scaled_linear", "cosine", "linear_flow", "edm"] = "scaled_linear"
    """scaled_linear: Stable Diffusion's; cosine: Stable Cascade's; linear_flow: (1 - t, t); edm: (1, sigma)."""
    num_train_timesteps: int = Field(1000, ge=2)
    """Timesteps of a discrete schedule (scaled_linear)."""
    beta_start: float = Field(0.00085, gt=0, lt=1)
    """First beta of scaled_linear."""
    beta_end: float = Field(0.012, gt=0, lt=1)
    """Last beta of scaled_linear."""
    shift: float = Field(1.0, gt=0)
    """Noise-to-signal ratio is multiplied by this (log-SNR minus 2 ln shift): above 1 for larger images."""
    resolution_shift: ResolutionShiftSettings = ResolutionShiftSettings()
    """A shift that follows the size of the images: each bucket has its own."""
    terminal: float | None = Field(None, gt=0, lt=1)
    """linear_flow: noise level of the last call of a sampler, to which the levels between are stretched (Qwen-Image:
    0.02). null: the level that follows from the shift."""
    zero_terminal_snr: bool = False
    """Shift and scale sqrt(alphas_cumprod) so that the last timestep is pure noise (arXiv 2305.08891, algorithm 1)."""
    sigma_min: float = Field(0.002, gt=0)
    """edm: noise level of the last call of a sampler."""
    sigma_max: float = Field(80.0, gt=0)
    """edm: noise level a sampler starts from."""
    rho: float = Field(7.0, gt=0)
    """edm: sampling steps are even in sigma^(1/rho): larger puts more of them at low noise."""

    @model_validator(mode="after")
    def _ranges_rise(self) -> Self:
        for low, high in (("beta_start", "beta_end"), ("sigma_min", "sigma_max")):
            if not getattr(self, low) < getattr(self, high):
                got = f"{low} {getattr(self, low)} and {high} {getattr(self, high)}"
                raise ValueError(f"got {got}: {low} must be the smaller one")
        return self

    def at(self, area_px: float) -> ScheduleSettings:
        """The settings for images of this area in pixels, their shift multiplied out."""
        if self.resolution_shift.name == "none":
            return self
        return self.shifted(self.shift * self.resolution_shift.factor(area_px))

    def shifted(self, shift: float) -> ScheduleSettings:
        """The settings with this shift, whatever the size."""
        if self.resolution_shift.name == "none" and shift == self.shift:
            return self
        return self.model_copy(update={"shift": shift, "resolution_shift": ResolutionShiftSettings()})

    @property
    def last_time(self) -> float:
        """Time after the noisiest level: the number of timesteps of a discrete schedule, 1 of a continuous one."""
        return float(self.num_train_timesteps) if self.acts("num_train_timesteps") else 1.0

    @property
    def num_steps(self) -> int:
        """Steps in which a timestep bias counts: the timesteps of a discrete schedule, 1000 of a continuous one."""
        return self.num_train_timesteps if self.acts("num_train_timesteps") else CONTINUOUS_STEPS


class TimesSettings(Choice):
    """The law from which training times are drawn."""

    acts_with: ClassVar[dict[str, tuple[str, ...]]] = {
        "mean": ("log_normal", "logit_normal"),
        "std": ("log_normal", "logit_normal"),
    }

    name: Literal["uniform", "log_normal", "logit_normal"] = "uniform"
    """uniform over the schedule; log_normal: normal in ln sigma (EDM); logit_normal: normal in logit t (SD3)."""
    mean: float = Field(0.0, ge=-20, le=20)
    """Mean of the normal law (EDM: -1.2)."""
    std: float = Field(1.0, gt=0, le=5)
    """Standard deviation of the normal law (EDM: 1.2)."""


class TimestepBiasSettings(Choice):
    """Noise levels that are drawn more often (or less often) than the time law has it. The loss is not weighted.

    Counted in steps from the clean end: of N steps, each holds 1/N of the time law's draws. With the uniform law on a
    discrete schedule they are its timesteps; a continuous schedule has 1000.
    """

    acts_with: ClassVar[dict[str, tuple[str, ...]]] = {
        "multiplier": ("earlier", "later", "range"),
        "portion": ("earlier", "later"),
        "begin": ("range",),
        "end": ("range",),
    }

    name: Literal["none", "earlier", "later", "range"] = "none"
    """none; earlier: the cleanest `portion` of the steps; later: the noisiest; range: steps `begin` to `end`."""
    multiplier: float = Field(1.0, gt=0, allow_inf_nan=False)
    """How many times as often a step of the slice is drawn as one outside; below 1 less often."""
    portion: float = Field(0.25, gt=0, le=1)
    """earlier, later: share of the steps in the slice; whole steps, rounded down."""
    begin: int = Field(0, ge=0)
    """range: first step of the slice."""
    end: int | None = Field(None, ge=1)
    """range: first step after the slice; null: up to the noisy end."""

    def slice(self, num_steps: int) -> tuple[int, int]:
        """(first step, first step after) of the slice among `num_steps`; UserError where it does not lie in them."""
        if self.name == "none":
            return 0, num_steps
        count = int(self.portion * num_steps)
        if self.name != "range":
            if count == 0:
                raise UserError(f"portion is {self.portion}: that is less than one of {num_steps} steps: raise it")
            return (0, count) if self.name == "earlier" else (num_steps - count, num_steps)
        end = num_steps if self.end is None else self.end
        if end > num_steps:
            raise UserError(f"end is {end}: there are {num_steps} steps, so it is at most {num_steps}")
        if self.begin >= end:
            raise UserError(f"begin is {self.begin} and end is {end}: begin must be below end, which is not included")
        return self.begin, end


class WeightingSettings(Choice):
    """Weight of each noise level in the loss."""

    acts_with: ClassVar[dict[str, tuple[str, ...]]] = {
        "snr_gamma": ("min_snr", "soft_min_snr"),
        "p2_k": ("p2",),
        "p2_gamma": ("p2",),
        "adaptive_buckets": ("adaptive",),
        "adaptive_decay": ("adaptive",),
    }

    name: Literal["none", "min_snr", "soft_min_snr", "debiased", "p2", "adaptive"] = "none"
    """none: 1 in prediction space; min_snr: arXiv 2303.09556; soft_min_snr: arXiv 2401.11605; debiased: arXiv
    2310.08442; p2: arXiv 2204.00227; adaptive: one over the running mean loss at each noise level (Stable Cascade)."""
    snr_gamma: float = Field(5.0, gt=0)
    """min_snr: SNR above this counts as this; soft_min_snr: the weight of x0 bends to this instead."""
    p2_k: float = Field(1.0, gt=0)
    """p2: k of the weight 1 / (k + SNR)^gamma of the noise error."""
    p2_gamma: float = Field(1.0, gt=0)
    """p2: gamma of the weight 1 / (k + SNR)^gamma of the noise error."""
    adaptive_buckets: int = Field(300, ge=3, le=100_000)
    """adaptive: number of noise levels that are distinguished, even in log-SNR from -10 to 10."""
    adaptive_decay: float = Field(0.99, ge=0, lt=1)
    """adaptive: share that the running mean of a level keeps for each sample that hits it."""


class LossSettings(Choice):
    """The measure of a prediction's error."""

    acts_with: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(
        ("huber_c", "huber_schedule", "huber_scale"), ("huber", "smooth_l1")
    )
    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("huber_scale",), lambda own: own.huber_schedule == "snr", "no effect with huber_schedule=snr"),
    )

    name: Literal["l2", "l1", "huber", "smooth_l1"] = "l2"
    """l2: its square; l1: its size; huber, smooth_l1: pseudo-Huber, the square up to a threshold and a straight line
    beyond (sd-scripts' formulas): huber equals l2 near 0, smooth_l1 twice l1 far from it."""
    huber_c: float = Field(0.1, gt=0, le=1)
    """The threshold, or its least value where it follows the noise."""
    huber_schedule: Literal["snr", "exponential", "constant"] = "snr"
    """How the threshold follows the noise: snr: (1 - c) / (1 + sigma)^2 + c; exponential: c^t, t from 0 at the clean
    end to 1; constant: c."""
    huber_scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """exponential and constant: the threshold is multiplied by this."""


class NoiseSettings(Settings):
    """Composition of the noise. All of it is drawn by the samples' keys."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("offset_per",), lambda noise: noise.offset == 0, "no effect while offset is 0"),
        Unused(("pyramid_size",), lambda noise: noise.pyramid == 0, "no effect while pyramid is 0"),
    )

    offset: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Offset noise: this times one more normal number a sample and channel is added to noise and target."""
    offset_per: Literal["channel", "sample"] = "channel"
    """channel: each channel of a sample has its own offset; sample: one offset for all channels of a sample."""
    pyramid: float = Field(0.0, ge=0, le=1)
    """Pyramid noise: normal numbers on grids of half the size, a quarter and so on are added, each with this times the
    amplitude of the finer one (Stable Cascade's Stage B: 0.75). The sum is scaled back to unit variance."""
    pyramid_size: int = Field(16, ge=1)
    """Grids of the pyramid whose shorter side is longer than this are left out."""
    input_perturbation: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Training only: this times more noise is added to the noise of the network's input, not of the target (arXiv
    2301.11706, which finds 0.1 best)."""


class DiffusionSettings(ObjectiveSettings):
    """Base of the `Settings` of every diffusion objective.

    An objective's file gives its sections other defaults where it needs them. A section of a recipe that leaves `name`
    out, or repeats the default one, starts from the objective's defaults: `times.std` alone stays log-normal in edm.
    """

    schedules: ClassVar[tuple[str, ...]] = ("scaled_linear", "cosine")
    """The schedules on which the objective's target is defined."""

    schedule: ScheduleSettings = ScheduleSettings()
    """How much signal and noise there is at each time."""
    times: TimesSettings = TimesSettings()
    """The law from which training times are drawn."""
    timestep_bias: TimestepBiasSettings = TimestepBiasSettings()
    """Noise levels that are drawn more often, or less often."""
    loss: LossSettings = Field(LossSettings(), exclude_if=lambda own: own == LossSettings())
    """The measure of a prediction's error."""
    weighting: WeightingSettings = WeightingSettings()
    """Weight of each noise level in the loss."""
    noise: NoiseSettings = NoiseSettings()
    """What the noise is made of."""

    @model_validator(mode="before")
    @classmethod
    # Before validation: pydantic fills a section from the section's own class, not from the objective's default for it.
    def _sections_start_from_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        filled = dict(given)
        for section in ("schedule", "times", "weighting"):
            default, value = cls.model_fields[section].default, given.get(section)
            if isinstance(value, dict) and value.get("name", default.name) == default.name:
                filled[section] = default.model_dump(exclude_unset=True) | value
        return filled

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        schedule, times = self.schedule.name, self.times.name
        if schedule not in self.schedules:
            allowed = " or ".join(self.schedules)
            raise ValueError(
                f"schedule.name: {self.name!r} is not defined on {schedule!r}: set schedule.name to {allowed}, "
                "or choose another objective (scaled_linear, cosine: eps, x0, v; linear_flow: flow; edm: edm)"
            )
        if (times == "log_normal") != (schedule == "edm"):
            drawn = "sigma, from 0 to infinity" if times == "log_normal" else "a share of the schedule, from 0 to 1"
            allowed = "log_normal" if schedule == "edm" else "uniform or logit_normal"
            raise ValueError(
                f"times.name: {times!r} draws {drawn}, which is no time of schedule {schedule!r}: "
                f"set times.name to {allowed}"
            )
        if self.loss.acts("huber_schedule") and self.loss.huber_schedule == "exponential" and schedule == "edm":
            raise ValueError("loss.huber_schedule: edm has no last time to which exponential could fall: use snr")
        try:
            self.timestep_bias.slice(self.schedule.num_steps)
        except ValueError as error:
            raise ValueError(f"timestep_bias.{error}") from None
        return self
