"""Saved tensors that hold NaN or infinity: no run saves such, so the file was damaged before it was saved or forged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from daguerre.errors import UserError


def refuse_not_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    """UserError naming the first tensors that are not finite."""
    odd = sorted(name for name, each in tensors.items() if each.is_floating_point() and not torch.isfinite(each).all())
    if odd:
        shown = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        raise UserError(
            f"{what} hold NaN or infinity in {shown}: no run saves such numbers. Go back to another checkpoint "
            "(resume_from_checkpoint=step-...), or start a new run"
        )
