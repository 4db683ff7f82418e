"""The strength that peft's config in a header gives the layers of a component: alpha and rank, and patterns of them."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daguerre.errors import UserError
from daguerre.models.parts.text.names import with_wrapper

_Patterns = list[tuple[re.Pattern[str], float]]
_SAID = {"true": True, "false": False, "none": False}


class Scales:
    """The scales that peft's config gives the layers of a component."""

    def __init__(self, path: Path, component: str, numbers: Mapping[str, Any]) -> None:
        own = {key.removeprefix(f"{component}."): v for key, v in numbers.items() if key.startswith(f"{component}.")}
        self.whose = f"{path}: peft's config of {component}"
        self.is_rslora = self._truth(own.get("use_rslora"))
        self.alpha, self.alphas = self._of(own, "lora_alpha" if "lora_alpha" in own else "alpha", "alpha_pattern")
        self.rank, self.ranks = self._of(own, "r", "rank_pattern")

    def of(self, layer: str, rank: int | None) -> float:
        """alpha / rank, or alpha / sqrt(rank); by the config's rank for factors that show none. 1 without a config."""
        alpha = _of_layer(layer, self.alpha, self.alphas)
        rank_or_config = rank or _of_layer(layer, self.rank, self.ranks)
        if alpha is None or rank_or_config is None:
            return 1.0
        return alpha / (rank_or_config**0.5 if self.is_rslora else rank_or_config)

    def _of(self, config: Mapping[str, Any], key: str, patterns: str) -> tuple[float | None, _Patterns]:
        """A number of peft's config, and those of layers by patterns of their names."""
        given = {} if config.get(patterns) is None else config[patterns]
        if not isinstance(given, Mapping):
            raise self._unlike(patterns, given, "a mapping of layers' names to numbers")
        by_pattern = []
        for pattern, number in given.items():
            try:
                meant = re.compile(rf"(.*\.)?({pattern})")
            except (re.error, ArithmeticError, RecursionError) as error:
                raise self._unlike(patterns, pattern, f"a regular expression ({error})") from error
            by_pattern.append((meant, self._number(patterns, number)))
        return self._number(key, config[key]) if key in config else None, by_pattern

    def _number(self, key: str, given: Any) -> float:
        """UserError for what is no number by which an addition can be strong, 0 among it: a file without effect."""
        try:
            found = math.nan if isinstance(given, bool) else float(given)
        except (TypeError, ValueError, ArithmeticError):
            found = math.nan
        least = "above" if key in ("r", "rank_pattern") else "other than"
        if not math.isfinite(found) or found == 0 or (found < 0 and least == "above"):
            raise self._unlike(key, given, f"a number {least} 0")
        return found

    def _unlike(self, key: str, given: Any, wanted: str) -> UserError:
        return UserError(f"{self.whose} has {key}={given!r}: it must be {wanted}", code="damaged")

    def _truth(self, given: Any) -> bool:
        """A bool, also as text, which is true of any word in Python."""
        found = _SAID.get(str(given).lower())
        if found is None:
            raise UserError(f"{self.whose} has use_rslora={given!r}, neither true nor false", code="damaged")
        return found


def _of_layer(layer: str, usual: float | None, patterns: _Patterns) -> float | None:
    """The number of the first pattern that fits a layer, else the usual one."""
    names = (layer, with_wrapper(layer))
    return next((number for pattern, number in patterns if any(map(pattern.fullmatch, names))), usual)
