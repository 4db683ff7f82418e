"""A network's noise-level input: a function of (a, s) that belongs to the network.

Each is the time of a schedule at which s/a is the same, in a unit: a network has learnt some clock and reads every
level off it, whatever schedule the level comes from. So a shift, which moves the levels that are drawn and visited,
never changes what a level is called. The table is in docs/objectives.md. Shape letters: B samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from daguerre.objectives.levels import elementwise, schedules
from daguerre.objectives.levels.schedules import Schedule
from daguerre.objectives.settings import ScheduleSettings

NAMES = {"scaled_linear": "timestep", "cosine": "cosine_time", "linear_flow": "flow_time", "edm": "log_sigma"}
"""Schedules, and the input that their time becomes."""


@dataclass(frozen=True, eq=False)
class NoiseConditioning:
    """A clock and the unit of its time."""

    name: str
    """`auto`, or one of NAMES."""
    clock: Schedule
    """The schedule whose time is the input."""
    unit: Callable[[Tensor], Tensor]
    """From that time to the number, float64."""
    last: float | None
    """The number at the noisy end, where that of clean samples is 0; None for ln(sigma), which has no ends."""

    def __call__(self, a: Tensor, s: Tensor) -> Tensor:
        """The number [B] float64 for the levels (a, s) [B] float64 of any path; 0-dim for 0-dim levels."""
        return self.unit(self.clock.time_of(a, s))

    def at(self, schedule: Schedule, t: Tensor) -> Tensor:
        """The number at times t of a schedule; of the clock itself, t is taken as it is."""
        # A time of its own schedule as it is: on the way through (a, s) it would be rounded.
        return self.unit(t) if schedule is self.clock else self(*schedule.path(t))


def choose(name: str, schedule: Schedule, settings: ScheduleSettings, scale: float = 1000.0) -> NoiseConditioning:
    """The conditioning `name` of a network that is trained on `schedule`, which these settings made.

    `auto`: the clock is that schedule itself. `timestep`: index in the table of scaled_linear betas without a shift,
    those of `settings` or, on another schedule, Stable Diffusion's; a level between two has a fraction, one beyond the
    table its end. `cosine_time`: the time of Stable Cascade's cosine law (as its code's CosineTNoiseCond), and
    `flow_time`: s / (a + s), both in [0, 1] times `scale`. `log_sigma`: ln(s/a) / 4 (Karras et al. 2022, table 1).
    """
    if name == "auto":
        return NoiseConditioning(name, schedule, _unit(NAMES[settings.name], scale), _last(settings, scale))
    kind = next(kind for kind, its_input in NAMES.items() if its_input == name)
    is_own = kind == settings.name == "scaled_linear"
    # Without the shift: the network has learnt the clock of the published betas.
    own = settings.shifted(1.0) if is_own else ScheduleSettings.model_validate({"name": kind})
    return NoiseConditioning(name, schedules.build(own), _unit(name, scale), _last(own, scale))


def _last(clock: ScheduleSettings, scale: float) -> float | None:
    if clock.name == "edm":
        return None
    return clock.last_time if clock.name == "scaled_linear" else scale * clock.last_time


def _unit(name: str, scale: float) -> Callable[[Tensor], Tensor]:
    if name == "log_sigma":
        return lambda sigma: elementwise.log(sigma) / 4.0
    return (lambda t: t) if name == "timestep" else (lambda t: scale * t)
