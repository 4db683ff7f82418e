"""Captions of which a sample has several: a list of texts in one field, or a text of several lines. No torch here.

The second text of a field `text` is the field `text.1`, the third `text.2`: so all sources, files and indexes hold them
as they hold any other field.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

Lines = Literal["joined", "drawn", "first"]
SEVERAL_LINES = "caption of several lines: joined (data.captions.lines takes the first one, or draws one, instead)"


def of_value(name: str, value: Any) -> dict[str, str]:
    """The fields of a value: a text, or a list of texts. {} where it is neither."""
    each = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(text, str) for text in each):
        return {}
    there = [text.strip() for text in each if text.strip()]
    return {f"{name}.{number}" if number else name: text for number, text in enumerate(there)}


def renamed(texts: Mapping[str, str], name: str, to: str) -> dict[str, str]:
    """The texts of the field `name` as those of the field `to`."""
    return {f"{to}.{number}" if number else to: text for number, text in enumerate(of(texts, name))}


def of(texts: Mapping[str, str], name: str) -> list[str]:
    """The texts of a field."""
    found, key = [], name
    while texts.get(key, "").strip():
        found.append(texts[key].strip())
        key = f"{name}.{len(found)}"
    return found


def chosen_of(texts: Mapping[str, str], name: str, lines: Lines | None) -> list[str]:
    """Every text that a field may stand for, its lines taken as `lines` says (None: joined)."""
    found = []
    for text in of(texts, name):
        each = _lines(text)
        found += [each[0]] if lines == "first" else each if lines == "drawn" else [" ".join(each)]
    return found


def has_lines(texts: Mapping[str, str], name: str) -> bool:
    """True where a text of the field has several lines."""
    return any(len(_lines(text)) > 1 for text in of(texts, name))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
