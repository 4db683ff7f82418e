"""Captions of which a sample has several: a list of texts in one field, or a text of several lines. No torch here.

The second text of a field `text` is the field `text.1`, the third `text.2`: so all sources, files and indexes hold them
as they hold any other field.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from daguerre import documents

Lines = Literal["joined", "drawn", "first"]
SEVERAL_LINES = "caption of several lines: joined (data.captions.lines takes the first one, or draws one, instead)"
OTHER_JSON = "caption that is a JSON object, or a list with other things than texts"
PYTHON_LIST = "caption that is a list as Python prints it (write it as JSON: json.dumps(captions))"
_PYTHON_LIST = re.compile(r"""\[\s*['"].*['"]\s*\]|\(\s*['"].*['"]\s*,\s*(['"].*['"]\s*)?\)""", re.DOTALL)


def of_value(name: str, value: Any) -> dict[str, str]:
    """The fields of a value: a text, the JSON of a list of texts, or a list of texts. {} for anything else."""
    each = _read(value) if isinstance(value, str) else value
    each = each if isinstance(each, list | tuple) else [each]
    if not all(isinstance(text, str) for text in each):
        return {}
    there = [text.strip() for text in each if text.strip()]
    return {f"{name}.{number}" if number else name: text for number, text in enumerate(there)}


def trouble(text: str) -> str:
    """The reason why a text that `of_value` finds no field in is no caption; "" for blanks."""
    if not text.strip():
        return ""
    return PYTHON_LIST if _read(text) is None else OTHER_JSON


def _read(text: str) -> Any:
    """The content of a text: itself, or the list or object that it is the JSON of. None for Python's list: numpy leaves
    the commas out of it, so that it cannot be read with certainty."""
    if not (start := text.lstrip()).startswith(("[", "{", "(")):
        return text
    if start[0] != "(":
        try:
            return documents.parse(text)
        except ValueError:
            pass
    return None if _PYTHON_LIST.fullmatch(text.strip()) else text


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
