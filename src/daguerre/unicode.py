"""Strings that are no text: halves of surrogate pairs, as JSON and the names of files can hold them. UTF-8, and so
tokenizers, Arrow, pages and terminals, cannot.
"""

from __future__ import annotations

import re
from typing import Any

NO_TEXT = "caption that is no text (half of a surrogate pair in it)"
"""Why a sample is left out whose caption is no text."""
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def is_text(text: str) -> bool:
    """Whether a string can be written as UTF-8."""
    return text.isascii() or _HALF.search(text) is None


def printable(text: str) -> str:
    """A string with what is no text written as escapes: for names in messages, logs and pages."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def may_hold_halves(raw: bytes) -> bool:
    """Whether a JSON document in UTF-8 may hold strings that are no text: only escapes can say them."""
    return _ESCAPED_HALF.search(raw) is not None


def mended(value: Any) -> Any:
    """A copy of a JSON value, however deep, with a question mark for each half of a pair, in texts and in names."""
    root = [value]
    pending: list[Any] = [root]
    while pending:
        holder = pending.pop()
        for place, inner in list(holder.items()) if isinstance(holder, dict) else enumerate(holder):
            if isinstance(inner, str):
                holder[place] = _whole(inner)
            elif isinstance(inner, dict | list):
                own = {_whole(name): below for name, below in inner.items()} if isinstance(inner, dict) else [*inner]
                holder[place] = own
                pending.append(own)
    return root[0]


def _whole(text: str) -> str:
    return text if is_text(text) else _HALF.sub("?", text)
