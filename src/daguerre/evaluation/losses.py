"""Validation losses of a checkpoint by sample and noise level: noise is a function of sample and quantile alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from daguerre.assembly.parts import Components
from daguerre.checkpoint.atomic import make_folder
from daguerre.data.dataset import Dataset
from daguerre.data.loading import loader
from daguerre.errors import UserError
from daguerre.evaluation import blocks
from daguerre.evaluation.metric import Incomplete
from daguerre.generation.jobs import TaskShard
from daguerre.objectives.objective import AVERAGE
from daguerre.tracking.progress import Counter
from daguerre.training.validation import one_behind

_BATCH = 16


def kept(
    folder: Path,
    part: TaskShard,
    parts_by: Mapping[str, Callable[[], Components]],
    held_out: Callable[[Components], Dataset],
    quantiles: Sequence[float],
    num_samples: int,
) -> dict[str, np.ndarray]:
    """[n, quantiles] float64 for each set of weights in `parts_by`, from files of the folder if they are there. The
    first process computes them; Incomplete for the others until then."""
    make_folder(folder)
    found = {}
    for weights, load in parts_by.items():
        name = array_name(weights, quantiles, num_samples)
        path = folder / f"{name}.npy"
        known = blocks.sound(path)
        if known is None:
            if part.index:
                raise Incomplete(name)
            parts = load()
            known = by_sample(parts, held_out(parts), quantiles, num_samples)
            blocks.save(path, known)
        found[weights] = known
    return found


def array_name(weights: str, quantiles: Sequence[float], num_samples: int) -> str:
    """The name of the losses by these weights among the arrays of a folder."""
    digest = sha256(f"{list(quantiles)} {num_samples}".encode()).hexdigest()[:8]
    return f"losses-{weights}-{digest}"


def by_sample(parts: Components, held_out: Dataset, quantiles: Sequence[float], num_samples: int) -> np.ndarray:
    """[n, quantiles] float64 as of `each_sample`. UserError without such samples."""
    _, found = each_sample(parts, held_out, quantiles, num_samples)
    if not len(found):
        raise UserError("there is no held-out sample: set data.held_out_fraction, or leave validation_loss out")
    return found


class Seen(NamedTuple):
    """A sample of which losses were computed."""

    name: str
    text: str
    """Its caption."""


@torch.no_grad()
def each_sample(
    parts: Components, dataset: Dataset, quantiles: Sequence[float], num_samples: int
) -> tuple[list[Seen], np.ndarray]:
    """The first samples that can be decoded, and [n, quantiles] float64: the loss of each, without learnt weights, by
    the weights that the net holds."""
    parts = replace(parts, others={AVERAGE: parts.net, **parts.others})  # as in a run's validation
    parts.net.eval()
    rows: list[np.ndarray] = []
    seen: list[Seen] = []
    total = num_samples if dataset.size is None else min(num_samples, dataset.size)
    with Counter("validation loss", total) as counter:
        made = loader.fixed_batches(
            dataset, num_samples, lambda _: _BATCH, images=parts.images, columns=parts.columns, alone=parts.is_ragged
        )
        for batch, found_at in one_behind((batch, [*parts.losses_at(batch, quantiles)]) for batch in made):
            each = (terms.loss_B if terms.raw_loss_B is None else terms.raw_loss_B for terms in found_at)
            columns = [loss_B.cpu().double().numpy() for loss_B in each]
            valid_B = batch.valid_B.numpy() > 0
            rows.append(np.stack(columns, axis=1)[valid_B])
            about = zip(batch.names, batch.texts, valid_B.tolist(), strict=True)
            seen += [Seen(name, text) for name, text, valid in about if valid]
            counter.add(len(rows[-1]))
    return seen, np.concatenate(rows) if rows else np.zeros((0, len(quantiles)))
