"""The scale of the loss under float16, whose gradients would vanish without one, and the overflows that it causes.

Everything stays on the device: the host reads it when it reads numbers anyway.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

# torch's GradScaler starts and grows like this. It is not used: it asks the device whether to step in every update.
_FIRST, _SMALLEST, _LARGEST = 2.0**16, 1.0, 2.0**24
_GROWS_AFTER = 2000
"""Updates in a row without an overflow after which the scale doubles."""


class Scaler:
    """Multiplies the loss before the backward pass: by 1, as float32 and bfloat16 need it."""

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as the backward pass gets it."""
        return loss

    def inverse(self) -> Tensor | None:
        """The factor that makes gradients those of the loss; None for one."""
        return None

    def moved(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Notes an update; returns whether the scale alone made it non-finite (0-dim bool on the device)."""
        return torch.zeros_like(norm, dtype=torch.bool)

    def read(self) -> dict[str, float]:
        """Numbers to log. Reads the device."""
        return {}

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what `state` gave."""


class DynamicScale(Scaler):
    """A power of two, as large as float16 lets it be (Micikevicius et al. 2018, arXiv 1710.03740).

    It is halved after an overflow, an update with a finite loss and a gradient that is not, and doubles after 2000
    updates in a row without one. Overflows are how the scale finds its size: they are skipped, and no fault. A loss
    that is not finite is not its doing, nor is a gradient that is not finite at the smallest scale of 1: so a fault
    of the data or of the learning rate counts as one, after 24 halvings at most.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(_FIRST, device=device)
        self._quiet = torch.tensor(0, dtype=torch.int32, device=device)
        self._overflows = torch.tensor(0, dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def inverse(self) -> Tensor:
        return 1.0 / self.scale  # a power of two: nothing is rounded

    @torch.no_grad()
    def moved(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Halves or doubles the scale where it is time to."""
        overflow = torch.isfinite(loss) & ~torch.isfinite(norm) & (self.scale > _SMALLEST)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        self._quiet = torch.where(overflow, 0, self._quiet + finite)
        grown = torch.where(self._quiet >= _GROWS_AFTER, self.scale * 2.0, self.scale)
        self._quiet = torch.where(self._quiet >= _GROWS_AFTER, 0, self._quiet)
        # In place: passes that were recorded read this very memory.
        self.scale.copy_(torch.where(overflow, self.scale * 0.5, grown).clamp(_SMALLEST, _LARGEST))
        self._overflows = self._overflows + overflow
        return overflow

    def read(self) -> dict[str, float]:
        """The scale, and how often it was too large in the whole run."""
        return {"learning/loss_scale": self.scale.item(), "learning/loss_scale_overflows": self._overflows.item()}

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "quiet": self._quiet, "overflows": self._overflows}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        device = self.scale.device
        self.scale, self._quiet, self._overflows = (
            tensors[name].to(device) for name in ("scale", "quiet", "overflows")
        )
