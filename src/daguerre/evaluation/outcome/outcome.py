"""The outcome of an adapter's run as a document: numbers of each saved update and strength, and of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from daguerre.assembly.parts import Components
from daguerre.checkpoint.atomic import make_folder, write_json_atomically
from daguerre.errors import UserError
from daguerre.evaluation.formulas import outcome
from daguerre.evaluation.formulas.outcome import Features, Found
from daguerre.evaluation.outcome.features import ModelFeatures
from daguerre.evaluation.outcome.prompts import Lists

NAME = "compare.json"


class Cell(NamedTuple):
    """Weights that are compared with the base."""

    step: int
    strength: float


def check(parts: Components, strengths: Sequence[float] = (1.0,)) -> None:
    """UserError for adapters that have no strength, or not these ones, and for a model that reads pictures."""
    attached = parts.attached
    if 0.0 not in attached.strengths:
        raise UserError(
            "compare switches an adapter off, and nothing of this run can be: whole weights were "
            "trained, or words alone",
            code="unsupported",
        )
    if attached.images:
        raise UserError(
            f"compare generates from prompts alone, and this model reads {', '.join(sorted(attached.images))}, too",
            code="unsupported",
        )
    if not attached.scales and (odd := [each for each in strengths if each != 1]):
        raise UserError(
            f"strengths: {odd[0]:g}: this kind of adapter has no strength but 0 and 1: strengths=1",
            code="unsupported",
            setting="strengths",
        )


def document(
    lists: Lists,
    features: Any,
    pictures_PD: np.ndarray,
    base: Features,
    cells: Mapping[Cell, Features],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """The numbers, and all that they depend on; `more` is the protocol. Features are as the network gave them."""
    # A network's own features have a large common part, which published ones are trained not to have.
    whole = np.concatenate([*base])
    centre_D = whole.mean(0, dtype=np.float64) if isinstance(features, ModelFeatures) else np.zeros(whole.shape[1])
    base = Features(*(outcome.unit(rows, centre_D) for rows in base))
    each = {cell: Features(*(outcome.unit(rows, centre_D) for rows in own)) for cell, own in cells.items()}
    captions = np.array(lists.pictures.texts)
    same_NP = np.array(lists.trained.texts)[:, None] == captions
    scale = outcome.unrelated(base.base_ND, lists.base.texts)
    found, best = outcome.found(outcome.unit(pictures_PD, centre_D), same_NP, base, each, scale)
    return {
        **lists.document(),
        **more,
        "features": features.label,
        "features_about": features.about,
        "unrelated": scale,
        "cells": [{**cell._asdict(), **_row(own, len(found) == 1)} for cell, own in found.items()],
        "best": best._asdict() if best is not None and len(found) > 1 else None,
        "step": max(cell.step for cell in found),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _row(found: Found, is_alone: bool) -> dict[str, Any]:
    numbers = {}
    for name, own in found.numbers.items():
        if name == "balance" and is_alone:  # it is a share of the best of several
            continue
        row: dict[str, Any] = {"value": own.value}
        row |= {} if own.of_base is None else {"base": own.of_base}
        row |= {} if own.interval is None else {"low": own.interval[0], "high": own.interval[1]}
        numbers[name] = row
    behind = {} if found.behind is None else {"behind": [*found.behind]}
    return {"numbers": numbers, **behind, "destroyed": found.destroyed}


def write(folder: Path, found: Mapping[str, Any]) -> Path:
    """The document as compare.json in a folder."""
    make_folder(folder)
    write_json_atomically(folder / NAME, found)
    return folder / NAME
