"""Running means of training numbers that stay on the device until somebody reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from daguerre.types import LossTerms

QUARTILES = 4


class Meter:
    """Weighted sums since the last `read`; adding never waits for the device, reading does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._start_quartiles()

    def _start_quartiles(self) -> None:
        self._quartile_sums = torch.zeros(QUARTILES, dtype=torch.float64, device=self._device)
        self._quartile_counts = torch.zeros(QUARTILES, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def add_terms(self, terms: LossTerms, valid_B: Tensor) -> None:
        """Adds the per-sample losses and metrics of a micro-batch; slots with valid 0 do not count."""
        loss_B = torch.where(valid_B > 0, terms.loss_B.detach(), 0.0).double()
        for name, value_B in {"loss": loss_B, **terms.metrics}.items():
            masked_B = torch.where(valid_B > 0, value_B.detach(), 0.0).double()
            self.add(name, masked_B.sum(), valid_B.double().sum())
        quartile_B = (terms.quantile_B * QUARTILES).long().clamp(0, QUARTILES - 1)
        self._quartile_sums.index_add_(0, quartile_B, loss_B)
        self._quartile_counts.index_add_(0, quartile_B, valid_B.double())

    def add(self, name: str, total: Tensor, count: Tensor | float = 1.0) -> None:
        """Adds `total` over `count` to the mean called `name`."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._sums[name] = self._sums.get(name, zero) + total
        self._counts[name] = self._counts.get(name, zero) + count

    def read(self) -> Mapping[str, float]:
        """All means since the last reading, `learning/` before each name; one without samples is left out."""
        values = {n: (self._sums[n] / self._counts[n]).item() for n in self._sums if self._counts[n] > 0}
        quartiles = (self._quartile_sums / self._quartile_counts).tolist()
        values |= {f"loss_quartile_{i}": v for i, v in enumerate(quartiles) if not math.isnan(v)}
        self._sums, self._counts = {}, {}
        self._start_quartiles()
        return {f"learning/{name}": value for name, value in values.items()}
