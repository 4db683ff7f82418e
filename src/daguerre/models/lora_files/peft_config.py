"""peft's config of additions to the layers of one component, as diffusers and peft read it next to their tensors."""

import re
from collections import Counter
from typing import Any

from peft import LoHaConfig, LoraConfig

from daguerre.errors import UserError
from daguerre.models.lora_files.addition import COLUMNS, DIFF, DOWN, MAGNITUDE, MIDDLE, Addition


def of(additions: list[Addition]) -> dict[str, Any]:
    """The config under which peft computes these additions: the usual rank and alpha, and the others by name.

    UserError where no config of peft means them.
    """
    if mixed := {_kind(each) for each in additions} - {_kind(additions[0])}:
        raise UserError(
            f"peft has no config for {_kind(additions[0])} and {mixed.pop()} in one component: merge them into a model",
            code="unsupported",
        )
    numbers = {each.layer: (each.rank or 1, each.scale * (each.rank or 1)) for each in additions}
    (rank, alpha), _ = Counter(numbers.values()).most_common(1)[0]
    given = {
        "r": rank,
        "rank_pattern": {re.escape(name): own for name, (own, _) in numbers.items() if own != rank},
        "alpha_pattern": {re.escape(name): own for name, (_, own) in numbers.items() if own != alpha},
        "target_modules": [*numbers],
    }
    config: dict[str, Any] = _config(_kind(additions[0]), alpha, given).to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def _kind(addition: Addition) -> str:
    if DIFF in addition.factors:
        return "a sum of a whole weight or bias"
    if MIDDLE in addition.factors or any(name in addition.factors for name in ("hada_t1", "lokr_t2")):
        return "a Tucker decomposition"
    if COLUMNS in addition.factors or (MAGNITUDE in addition.factors and DOWN not in addition.factors):
        return "a DoRA over inputs, or of LoHa or LoKr,"
    if DOWN in addition.factors:
        return "dora" if MAGNITUDE in addition.factors else "lora"
    return "loha" if "hada_w1_a" in addition.factors else "lokr"


def _config(kind: str, alpha: float, given: dict[str, Any]) -> Any:
    if kind in ("lora", "dora"):
        return LoraConfig(lora_alpha=alpha, use_dora=kind == "dora", **given)  # type: ignore[arg-type]  # any number
    if kind == "loha":
        return LoHaConfig(alpha=alpha, **given)  # type: ignore[arg-type]
    why = "peft decides by the rank which factors are whole" if kind == "lokr" else "peft has none"
    raise UserError(f"{kind} cannot be written for peft: {why}. Write format=kohya, or merge it", code="unsupported")
