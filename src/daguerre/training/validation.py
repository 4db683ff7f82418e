"""Validation: the loss on held-out samples with fixed noise, level by level. The loop does not know of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.types import Batch, LossTerms

Made = TypeVar("Made")


def one_behind(made: Iterable[Made]) -> Iterator[Made]:
    """The same items, each when the next one was made: what reads them waits for the device, which then has work."""
    held: list[Made] = []
    for item in made:
        yield from held
        held = [item]
    yield from held


@torch.no_grad()
def validation_losses(
    batches: Iterable[Batch],
    losses_at: Callable[[Batch, Sequence[float]], Iterable[LossTerms]],
    num_levels: int,
    sharding: Sharding = UNSHARDED,
) -> dict[str, float]:
    """Mean loss at each of `num_levels` noise levels, 0 the cleanest, and the mean over all.

    `losses_at(batch, quantiles)` draws its noise by the batch's keys, so the same weights always give the same
    numbers. Levels are the mid-points of equal parts of the objective's law of times. Slots with `valid_B` 0
    do not count. `batches` are this device's, as many as any other's. Names are as in metrics.jsonl: `validation/loss`
    and `validation/loss_level_0` onwards; what else the terms hold (`metrics`) is measured at the cleanest level.
    """
    sums = dict.fromkeys(["samples", *(f"loss_level_{level}" for level in range(num_levels))], 0.0)
    levels = [(level + 0.5) / num_levels for level in range(num_levels)]
    for batch, terms_by_level in one_behind((batch, [*losses_at(batch, levels)]) for batch in batches):
        sums["samples"] += float(batch.valid_B.sum())
        for level, terms in enumerate(terms_by_level):
            # Learnt weights change with training: two validations by them could not be compared.
            loss_B = terms.loss_B if terms.raw_loss_B is None else terms.raw_loss_B
            by_name = {f"loss_level_{level}": loss_B, **({} if level else terms.metrics)}
            for name, value_B in by_name.items():
                total = float(torch.where(batch.valid_B > 0, value_B.cpu().double(), 0.0).sum())
                sums[name] = sums.get(name, 0.0) + total
    # A device without samples does not know which metrics there are. All add in one order, and get one number.
    everyone = [own for own in sharding.gather(sums) if own["samples"]]
    totals = {name: sum(own[name] for own in everyone) for name in (everyone[0] if everyone else ())}
    count = totals.pop("samples", 0.0)
    if count == 0:
        return {}
    means = {f"validation/{name}": total / count for name, total in totals.items()}
    loss = sum(means[f"validation/loss_level_{level}"] for level in range(num_levels)) / num_levels
    return {"validation/loss": loss, **means}
