"""Groups of trained parameters by weight decay and learning rate, chosen by patterns of names."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch import nn

from daguerre.errors import UserError
from daguerre.training.precision import stochastic_rounding
from daguerre.training.settings import OptimizerSettings

Parameters = Mapping[str, nn.Parameter]
"""Trained parameters by name, in the net's order."""

_SHOWN = 5


def decay_groups(settings: OptimizerSettings, trained: Parameters) -> list[dict[str, Any]]:
    """Groups of a torch optimizer: for each learning rate and decay the parameters that decay, then those that do not.

    In addition to what torch knows, a group has `share`, its part of the learning rate of an update, and `pattern`,
    those in `learning_rates` and `learning_rate_factors` that it comes from ("" for none). Weights of 16 bits make
    several groups of limited size.
    """
    patterns, rates, factors = settings.weight_decay_exclude, settings.learning_rates, settings.learning_rate_factors
    # Decay of a norm's gain would scale all that lies behind it; biases are few.
    if patterns is None:  # biases and norms
        spared = {name for name, p in trained.items() if p.ndim < 2}
    else:
        spared = {name for name in trained if any(fnmatchcase(name, pattern) for pattern in patterns)}
    groups = []
    matching = (_matching(each, trained) for each in (rates, factors, settings.weight_decays))
    for (pattern, names), (factor, scaled), (decayed, decaying) in product(*matching):
        rate = rates.get(pattern, settings.learning_rate) * factors.get(factor, 1)
        label = " ".join(each for each in (pattern, factor) if each)
        here = names & scaled & decaying
        for decay, some in (
            (settings.weight_decays.get(decayed, settings.weight_decay), here - spared),
            (0.0, here & spared),
        ):
            facts = {"lr": rate, "weight_decay": decay, "share": rate / settings.learning_rate, "pattern": label}
            chosen = [p for name, p in trained.items() if name in some]
            # A group is what is widened at once: pieces bound the float32 memory of an update.
            groups += [{"params": piece, **facts} for piece in stochastic_rounding.pieces(chosen)]
    return groups


class ByGroup(torch.optim.Optimizer):
    """An optimizer that moves those of a group that have a gradient together."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loop has no closures
        """Moves all parameters that have a gradient. A group that has `step` counts its updates there."""
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            if moved := [p for p in group["params"] if p.grad is not None]:
                self._move(moved, group)

    def _move(self, moved: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Moves parameters of a group, each with a gradient."""
        raise NotImplementedError


def _matching(patterns: Iterable[str], trained: Parameters) -> list[tuple[str, set[str]]]:
    """The names that none of the patterns matches, under "", then those of each."""
    by_pattern = [(pattern, {name for name in trained if fnmatchcase(name, pattern)}) for pattern in patterns]
    return [("", set(trained).difference(*(names for _, names in by_pattern))), *by_pattern]


def check_rates(settings: OptimizerSettings, trained: Parameters) -> None:
    """UserError for a pattern of `learning_rates`, `learning_rate_factors` or `weight_decays` that matches nothing, and
    for a parameter that several match."""
    for field in ("learning_rates", "learning_rate_factors", "weight_decays"):
        patterns, setting = list(getattr(settings, field)), f"optimizer.{field}"
        check(patterns, trained, setting)
        for name in trained:
            matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
            if len(matching) > 1:
                raise UserError(
                    f"{setting}: {name} matches {' and '.join(map(repr, matching))}: write patterns so that only one "
                    "matches each parameter",
                    code="conflict",
                    setting=setting,
                )


def check(patterns: Sequence[str], trained: Parameters, setting: str) -> None:
    """UserError, with the nearest names or the networks that are trained, for a pattern that means no trained
    parameter."""
    networks = {name.partition(".")[0] for name in trained}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in trained):
            why = f"Similar names: {', '.join(_near(pattern, list(trained)))}"
            first = re.split(r"[.*?[]", pattern)[0]
            close = difflib.get_close_matches(first, networks, cutoff=0.5)
            if first and not close and not any(name.startswith(first) for name in networks):
                why = (
                    f"It starts with no network that is trained ({', '.join(sorted(networks))}): leave it out, start "
                    "it with *, or train the network: model.train_NETWORK=true, in a LoRA adapter.ranks.NETWORK=RANK"
                )
            text = f"{setting}: {pattern!r} matches no trained parameter. {why}"
            raise UserError(text, code="unknown", setting=setting)


def _near(pattern: str, names: list[str]) -> list[str]:
    """Names that share a part with the pattern's text, or are like it, or simply the first ones."""
    text = pattern.replace("*", "").replace("?", "").strip(".").lower()
    parts = {part for name in names for part in name.lower().split(".")}
    close = difflib.get_close_matches(text.rpartition(".")[2], parts, n=3, cutoff=0.5)
    related = [name for name in names if set(name.lower().split(".")) & set(close)]
    return (related or difflib.get_close_matches(text, names, n=_SHOWN, cutoff=0.3) or names)[:_SHOWN]
