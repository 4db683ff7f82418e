"""Validation: the loss on held-out samples with fixed noise, level by level. The loop does not know of it."""

from collections.abc import Callable, Iterable

import torch

from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.types import Batch, LossTerms


@torch.no_grad()
def validation_losses(
    batches: Iterable[Batch],
    loss_at: Callable[[Batch, float], LossTerms],
    num_levels: int,
    sharding: Sharding = UNSHARDED,
) -> dict[str, float]:
    """Mean loss at each of `num_levels` noise levels, 0 the cleanest, and the mean over all.

    `loss_at(batch, quantile)` draws its noise by the batch's keys, so the same weights always give the same
    numbers. Levels are the mid-points of equal parts of the objective's law of times. Slots with `valid_B` 0
    do not count. `batches` are this device's, as many as any other's. Names are as in metrics.jsonl: `validation/loss`
    and `validation/loss_level_0` onwards.
    """
    sums = [0.0] * (num_levels + 1)
    for batch in batches:
        sums[num_levels] += float(batch.valid_B.sum())
        for level in range(num_levels):
            terms = loss_at(batch, (level + 0.5) / num_levels)
            loss_B = (terms.loss_B if terms.raw_loss_B is None else terms.raw_loss_B).double().cpu()
            sums[level] += float(torch.where(batch.valid_B > 0, loss_B, 0.0).sum())
    *totals, count = (sum(each) for each in zip(*sharding.gather(sums), strict=True))
    if count == 0:
        return {}
    levels = {f"validation/loss_level_{level}": total / count for level, total in enumerate(totals)}
    return {"validation/loss": sum(levels.values()) / num_levels, **levels}
