"""Which trained parameters decay, at which share of the learning rate each is moved, and what patterns of names mean.

No optimizer here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from daguerre.errors import UserError
from daguerre.training.precision import stochastic_rounding
from daguerre.training.settings import OptimizerSettings

Parameters = Mapping[str, nn.Parameter]
"""Trained parameters by name, in the net's order."""

_SHOWN = 5


def decay_groups(settings: OptimizerSettings, trained: Parameters) -> list[dict[str, Any]]:
    """Groups of a torch optimizer: for each learning rate the parameters that decay, then those that do not.

    Beside what torch knows, a group has `share`, its part of the learning rate of an update, and `pattern`, the one in
    `learning_rates` that it comes from ("" for none). Weights of 16 bits make several groups of limited size.
    """
    spared = _spared(settings, trained)
    groups = []
    for pattern, names in _by_rate(settings, trained).items():
        share = settings.learning_rates.get(pattern, settings.learning_rate) / settings.learning_rate
        for decay, some in ((settings.weight_decay, names - spared), (0.0, names & spared)):
            facts = {"weight_decay": decay, "share": share, "pattern": pattern}
            chosen = [p for name, p in trained.items() if name in some]
            groups += [{"params": piece, **facts} for piece in stochastic_rounding.pieces(chosen)]
    return groups


def _by_rate(settings: OptimizerSettings, trained: Parameters) -> dict[str, set[str]]:
    """Names by the pattern that gives them a learning rate of their own; first, under "", those that none does."""
    patterns = settings.learning_rates
    found = {pattern: {name for name in trained if fnmatchcase(name, pattern)} for pattern in patterns}
    return {"": set(trained).difference(*found.values())} | found


def _spared(settings: OptimizerSettings, trained: Parameters) -> set[str]:
    """Without patterns: tensors of fewer than two dims, which are biases and norms."""
    patterns = settings.weight_decay_exclude
    if patterns is None:
        return {name for name, p in trained.items() if p.ndim < 2}
    return {name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns)}


def check_rates(patterns: Sequence[str], trained: Parameters) -> None:
    """UserError for a pattern of `learning_rates` that matches nothing, and for a parameter that several match."""
    check(patterns, trained, "optimizer.learning_rates")
    for name in trained:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if len(matching) > 1:
            raise UserError(
                f"optimizer.learning_rates: {name} matches {' and '.join(map(repr, matching))}: write patterns of "
                "which one alone matches each parameter"
            )


def learning_rates(groups: Iterator[Mapping[str, Any]]) -> dict[str, float]:
    """Present learning rates by the patterns that have one of their own."""
    return {group["pattern"]: group["lr"] for group in groups if group["pattern"]}


def check(patterns: Sequence[str], trained: Parameters, setting: str) -> None:
    """UserError, with the nearest names, for a pattern that means no trained parameter."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in trained):
            near = ", ".join(_near(pattern, list(trained)))
            raise UserError(f"{setting}: {pattern!r} matches no trained parameter. Near names: {near}")


def _near(pattern: str, names: list[str]) -> list[str]:
    """Names that share a part with the pattern's text, or are like it, or simply the first ones."""
    text = pattern.replace("*", "").replace("?", "").strip(".").lower()
    parts = {part for name in names for part in name.lower().split(".")}
    close = difflib.get_close_matches(text.rpartition(".")[2], parts, n=3, cutoff=0.5)
    found = [name for name in names if set(name.lower().split(".")) & set(close)]
    return (found or difflib.get_close_matches(text, names, n=_SHOWN, cutoff=0.3) or names)[:_SHOWN]
