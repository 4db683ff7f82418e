"""Numbers, values and errors as people read them: sizes, durations, counts, shares."""

import io
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from daguerre.credentials import scrub

PERCENT = "\N{NO-BREAK SPACE}%"
_PAGE_COLUMNS = 121
"""Columns of a terminal that asks for no other lines than those of a file."""


def format_size(size_bytes: float) -> str:
    """A size in decimal units, three digits: `12.3 MB`."""
    return scaled(size_bytes, {" TB": 1e12, " GB": 1e9, " MB": 1e6, " kB": 1e3}, " bytes")


def scaled(value: float, units: Mapping[str, float], below: str = "", form: str = ".3g") -> str:
    """A rounded number in the first of some units, the largest first, that it reaches; whole and `below`, in none."""
    for unit, size in units.items():
        text = f"{value / size:{form}}"
        if float(text.replace(",", "")) >= 1:
            return f"{text}{unit}"
    return f"{value:.0f}{below}"


def format_duration(seconds: float) -> str:
    """A duration in two units at most: `45 s`, `2 min 05 s`, `1 h 20 min`, `2 d 3 h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 shard`, `1,234 shards`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def percent(part: int, whole: int) -> str:
    """A share, never 0 % or 100 % for some or not all."""
    if not whole:
        return f"0{PERCENT}"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return f"under 0.1{PERCENT}"
    if 99.9 < share < 100:
        return f"over 99.9{PERCENT}"
    return f"{share:.0f}{PERCENT}" if share in (0, 100) or share >= 10 else f"{share:.1f}{PERCENT}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def wrapped(text: str, columns: int) -> list[str]:
    """A text in lines of so many columns; names and paths stay whole."""
    return textwrap.wrap(text, columns, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


class Verbatim(str):
    """Text of a file, which a terminal gets as it is: `sys.stdout.write(Verbatim(text))`."""

    __slots__ = ()


class Terminal(io.TextIOWrapper):
    """A stream to a terminal, which would break a long line within a word: here lines end between words."""

    def write(self, text: str, /) -> int:
        """Writes a text; one that moves the cursor, or that is a file's, as it is."""
        as_it_is = "\x1b" in text or "\r" in text or isinstance(text, Verbatim)
        return super().write(text if as_it_is else fitted(text, columns(_PAGE_COLUMNS) - 1))


def columns(usual: int) -> int:
    """Columns for text that is written for `usual` ones: fewer where it goes to a terminal that has fewer."""
    # COLUMNS is often in the environment of a pipe, too, whose readers search in lines as they always were.
    return min(usual, shutil.get_terminal_size((usual, 24)).columns) if sys.stdout.isatty() else usual


def fitted(text: str, room: int) -> str:
    """A text for a terminal of `room` columns, whose lines end between words.

    Lines that were wrapped for a wider page are joined first; the text of a list stays below itself. A line that is a
    command stays whole, so that it can be copied, as does a word that is longer than the room.
    """
    lines: list[str] = []
    above = ""
    for line in text.split("\n"):
        if lines and _goes_on(lines[-1], above, line):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
        above = line
    return "\n".join(line if len(line) <= room or _is_command(line) else _broken(line, room) for line in lines)


_PAGE = range(108, 121)
"""Columns at which lines of our own texts end where the next word did not fit."""
_LABEL = re.compile(r" *\S.* {2,}(?=\S)")
"""What stands before the text of a line of a list."""
_DEEP_COLUMNS = 8
"""A line without a label that stands so far in is the middle of a text that has one."""


def _goes_on(joined: str, above: str, line: str) -> bool:
    """True if a line was wrapped from the one above it."""
    text = line.lstrip()
    if not text or _is_command(joined) or above.endswith((".", ":")):
        return False
    reached = len(above) + 1 + len(text.split(" ", 1)[0])
    start = _start(joined)
    wraps = len(above) <= _PAGE[-1] and reached > _PAGE[0]
    return wraps and len(line) - len(text) == start and (start == 0 or start >= _DEEP_COLUMNS)


def _start(line: str) -> int:
    """Column of a line's text, behind its label if it has one."""
    label = _LABEL.match(line)
    return label.end() if label else len(line) - len(line.lstrip())


def _broken(line: str, room: int) -> str:
    start = _start(line)
    start = min(start + (2 if 0 < start < _DEEP_COLUMNS else 0), room // 2)
    return "\n".join(
        textwrap.wrap(line, room, subsequent_indent=" " * start, break_on_hyphens=False, break_long_words=False)
    )


def _is_command(line: str) -> bool:
    return line.lstrip().startswith("daguerre ")


def beside(label: str, text: str, terminal: bool) -> list[str]:
    """A text behind its label, on a terminal in lines that begin below each other and break between words; else, in a
    pipe or a file, in one line, which programs find whole."""
    if not terminal:
        return [label + text]
    room = max(shutil.get_terminal_size().columns - 1 - len(label), 24)
    first, *rest = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]
    return [label + first, *(" " * len(label) + line for line in rest)]


def titled(sections: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines below their titles, an empty line before each; a section without lines is left out."""
    lines: list[str] = []
    for title, content in sections.items():
        lines += ["", title, *(f"  {line}" for line in content)] if content else []
    return lines


def shown(value: Any, width: int = 60) -> str:
    """A value on one line, as one would write it in a recipe; long ones are cut."""
    if value is None:
        return "null"
    try:
        text = scrub(json.dumps(value, ensure_ascii=False, default=str))  # before it is cut
    except RecursionError:  # of a file that its parser took with the last of the stack
        text = "nested too deeply"
    return text if len(text) <= width else text[: width - 4] + " ..."


def called(value: Any) -> str:
    """The kind of a value of JSON or YAML, for people."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {dict: "a group of keys", list: "a list", str: "a text", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")
