"""Exponential moving average of trained weights, in diffusers' warm-up form, counted in updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from daguerre.training.settings import EMASettings


def decay_at(step: int, largest: float) -> float:
    """Decay of update `step` (from 1): min(largest, (1 + n) / (10 + n)) with n = step - 1, and 0 at first.

    This is `diffusers.training_utils.EMAModel` with its default settings.
    """
    n = step - 1
    return 0.0 if n <= 0 else min(largest, (1 + n) / (10 + n))


@dataclass(frozen=True)
class EMA:
    """Averaged copies of the trained parameters, in float32, by the parameters' names."""

    settings: EMASettings
    parameters: Mapping[str, nn.Parameter]
    averages: Mapping[str, Tensor]

    @classmethod
    def of(cls, settings: EMASettings, net: nn.Module) -> EMA:
        """Starts from the trained parameters as they are."""
        parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
        return cls(settings, parameters, {n: p.detach().clone().float() for n, p in parameters.items()})

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the averages after update `step` (from 1)."""
        if not self.settings.enabled:
            return
        weight = 1.0 - decay_at(step, self.settings.decay)
        torch._foreach_lerp_(list(self.averages.values()), list(self.parameters.values()), weight)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back saved averages; names and shapes must be those of the trained parameters."""
        if tensors.keys() != self.averages.keys():
            odd = sorted(tensors.keys() ^ self.averages.keys())
            raise ValueError(f"the saved averages do not fit the trained parameters; they differ in {odd[:5]}")
        for name, average in self.averages.items():
            average.copy_(tensors[name])


@contextmanager
def swapped(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context these parameters are `values`; nothing is copied, and what they were comes back to the bit."""
    _swap(parameters, values)
    try:
        yield
    finally:
        _swap(parameters, values)


def _swap(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].data, value.data = value.data, parameters[name].data
