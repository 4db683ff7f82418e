"""From the text of a filter to its tree: a Pratt parser (Pratt 1973), which runs nothing.

Loosest first: `or`, `and`, `not`, comparisons (chained as in Python) and `in [...]`, `+ -`, `* / // %`, `-x`; then
numbers, quoted texts, true, false, fields, `missing(field)` and parentheses. What is too long, too deep or means
nothing (`filter_meaning`) is a UserError that shows the place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from daguerre.data.filters import expression as tree
from daguerre.data.filters import meaning
from daguerre.data.filters.expression import Condition, Node, Value
from daguerre.data.filters.tokens import Token, fault, number, tokens, unquoted

DEPTH = 100
"""How deep parentheses and operators may lie in each other."""

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=", "in", "not in")
_POWER = {"or": 1, "and": 2, **dict.fromkeys(_COMPARISONS, 4), "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6}
_NOT, _NEGATIVE = 3, 7
_HINTS = {
    "is": "write ==, or missing(field)",
    "null": "write missing(field)",
    "None": "write missing(field)",
    "missing": "write missing(field); a field of that name stands in backticks",
    "lambda": 'a function belongs into a pair: ["field", "lambda s: s > 4.5"]',
    "[": "a list stands behind in",
}
_Made = TypeVar("_Made")


def expression(text: str) -> Condition:
    """The tree of a whole expression."""
    parser = _Parser(text)
    return parser.finished(parser.part())


def about(name: str, text: str) -> Condition:
    """The tree of what is said about one field: `<= 0.5`, `in ['a', 'b']` or `lambda s: s > 4.5`."""
    parser = _Parser(text)
    subject = tree.Field(meaning.name(name))
    if parser.next.is_sign("lambda"):
        parser.take_parameter(subject)
        return parser.finished(parser.part())
    if parser.infix() not in _COMPARISONS:
        parser.fail("expected a comparison such as '<= 0.5' or \"== 'en'\"")
    said = parser.chain(_Part(subject, 0))
    if parser.next.kind != "end":
        parser.fail("expected the end: this is one comparison, and more of them belong into an expression")
    return parser.finished(said)


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

    def meant(self, at: int, make: Callable[..., _Made], *given: object) -> _Made:
        """What one of `filter_meaning`'s functions makes; its refusal shows the place `at`."""
        try:
            return make(*given)
        except ValueError as error:
            raise fault(self.text, at, str(error)) from None

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

    def condition(self, part: _Part) -> Condition:
        """The node of a part that must be a condition."""
        return self.meant(part.at, meaning.condition, part.node)

    def part(self, power: int = 0) -> _Part:
        """As much as operators stronger than `power` hold together."""
        self.nesting += 1
        if self.nesting > DEPTH:
            self.too_deep(self.next.at)
        left = self.operand(power)
        while (sign := self.infix()) and _POWER[sign] > power:
            left = self.chain(left) if sign in _COMPARISONS else self.joined(left, sign)
        self.nesting -= 1
        return left

    def made(self, at: int, node: Node, *parts: _Part) -> _Part:
        """The part of a node over `parts`."""
        depth = 1 + max(part.depth for part in parts)
        if depth > DEPTH:
            self.too_deep(parts[-1].at)
        return _Part(node, at, depth)

    def too_deep(self, at: int) -> NoReturn:
        """Refuses what would need a deeper tree."""
        raise fault(self.text, at, f"more than {DEPTH} parentheses or operators in each other")

    def operand(self, power: int) -> _Part:
        """A value, or a condition in parentheses or behind `not`."""
        token = self.take()
        if token.is_sign("-"):
            inner = self.part(_NEGATIVE - 1)
            return self.made(token.at, tree.Negative(self.meant(inner.at, meaning.number, inner.node)), inner)
        if token.is_sign("not") and power < _NOT:
            inner = self.part(_NOT - 1)
            return self.made(token.at, tree.Not(self.condition(inner)), inner)
        if token.is_sign("("):
            inner = self.part()
            self.expect(")")
            return _Part(inner.node, token.at, inner.depth)
        if token.is_sign("missing") and self.next.is_sign("("):
            return _Part(self.missing(), token.at)
        if token.is_sign("true", "True", "false", "False"):
            return _Part(tree.Truth(token.text.lower() == "true"), token.at)
        if token.kind == "field":
            return _Part(tree.Field(self.named(token)), token.at)
        return _Part(self.literal(token, "expected a field, a number or a quoted text"), token.at)

    def literal(self, token: Token, expected: str) -> Value:
        """The number or text of a token that was taken."""
        if token.kind == "number":
            return tree.Number(number(self.text, token))
        if token.kind != "text":
            self.place -= token.kind != "end"
            self.fail(expected)
        return tree.Text(unquoted(self.text, token))

    def missing(self) -> Condition:
        """`missing(field)`, behind its name."""
        self.expect("(")
        if self.next.kind != "field":
            self.fail("expected the name of a field")
        name = self.named(self.take())
        self.expect(")")
        return tree.Missing(name)

    def named(self, token: Token) -> str:
        """The field that a token means; it is not followed by a call."""
        if self.next.is_sign("("):
            raise fault(self.text, token.at, "there is no function here but missing(field)")
        if self.parameter is None:
            return self.meant(token.at, meaning.name, token.text)
        if not token.bare or token.text != self.parameter[0]:
            raise fault(self.text, token.at, f"a function knows its parameter {self.parameter[0]!r} only")
        return self.parameter[1].name

    def joined(self, left: _Part, sign: str) -> _Part:
        """`left sign right` for `and`, `or` and arithmetic."""
        self.take_infix()
        right = self.part(_POWER[sign])
        if sign not in ("and", "or"):
            numbers = [self.meant(part.at, meaning.number, part.node) for part in (left, right)]
            return self.made(left.at, self.meant(right.at, meaning.arithmetic, sign, *numbers), left, right)
        conditions = [self.condition(left), self.condition(right)]
        node = tree.every(conditions) if sign == "and" else tree.either(conditions)
        if type(node) is type(left.node):  # a longer list, not a deeper tree
            return _Part(node, left.at, max(left.depth, right.depth + 1))
        return self.made(left.at, node, left, right)

    def chain(self, left: _Part) -> _Part:
        """`left < right`, or `left < middle < right`, which means `left < middle and middle < right`."""
        links: list[Condition] = []
        parts = [left]
        while (sign := self.infix()) in _COMPARISONS:
            at = self.next.at
            self.take_infix()
            values = [self.meant(parts[-1].at, meaning.value, parts[-1].node)]
            if sign in ("in", "not in"):
                links.append(self.meant(at, meaning.among, *values, self.members(), sign == "not in"))
                break
            parts.append(self.part(_POWER[sign]))
            values.append(self.meant(parts[-1].at, meaning.value, parts[-1].node))
            links.append(self.meant(at, meaning.compare, sign, *values))
        return self.made(left.at, tree.every(links), *parts)

    def members(self) -> tuple[Value, ...]:
        """The list behind `in`."""
        if not self.next.is_sign("["):
            self.fail("expected a list such as [1, 2] or ['en', 'de']")
        found: list[Value] = []
        while not found or self.next.is_sign(","):
            self.take()
            found.append(self.member())
        if not self.next.is_sign("]"):
            self.fail("expected , or ]")
        self.take()
        return tuple(found)

    def member(self) -> Value:
        """A number or text in a list."""
        if not self.next.is_sign("-"):
            return self.literal(self.take(), "expected a number or a quoted text")
        self.take()
        if self.next.kind != "number":
            self.fail("expected a number")
        return tree.Number(-number(self.text, self.take()))
