"""Words for the classes of a labelled data set: `idx_to_prompt` of recipes, and ImageNet's own names.

A label is a whole number or a text such as `n01440764`. `captions.py` makes captions of the words.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from daguerre.credentials import redact
from daguerre.data.images.headers import Undecodable
from daguerre.errors import UserError
from daguerre.storage import local_files
from daguerre.unicode import is_text

IMAGENET = "imagenet"
"""Stands in a recipe for the shipped names of ImageNet's 1,000 classes."""
FILE_BYTES = 1 << 26
"""Largest JSON file of names."""
_IMAGENET_FILE = Path(__file__).parent.parent / "assets" / "imagenet_classes.txt"
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_EXPECTED = 'a map such as {"0": "tench", "1": "goldfish"} or a list such as ["tench", "goldfish"]'


@dataclass(frozen=True)
class Classes:
    """A text for each class."""

    prompts: Mapping[str, str]
    """By label, whole numbers in digits."""

    def text(self, label: object) -> str:
        """The text for a label: a whole number, or text or bytes. `Undecodable` without one."""
        try:
            return self.prompts[plain(label)]
        except KeyError:
            raise Undecodable("class without a text in idx_to_prompt") from None


def plain(label: object) -> str:
    """A label as the maps write it: 7, 7.0, "7", " 007\\n" and b"7" are all "7"."""
    if isinstance(label, Integral):
        return str(int(label))
    if isinstance(label, Real) and float(label).is_integer():
        return str(int(float(label)))
    text = label.decode("utf-8", "replace") if isinstance(label, bytes) else str(label)
    text = text.strip()
    return str(int(text)) if _WHOLE.fullmatch(text) else text


def _text_keys(given: Any) -> Any:
    """Keys as text: whole numbers in digits."""
    if not isinstance(given, dict):
        return given
    return _without_twins([(str(key), value) for key, value in given.items()])


def _checked(given: str | dict[str, str] | tuple[str, ...]) -> str | dict[str, str] | tuple[str, ...]:
    if isinstance(given, str):
        if not given.strip():
            raise UserError(f"expected {_EXPECTED}, the path of a JSON file with either, or {IMAGENET}")
        return str(redact(given))
    _prompts(given)
    return given


Labels = Annotated[str | dict[str, str] | tuple[str, ...], BeforeValidator(_text_keys), AfterValidator(_checked)]
"""A setting: `imagenet`, the path of a JSON file with a map or a list, or the map or list itself."""


def opened(labels: str | Mapping[str, str] | Sequence[str], setting: str = "data.idx_to_prompt") -> Classes:
    """The texts of a setting of the type `Labels`. UserError for a file that cannot be used."""
    if labels == IMAGENET:
        return Classes(dict(zip(map(str, range(1000)), imagenet(), strict=True)))
    try:
        return Classes(_prompts(_read(Path(labels).expanduser()) if isinstance(labels, str) else labels))
    except UserError as error:
        named = f"{labels!r} " if isinstance(labels, str) else ""
        raise UserError(
            f"{setting}: {named}{error}. Give the path of a JSON file with {_EXPECTED}, the map or list itself, or "
            f"{IMAGENET}",
            code=error.code,
            setting=setting,
        ) from None


@lru_cache(maxsize=1)
def imagenet() -> tuple[str, ...]:
    """The names of ImageNet's classes 0 to 999, all different."""
    lines = _IMAGENET_FILE.read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


def _read(path: Path) -> Any:
    """The contents of a JSON file. UserError continues the file's name."""
    try:
        with local_files.opened(path) as file:
            raw = file.read(FILE_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"does not exist (seen from {os.getcwd()!r})", code="missing") from None
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})") from None
    if len(raw) > FILE_BYTES:
        raise UserError(f"has more than {FILE_BYTES:,} bytes")
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_without_twins)
    except UnicodeDecodeError:
        raise UserError("is not UTF-8", code="damaged") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"is no JSON: {error}", code="damaged") from None
    except RecursionError:
        raise UserError("is no map or list of texts") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise UserError(f"names the class {name[:40]!r} twice")
        seen[name] = value
    return seen


def _prompts(given: Any) -> dict[str, str]:
    """Text by label. UserError continues the name of the setting."""
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, str):
        pairs = list(enumerate(given))
    else:
        raise UserError("is neither a map nor a list")
    if not pairs:
        raise UserError("names no class")
    found: dict[str, str] = {}
    for label, text in pairs:
        key = plain(label)
        if not isinstance(text, str) or not text.strip() or not is_text(text):
            raise UserError(f"has no text for the class {key[:40]!r}")
        if key in found:
            raise UserError(f"names the class {key[:40]!r} twice")
        found[key] = text.strip()
    return found
