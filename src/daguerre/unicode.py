"""Strings with lone surrogates, which JSON and names of files can hold, but UTF-8 (tokenizers, Arrow) cannot."""

import re
from typing import Any

NO_TEXT = "caption that is no text (half of a surrogate pair in it)"
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def is_text(text: str) -> bool:
    """True if a string can be written as UTF-8."""
    return text.isascii() or _HALF.search(text) is None


def printable(text: str) -> str:
    """A string with lone surrogates as escapes, for messages, logs and pages."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def may_hold_halves(raw: bytes) -> bool:
    """True if a JSON document in UTF-8 may hold lone surrogates, which only escapes can write."""
    return _ESCAPED_HALF.search(raw) is not None


def mended(value: Any) -> Any:
    """A copy of a JSON value, however deep, with a question mark for each lone surrogate in texts and names."""
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
