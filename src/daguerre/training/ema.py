"""Moving averages of trained weights, counted in updates: one to evaluate with, and profiles to rebuild others from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.training import post_hoc
from daguerre.training.guard import check_finite, misfits
from daguerre.training.optimizers.one_pass import Average
from daguerre.training.precision import stochastic_rounding
from daguerre.training.settings import EMASettings


def decay_at(settings: EMASettings, step: int) -> float:
    """Decay of update `step` (from 1), in the form that the settings name; 1 where the average stands still.

    diffusers: min(decay, (1 + n) / (10 + n)) with n = step - 1, and 0 at first (`training_utils.EMAModel`).
    mindone: decay * (1 - exp(-step / ramp_steps)). stable_cascade: in every `every_steps`th update, `decay`, and 0 (a
    copy of the weights) up to update `start_steps`. Averages that start from `path` have their warm-up behind them.
    """
    warm = settings.path is not None
    if settings.name == "mindone":
        # expm1: 1 - exp(-x) of a small x has few digits.
        return settings.decay * (1.0 if warm else -math.expm1(-step / settings.ramp_steps))
    if settings.name == "stable_cascade":
        moves = step % settings.every_steps == 0
        return (settings.decay if warm or step > settings.start_steps else 0.0) if moves else 1.0
    if warm:
        return settings.decay
    n = step - 1
    return 0.0 if n <= 0 else min(settings.decay, (1 + n) / (10 + n))


def profile_file(width: float) -> str:
    """The name under which a checkpoint holds the profile of a width: `post_hoc_0_05` for .05."""
    return f"post_hoc_{width}".replace(".", "_")


@dataclass(frozen=True)
class EMA:
    """Averaged copies of the trained parameters, in float32, by the parameters' names."""

    settings: EMASettings
    parameters: Mapping[str, nn.Parameter]
    averages: Mapping[str, Tensor]
    """Weights to evaluate with; empty if the average is switched off."""
    profiles: Mapping[float, Mapping[str, Tensor]]
    """Power-function averages by their width."""

    @classmethod
    def of(cls, settings: EMASettings, parameters: Mapping[str, nn.Parameter]) -> EMA:
        """Starts from the trained parameters as they are."""

        def copy() -> dict[str, Tensor]:
            # copy=True: float32 weights would otherwise be their own average.
            return {name: p.detach().to(torch.float32, copy=True) for name, p in parameters.items()}

        return cls(settings, parameters, copy() if settings.enabled else {}, {w: copy() for w in settings.post_hoc})

    def next(self, step: int) -> Average | None:
        """The average to evaluate with and its share after update `step` (from 1); None if it stands still."""
        share = 1.0 - decay_at(self.settings, step) if self.settings.enabled else 0.0
        return Average({self.parameters[name]: a for name, a in self.averages.items()}, share) if share else None

    def update(self, step: int, moved: bool = False) -> None:
        """Moves the averages after update `step` (from 1); `moved`: that of `next` has been moved."""
        decay = decay_at(self.settings, step)
        if self.settings.enabled and decay < 1 and not moved:
            self._move(self.averages, 1.0 - decay)
        for width, profile in self.profiles.items():
            self._move(profile, 1.0 - post_hoc.decay_at(step, post_hoc.exponent(width)))

    @torch.no_grad()
    def _move(self, averages: Mapping[str, Tensor], weight: float) -> None:
        by_parameter = {self.parameters[name]: average for name, average in averages.items()}
        # In pieces: widening all weights of 16 bits at once would take twice their memory for a moment.
        for piece in stochastic_rounding.pieces(list(by_parameter)):
            torch._foreach_lerp_([by_parameter[p] for p in piece], [p.float() for p in piece], weight)

    @torch.no_grad()
    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over other weights, of every trained parameter, as the average."""
        for name, average in self.averages.items():
            average.copy_(tensors[name])

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files that averages may have in a checkpoint."""
        return ("ema", *map(profile_file, self.profiles))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All averages by file and name: `ema`, and one file a profile."""
        return {file: dict(averages) for file, averages in self._every().items() if averages}

    def load(self, files: Mapping[str, Mapping[str, Tensor]], anew: Collection[str] = ()) -> None:
        """Puts back what `tensors` gave; names and shapes must be those of the trained parameters. Those of the files
        in `anew` start from the parameters as they are."""
        for file, averages in self._every().items():
            if file in anew:
                for name, average in averages.items():
                    average.copy_(self.parameters[name].detach())
                continue
            saved = files.get(file, {}) if averages else {}
            if problems := misfits(averages, saved):
                raise UserError(f"the saved averages do not match: {problems}", code="conflict")
            check_finite("the saved averages", saved)
            for name, average in averages.items():
                average.copy_(saved[name])

    def _every(self) -> dict[str, Mapping[str, Tensor]]:
        return dict(zip(self.files, [self.averages, *self.profiles.values()], strict=True))
