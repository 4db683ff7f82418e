"""Words, signs, numbers and texts of a filter expression, and faults that show their place. How they go together is
`filter_grammar`'s."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from string import hexdigits

from daguerre.data.filters.expression import TEXT_CHARACTERS, WORDS
from daguerre.errors import UserError

CHARACTERS = 10_000
"""Longest expression."""
_AROUND = 40

_TOKENS = re.compile(
    r"""(?P<space>\s+)
    |(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    |(?P<name>[^\W\d]\w*)
    |(?P<field>`(?:[^`]|``)*`)
    |(?P<text>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
    |(?P<sign><=|>=|==|!=|//|[-+*/%<>()\[\],:])""",
    re.VERBOSE,
)
_ESCAPED = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t"}
_DIGITS = {"u": 4, "U": 8}
_HINTS = {
    "=": "'is equal to' is written ==",
    "!": "write not, or != for 'is not equal to'",
    "&": "write and",
    "|": "write or",
    ".": "a value has no attributes; a field whose name holds a dot is written in backticks: `a.b`",
    "'": "this text has no closing quote",
    '"': "this text has no closing quote",
    "`": "this field has no closing backtick",
}


@dataclass(frozen=True)
class Token:
    """One word or sign."""

    kind: str
    """number, text (as they are written), field (its name), sign (words with a meaning, too) or end."""
    text: str
    at: int
    """Where it starts, in characters."""
    bare: bool = False
    """Whether it is a field without backticks."""

    def is_sign(self, *signs: str) -> bool:
        """Whether it is one of these signs, not a text or field that looks like it."""
        return self.kind == "sign" and self.text in signs


def tokens(text: str) -> list[Token]:
    """All of them, the last of the kind `end`. UserError for what is none, and for more than `CHARACTERS`."""
    if len(text) > CHARACTERS:
        raise UserError(f"{len(text):,} characters are too many: an expression has at most {CHARACTERS:,}")
    found, at = [], 0
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            raise fault(text, at, _HINTS.get(text[at], f"{text[at]!r} has no meaning here"))
        if match.lastgroup != "space":
            found.append(_token(str(match.lastgroup), match[0], at))
        at = match.end()
    return [*found, Token("end", "", len(text))]


def _token(kind: str, word: str, at: int) -> Token:
    if kind == "name":
        return Token("sign", word, at) if word in WORDS else Token("field", word, at, bare=True)
    if kind == "field":
        return Token("field", word[1:-1].replace("``", "`"), at)
    return Token(kind, word, at)


def fault(text: str, at: int, what: str) -> UserError:
    """What is wrong, and its place: a stretch of the text on one line, a caret below."""
    start = max(0, at - _AROUND)
    shown = "".join(c if c.isprintable() else " " for c in text[start : at + _AROUND])
    return UserError(f"at character {at + 1}: {what}\n    {shown}\n    {' ' * (at - start)}^")


def number(text: str, token: Token) -> float:
    """The number that a token is: finite, and equal to what is written if that is whole."""
    value = float(token.text)
    mantissa = token.text.lower().partition("e")[0]
    if not math.isfinite(value) or (value == 0 and mantissa.strip("0.")):
        raise fault(text, token.at, "this number does not fit into 64 bits")
    if token.text.isdecimal() and value != int(token.text.lstrip("0") or "0"):
        raise fault(text, token.at, "numbers are floats of 64 bits: this one cannot be told from its neighbours")
    return value


def unquoted(text: str, token: Token) -> str:
    """The text that a token is, without quotes and escapes."""
    found, inside = [], iter(enumerate(token.text[1:-1], token.at + 1))
    for at, character in inside:
        if character == "\\":
            character = _escaped("".join(c for _, c in islice(inside, 1)), inside)
        if not character or "\ud800" <= character <= "\udfff":
            raise fault(text, at, "no character: a backslash stands before ' \" \\ n t, uXXXX or UXXXXXXXX only")
        found.append(character)
    if len(found) > TEXT_CHARACTERS:
        raise fault(text, token.at, f"texts of more than {TEXT_CHARACTERS} characters are not kept in indexes")
    return "".join(found)


def _escaped(letter: str, behind: Iterator[tuple[int, str]]) -> str:
    """What a backslash before `letter` and the characters behind it means; nothing if it means nothing."""
    if letter not in _DIGITS:
        return _ESCAPED.get(letter, "")
    digits = "".join(c for _, c in islice(behind, _DIGITS[letter]))
    code = int(digits, 16) if len(digits) == _DIGITS[letter] and set(digits) <= set(hexdigits) else sys.maxunicode + 1
    return chr(code) if code <= sys.maxunicode else ""
