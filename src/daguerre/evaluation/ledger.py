"""The loss ledger: which trained pictures a model finds harder or easier than others at the same noise.

Each picture's loss at fixed quantiles of the law of times, with noise that is a function of sample and quantile alone,
minus the mean of all pictures at that quantile: so a picture is compared with what is usual at its noise level. The
highest are hard or wrongly captioned, the lowest memorized.
"""

import csv
import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from daguerre.assembly.parts import Components
from daguerre.checkpoint.atomic import make_folder, write_bytes_atomically, write_json_atomically
from daguerre.data.dataset import Dataset
from daguerre.errors import UserError
from daguerre.evaluation import losses

QUANTILES = (0.2, 0.4, 0.6, 0.8)
"""Of the objective's law of times; 0 is the clean end."""
NAME = "ledger.json"
_ENDS = 100
"""Pictures of each end that the document has; the table has all."""


def measured(
    parts_by: Mapping[str, Callable[[], Components]], trained: Callable[[Components], Dataset], step: int | None
) -> dict[str, Any]:
    """The ledger by each set of weights: `means` at each quantile, and `pictures`, the highest of them first, each with
    its losses minus these means. UserError for an endless source."""
    means: dict[str, list[float]] = {}
    rows: dict[str, np.ndarray] = {}
    looks: list[losses.Seen] = []
    for weights, load in parts_by.items():
        parts = load()
        dataset = trained(parts)
        if dataset.size is None:
            raise UserError("ledger: an endless source has no pictures to list", code="unsupported", setting="ledger")
        looks, found = losses.each_sample(parts, dataset, QUANTILES, sys.maxsize)
        means[weights] = found.mean(axis=0).tolist()
        rows[weights] = found - found.mean(axis=0)
    by = next(reversed(rows))  # the averaged weights, where there are some
    order = np.argsort(-rows[by].mean(axis=1), kind="stable")
    pictures = [
        {"name": looks[i].name, "caption": looks[i].text, "score": float(rows[by][i].mean())}
        | {weights: own[i].tolist() for weights, own in rows.items()}
        for i in order.tolist()
    ]
    about = {"step": step, "by": by, "quantiles": [*QUANTILES], "means": means, "count": len(pictures)}
    return about | {"pictures": pictures}


def write(folder: Path, ledger: Mapping[str, Any]) -> list[Path]:
    """The ledger as ledger.csv with a line for each picture, and as ledger.json with the pictures at both ends."""
    make_folder(folder)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = [(weights, i) for weights in ledger["means"] for i in range(len(QUANTILES))]
    table.writerow(["name", "score", *(f"{weights}_{QUANTILES[i]:g}" for weights, i in columns), "caption"])
    for one in ledger["pictures"]:
        numbers = [f"{one[weights][i]:.6g}" for weights, i in columns]
        table.writerow([one["name"], f"{one['score']:.6g}", *numbers, one["caption"]])
    paths = [folder / "ledger.csv", folder / NAME]
    write_bytes_atomically(paths[0], text.getvalue().encode(errors="backslashreplace"))
    pictures = ledger["pictures"]
    ends = pictures if len(pictures) <= 2 * _ENDS else [*pictures[:_ENDS], *pictures[-_ENDS:]]
    write_json_atomically(paths[1], {**ledger, "pictures": ends})  # last: it says that both are there
    return paths


def lines(ledger: Mapping[str, Any], count: int = 5) -> list[str]:
    """The ends of the ledger, for a terminal."""
    pictures = ledger["pictures"]
    ends = [("highest (hard, or wrongly captioned)", pictures[:count]), ("lowest (memorized)", pictures[-count:][::-1])]
    found = [f"loss minus the mean of {len(pictures):,} pictures at the same noise, by the {ledger['by']} weights"]
    for what, some in ends:
        found.append(f"  {what}")
        found += [f"    {one['score']:+.4f}  {one['name']}  {one['caption'][:60]}" for one in some]
    return found
