"""Running means of training numbers that stay on the device until somebody reads them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from daguerre import devices
from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.types import LossTerms

QUARTILES = 4


class Meter:
    """Sums and counts by name since the last `read`; adding never waits for the device, reading does.

    Each device adds what its own samples gave; `read` and `state` put them together, so that all devices call them.
    """

    def __init__(self, device: torch.device, sharding: Sharding = UNSHARDED) -> None:
        self._device, self._sharding, self._wide = device, sharding, devices.widest(device)
        self._totals: dict[str, Tensor] = {}

    @torch.no_grad()
    def add_terms(self, terms: LossTerms, valid_B: Tensor) -> None:
        """Adds the per-sample losses and metrics of a micro-batch.

        Slots with valid 0 do not count, nor do samples whose loss is not finite: the guard counts those.
        """
        # The widest type: a mean over thousands of updates must not depend on how often it was read.
        counts_B = ((valid_B > 0) & torch.isfinite(terms.loss_B)).to(self._wide)
        for name, value_B in terms.metrics.items():
            self.add(name, torch.where(counts_B > 0, value_B.detach().to(self._wide), 0.0).sum(), counts_B.sum())
        loss_B = torch.where(counts_B > 0, terms.loss_B.detach().to(self._wide), 0.0)
        self.add("loss", loss_B.sum(), counts_B.sum())
        quartile_B = (terms.quantile_B * QUARTILES).long().clamp(0, QUARTILES - 1)
        # A product in place of index_add, whose order of addition is not fixed on a GPU.
        one_hot_QB = torch.arange(QUARTILES, device=self._device)[:, None] == quartile_B
        self.add("loss_quartile", one_hot_QB.to(self._wide) @ loss_B, one_hot_QB.to(self._wide) @ counts_B)

    def add_common(self, name: str, value: Tensor) -> None:
        """Adds one number that is equal on all devices to the mean called `name`, unless it is not finite."""
        # All devices have it, and their sums are added when they are read: it counts on one of them.
        counted = torch.isfinite(value) & (self._sharding.rank == 0)
        self.add(name, torch.where(counted, value, 0.0), counted.to(self._wide))

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Adds `total` over `count` to the mean called `name`; vectors are means apart."""
        entry = torch.stack([total.to(self._wide), count])
        self._totals[name] = self._totals[name] + entry if name in self._totals else entry

    def read(self) -> dict[str, float]:
        """All means since the last reading, `learning/` before each name; one without samples is left out."""
        values: dict[str, float] = {}
        for name, (totals, counts) in self.state().items():
            pairs = zip(totals.view(-1).tolist(), counts.view(-1).tolist(), strict=True)
            for index, (total, count) in enumerate(pairs):
                label = f"learning/{name}_{index}" if totals.ndim else f"learning/{name}"
                values |= {label: total / count} if count else {}
        self._totals = {}
        return values

    def state(self) -> dict[str, Tensor]:
        """The sums over all devices, for a checkpoint."""
        # `sum` works in place, and these sums go on.
        return {name: self._sharding.sum(entry.clone()) for name, entry in self._totals.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what `state` gave, whatever the devices were."""
        share = float(self._sharding.rank == 0)  # `state` adds the devices: one of them holds what was saved
        self._totals = {name: tensor.to(self._device, self._wide) * share for name, tensor in tensors.items()}
