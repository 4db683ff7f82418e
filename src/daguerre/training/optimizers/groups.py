"""Which trained parameters decay, and which a list of name patterns means. No optimizer here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from daguerre.errors import UserError
from daguerre.training.settings import OptimizerSettings

Parameters = Mapping[str, nn.Parameter]
"""Trained parameters by name, in the net's order."""

_SHOWN = 5


def decay_groups(settings: OptimizerSettings, trained: Parameters) -> list[dict[str, Any]]:
    """The parameters that decay, then those that do not, as groups of a torch optimizer; empty groups are left out."""
    groups = [
        {"params": [p for name, p in trained.items() if name in decayed], "weight_decay": decay}
        for decayed, decay in ((_decayed(settings, trained), settings.weight_decay), (_spared(settings, trained), 0.0))
    ]
    return [group for group in groups if group["params"]]


def _decayed(settings: OptimizerSettings, trained: Parameters) -> set[str]:
    return set(trained) - _spared(settings, trained)


def _spared(settings: OptimizerSettings, trained: Parameters) -> set[str]:
    """Without patterns: tensors of fewer than two dims, which are biases and norms."""
    patterns = settings.weight_decay_exclude
    if patterns is None:
        return {name for name, p in trained.items() if p.ndim < 2}
    return {name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns)}


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
