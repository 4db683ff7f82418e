"""From the text of a filter to its tree: a Pratt parser (Pratt 1973), which runs nothing.

Loosest first: `or`, `and`, `not`, comparisons (chained as in Python) and `in [...]`, `+ -`, `* / // %`, `-x`; then
numbers, quoted texts, true, false, fields, `missing(field)` and parentheses. What is too long, too deep or means nothing
(no field in it, a text where a number belongs) is a ValueError that shows the place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NoReturn

from daguerre.data import filter_tree as tree
from daguerre.data.filter_tokens import Token, fault, tokens
from daguerre.data.filter_tree import TEXT_CHARACTERS, Condition, Node, Value

DEPTH = 100
"""How deep parentheses and operators may lie in each other."""
NAME_CHARACTERS = 200
"""Longest name of a field."""

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=", "in", "not in")
_POWER = {"or": 1, "and": 2, **dict.fromkeys(_COMPARISONS, 4), "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6}
_NOT, _NEGATIVE = 3, 7
_ESCAPED = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t"}
_HINTS = {
    "is": "write ==, or missing(field)",
    "null": "write missing(field)",
    "None": "write missing(field)",
    "missing": "write missing(field); a field of that name stands in backticks",
    "lambda": 'a function belongs into a pair: ["field", "lambda s: s > 4.5"]',
    "[": "a list stands after in",
}


def expression(text: str) -> Condition:
    """The tree of a whole expression."""
    parser = _Parser(text)
    return parser.finished(parser.part())


def about(name: str, text: str) -> Condition:
    """The tree of what is said about one field: `<= 0.5`, `in ['a', 'b']` or `lambda s: s > 4.5`."""
    parser = _Parser(text)
    subject = tree.Field(checked_name(name))
    if parser.next.is_sign("lambda"):
        parser.take_parameter(subject)
        return parser.finished(parser.part())
    if parser.infix() not in _COMPARISONS:
        parser.fail("expected a comparison such as '<= 0.5' or \"== 'en'\"")
    return parser.finished(parser.chain(_Part(subject, 0)))


def checked_name(name: str) -> str:
    """The name, if a field can have it."""
    if not 0 < len(name) <= NAME_CHARACTERS or not name.isprintable():
        raise ValueError(f"a field's name has 1 to {NAME_CHARACTERS} printable characters")
    return name


@dataclass(frozen=True)
class _Part:
    """A node, where it starts, and how deep it is."""

    node: Node
    at: int
    depth: int = 1


@dataclass
class _Parser:
    """Reads one text from left to right."""

    text: str
    tokens: list[Token] = field(init=False)
    place: int = 0
    nesting: int = 0
    parameter: tuple[str, tree.Field] | None = None
    """Of a lambda: its name, and the field that it stands for."""

    def __post_init__(self) -> None:
        self.tokens = tokens(self.text)

    @property
    def next(self) -> Token:
        """The token that is looked at."""
        return self.tokens[self.place]

    def take(self) -> Token:
        """The next token, which is then done with."""
        token = self.next
        self.place += token.kind != "end"
        return token

    def expect(self, sign: str) -> None:
        """Takes a sign that must stand here."""
        if not self.next.is_sign(sign):
            self.fail(f"expected {sign!r}")
        self.take()

    def fail(self, what: str) -> NoReturn:
        """Says what was expected at the next token, and what is there."""
        token = self.next
        found = "the end" if token.kind == "end" else repr(token.text[:40])
        hint = f" ({_HINTS[token.text]})" if token.kind == "sign" and token.text in _HINTS else ""
        raise fault(self.text, token.at, f"{what}, found {found}{hint}")

    def refuse(self, at: int, what: str) -> NoReturn:
        """Says what is wrong with what starts at a place."""
        raise fault(self.text, at, what)

    def infix(self) -> str:
        """The operator that the next token is (`not in`: the next two), else nothing."""
        if self.next.is_sign("not"):
            return "not in" if self.tokens[self.place + 1].is_sign("in") else ""
        return self.next.text if self.next.is_sign(*_POWER) else ""

    def take_infix(self) -> None:
        """Goes past the operator."""
        self.place += 1 + (self.infix() == "not in")

    def take_parameter(self, stands_for: tree.Field) -> None:
        """Goes past `lambda s:`."""
        self.take()
        if not self.next.bare:
            self.fail("expected the one parameter of the function, as in 'lambda s: s > 4.5'")
        self.parameter = (self.take().text, stands_for)
        self.expect(":")

    def finished(self, part: _Part) -> Condition:
        """The tree, if nothing follows it."""
        if self.next.kind != "end":
            self.fail("expected an operator or the end")
        return self.condition(part)

    def part(self, power: int = 0) -> _Part:
        """As much as operators stronger than `power` hold together."""
        self.nesting += 1
        if self.nesting > DEPTH:
            self.refuse(self.next.at, f"more than {DEPTH} parentheses or operators in each other")
        left = self.operand(power)
        while (sign := self.infix()) and _POWER[sign] > power:
            left = self.chain(left) if sign in _COMPARISONS else self.joined(left, sign)
        self.nesting -= 1
        return left

    def made(self, at: int, node: Node, *parts: _Part) -> _Part:
        """The part of a node over `parts`."""
        depth = 1 + max(part.depth for part in parts)
        if depth > DEPTH:
            self.refuse(parts[-1].at, f"more than {DEPTH} parentheses or operators in each other")
        return _Part(node, at, depth)

    def operand(self, power: int) -> _Part:
        """A value, or a condition in parentheses or behind `not`."""
        token = self.take()
        if token.is_sign("-"):
            inner = self.part(_NEGATIVE - 1)
            return self.made(token.at, tree.Negative(self.number(inner)), inner)
        if token.is_sign("not") and power < _NOT:
            inner = self.part(_NOT - 1)
            return self.made(token.at, tree.Not(self.condition(inner)), inner)
        if token.is_sign("("):
            inner = self.part()
            self.expect(")")
            return _Part(inner.node, token.at, inner.depth)
        if token.is_sign("missing") and self.next.is_sign("("):
            return _Part(self.missing(), token.at)
        return _Part(self.literal(token), token.at)

    def missing(self) -> Condition:
        """`missing(field)`, after its name."""
        self.expect("(")
        if self.next.kind != "field":
            self.fail("expected the name of a field")
        name = self.named(self.take())
        self.expect(")")
        return tree.Missing(name)

    def literal(self, token: Token) -> Value:
        """A number, text, truth or field."""
        if token.kind == "number":
            return tree.Number(self.float(token))
        if token.kind == "text":
            return tree.Text(self.unquoted(token))
        if token.is_sign("true", "True", "false", "False"):
            return tree.Truth(token.text.lower() == "true")
        if token.kind == "field":
            return tree.Field(self.named(token))
        self.place -= token.kind != "end"
        self.fail("expected a field, a number or a quoted text")

    def named(self, token: Token) -> str:
        """The field that a token means; it is not followed by a call."""
        if self.next.is_sign("("):
            self.refuse(token.at, "there are no functions here but missing(field)")
        if self.parameter is None:
            return self.valid_name(token)
        if not token.bare or token.text != self.parameter[0]:
            self.refuse(token.at, f"a function knows its parameter {self.parameter[0]!r} only")
        return self.parameter[1].name

    def valid_name(self, token: Token) -> str:
        try:
            return checked_name(token.text)
        except ValueError as error:
            self.refuse(token.at, str(error))

    def float(self, token: Token) -> float:
        """The number of a token: finite, and as it is written if it is whole."""
        value = float(token.text)
        if not math.isfinite(value) or (value == 0 and set(token.text) & set("123456789") - set(_exponent(token.text))):
            self.refuse(token.at, "this number does not fit into 64 bits")
        if token.text.isdecimal() and value != int(token.text):
            self.refuse(token.at, "numbers are floats of 64 bits: this one cannot be told from its neighbours")
        return value

    def unquoted(self, token: Token) -> str:
        """The text of a token, without quotes and escapes."""
        found, rest = [], iter(enumerate(token.text[1:-1], token.at + 1))
        for at, character in rest:
            if character == "\\":
                _, escaped = next(rest)
                if escaped not in _ESCAPED:
                    self.refuse(at, "a backslash stands before a quote, another backslash, n or t only")
                character = _ESCAPED[escaped]
            found.append(character)
        if len(found) > TEXT_CHARACTERS:
            self.refuse(token.at, f"a text is compared by {TEXT_CHARACTERS} characters at most")
        return "".join(found)

    def joined(self, left: _Part, sign: str) -> _Part:
        """`left sign right` for `and`, `or` and arithmetic."""
        self.take_infix()
        right = self.part(_POWER[sign])
        if sign not in ("and", "or"):
            node = tree.Arithmetic(sign, self.number(left), self.number(right))
            self.check_constant(node, right.at)
            return self.made(left.at, node, left, right)
        conditions = [self.condition(left), self.condition(right)]
        whole = tree.every(conditions) if sign == "and" else tree.either(conditions)
        if type(whole) is type(left.node):  # a longer list, not a deeper tree
            return _Part(whole, left.at, max(left.depth, right.depth + 1))
        return self.made(left.at, whole, left, right)

    def chain(self, left: _Part) -> _Part:
        """`left < right`, or `left < middle < right`, which means `left < middle and middle < right`."""
        links: list[Condition] = []
        parts = [left]
        while (sign := self.infix()) in _COMPARISONS:
            at = self.next.at
            self.take_infix()
            if sign in ("in", "not in"):
                links.append(self.among(parts[-1], sign == "not in", at))
                break
            parts.append(self.part(_POWER[sign]))
            links.append(self.compared(parts[-2], sign, parts[-1], at))
        return self.made(left.at, tree.every(links), *parts)

    def compared(self, left: _Part, sign: str, right: _Part, at: int) -> Condition:
        """One comparison, if its sides go together."""
        sides = self.value(left), self.value(right)
        kinds = {_kind(side) for side in sides}
        if "field" not in kinds and not any(True for side in sides for _ in tree.uses(side)):
            self.refuse(at, "there is no field in this comparison: it is the same for every sample")
        if sides[0] == sides[1]:
            self.refuse(at, "both sides are the same")
        if len(kinds - {"field"}) > 1:
            self.refuse(
                at, "a number cannot be compared with a text" if "text" in kinds else "true and false are no numbers"
            )
        if "truth" in kinds and sign not in ("==", "!="):
            self.refuse(at, "true and false can be compared by == and != only")
        return tree.Compare(sign, *sides)

    def among(self, operand: _Part, negated: bool, at: int) -> Condition:
        """`operand in [...]`, after `in`."""
        subject = self.value(operand)
        if not self.next.is_sign("["):
            self.fail("expected a list such as [1, 2] or ['en', 'de']")
        members: list[Value] = []
        while not members or self.next.is_sign(","):
            self.take()
            members.append(self.member())
        if not self.next.is_sign("]"):
            self.fail("expected , or ]")
        self.take()
        if not any(True for _ in tree.uses(subject)):
            self.refuse(at, "there is no field before this: it is the same for every sample")
        kinds = {_kind(member) for member in members} | {_kind(subject)} - {"field"}
        if len(kinds) > 1:
            self.refuse(at, "numbers and texts cannot be compared with each other")
        return tree.Among(subject, tuple(members), negated)

    def member(self) -> Value:
        """A number or text in a list."""
        token = self.take()
        negative = token.is_sign("-")
        token = self.take() if negative else token
        if token.kind == "number":
            return tree.Number(-self.float(token) if negative else self.float(token))
        if token.kind == "text" and not negative:
            return tree.Text(self.unquoted(token))
        self.place -= token.kind != "end"
        self.fail("expected a number" if negative else "expected a number or a quoted text")

    def check_constant(self, node: tree.Arithmetic, at: int) -> None:
        """Refuses a division by a constant 0, and constants that leave the range of numbers."""
        right = constant(node.right)
        if right == 0 and node.sign in ("/", "//", "%"):
            self.refuse(at, "a division by 0")
        if (value := constant(node)) is not None and not math.isfinite(value):
            self.refuse(at, "this number does not fit into 64 bits")

    def value(self, part: _Part) -> Value:
        """The node of a part that is a value."""
        if isinstance(part.node, Condition):
            self.refuse(part.at, "expected a value, found a condition: comparisons are joined by and, or, not")
        return part.node

    def number(self, part: _Part) -> Value:
        """The node of a part that is, or can be, a number."""
        value = self.value(part)
        if isinstance(value, tree.Text | tree.Truth):
            self.refuse(part.at, "expected a number: nothing can be computed with texts, true or false")
        return value

    def condition(self, part: _Part) -> Condition:
        """The node of a part that is a condition; a field alone is one that is true or false itself."""
        if isinstance(part.node, tree.Field):
            return tree.Flag(part.node.name)
        if isinstance(part.node, Value):
            self.refuse(part.at, "expected a condition such as width >= 512, found a value")
        return part.node


def _exponent(number: str) -> str:
    return number.lower().partition("e")[2]


def _kind(value: Value) -> str:
    kinds: dict[type, str] = {tree.Text: "text", tree.Truth: "truth", tree.Field: "field"}
    return kinds.get(type(value), "number")


def constant(node: Value) -> float | None:
    """What a value without fields comes to; None with fields. What overflows is infinite."""
    match node:
        case tree.Number(value):
            return value
        case tree.Negative(inner):
            return None if (value := constant(inner)) is None else -value
        case tree.Arithmetic(sign, left, right):
            sides = constant(left), constant(right)
            return None if None in sides else _computed(sign, *sides)
    return None


def _computed(sign: str, left: float, right: float) -> float:
    if sign in ("/", "//", "%") and right == 0:
        return math.nan
    both = {"+": left + right, "-": left - right, "*": left * right}
    return both[sign] if sign in both else {"/": left / right, "//": left // right, "%": left % right}[sign]
