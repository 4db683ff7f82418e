"""From the text of a filter to its tree, by Python's own parser.

That sees signs, `and or not in missing` and underscores alone: fields, numbers and texts are read here and stand as
underscores in their places. The tree that it makes is checked node by node; nothing is run. Whatever cannot be read, is
too long, too deep or means nothing is a UserError that shows the place.
"""

import ast
import math
import re
import sys
from dataclasses import dataclass, field

from daguerre.data.filters import expression as tree
from daguerre.errors import UserError

CHARACTERS = 10_000
"""Longest expression."""
DEPTH = 100
"""How deep operators may lie in each other."""
NAME_CHARACTERS = 200
"""Longest name of a field."""
_AROUND = 40

_TOKENS = re.compile(
    r"""(?P<space>\s+)
    |(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    |(?P<word>[^\W\d]\w*)
    |(?P<field>`(?:[^`]|``)*`)
    |(?P<text>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
    |(?P<sign><=|>=|==|!=|//|(?!\*\*|<<|>>|<>)[-+*/%<>()\[\],])""",
    re.VERBOSE,
)
_HINTS = {
    "=": "'is equal to' is written ==",
    "!": "write not, or != for 'is not equal to'",
    "&": "write and",
    "|": "write or",
    ".": "a value has no attributes; a field whose name holds a dot is written in backticks: `a.b`",
    "'": "this text has no closing quote",
    '"': "this text has no closing quote",
    "`": "this field has no closing backtick",
    "is": "write ==, or missing(field)",
    "null": "write missing(field)",
    "None": "write missing(field)",
    "lambda": 'a lambda must be in a pair: ["field", "lambda s: s > 4.5"]',
}
_NAMES = f"a field's name has 1 to {NAME_CHARACTERS} printable characters"
_OPERAND = "expected a field, a number or a quoted text"
_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>|in\b|not\s+in\b)")
_FUNCTION = re.compile(r"\s*lambda\s+([^\W\d]\w*)\s*:")
_SPECIAL = re.compile(r"\\(?:([\\'\"ntr])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|[\ud800-\udfff]")
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}


def expression(text: str) -> ast.expr:
    reader = _Reader(text)
    return reader.condition(reader.parsed(), 1)


def about(name: str, text: str) -> ast.expr:
    """The tree of a comparison with one field: `<= 0.5`, `in ['a', 'b']` or `lambda s: s > 4.5`."""
    if not _can_be_name(name):
        raise UserError(_NAMES)
    function = _FUNCTION.match(text)
    if function and function[1] not in tree.WORDS:
        reader = _Reader(text, function.end(), (function[1], name))
        return reader.condition(reader.parsed(), 1)
    reader = _Reader(text)
    if not _COMPARISON.match(text):
        raise reader.fault(0, "expected a comparison such as '<= 0.5' or \"== 'en'\"")
    reader.atoms[-2] = tree.field(name)
    node = reader.parsed("_ ")
    if not isinstance(node, ast.Compare):
        raise reader.fault(0, "expected one comparison: write several as an expression")
    return reader.condition(node, 1)


def whole(given: ast.expr) -> ast.expr:
    """The condition. UserError where a field is two kinds of thing in it."""
    texts = {use.name for use in tree.uses(given) if use.kind == "text"}
    both = sorted(texts & {use.name for use in tree.uses(given) if use.kind in ("number", "flag")})
    if both:
        raise UserError(f"the field {tree.field(both[0]).id} is compared with text, and used as a number")
    return given


def _can_be_name(name: str) -> bool:
    return 0 < len(name) <= NAME_CHARACTERS and name.isprintable()


@dataclass
class _Reader:
    """Reads one text, and knows the place of what is wrong in it."""

    text: str
    begin: int = 0
    """Where to begin."""
    parameter: tuple[str, str] | None = None
    """Of a function: its name, and the field that it stands for; there is no other field then."""
    atoms: dict[int, ast.expr] = field(default_factory=dict)
    """The node of each field, number and text by its place."""
    shift: int = 0
    """The place of the first character that Python's parser saw."""

    def fault(self, at: ast.expr | int, what: str) -> UserError:
        """The refusal of a place or a node: a stretch of the text on one line, a caret below."""
        at = max(0, at if isinstance(at, int) else at.col_offset + self.shift)
        start = max(0, at - _AROUND)
        shown = "".join(c if c.isprintable() else " " for c in self.text[start : at + _AROUND])
        return UserError(f"at character {at + 1}: {what}\n    {shown}\n    {' ' * (at - start)}^")

    def scanned(self) -> str:
        """The text for Python's parser, each character in its place."""
        if len(self.text) > CHARACTERS:
            raise UserError(f"{len(self.text):,} characters are too many: an expression has at most {CHARACTERS:,}")
        source, at, word_end = [" " * self.begin], self.begin, -1
        while at < len(self.text):
            match = _TOKENS.match(self.text, at)
            if match is None:
                raise self.fault(at, _HINTS.get(self.text[at], f"{self.text[at]!r} is not allowed here"))
            token = match[0]
            if match.lastgroup not in ("space", "sign"):
                if at == word_end:
                    raise self.fault(at, f"expected an operator, found {token[:40]!r}")
                word_end = match.end()
                if token not in tree.KEYWORDS:
                    self.atoms[at] = self.atom(match.lastgroup, token, at)
                    token = "_" * len(token)
            source.append(" " * len(token) if match.lastgroup == "space" else token)
            at = match.end()
        return "".join(source)

    def atom(self, kind: str | None, token: str, at: int) -> ast.expr:
        """The node of a field, a number, a text, true or false."""
        if kind == "number":
            return self.number(token, at)
        if kind == "text":
            return self.quoted(token, at)
        if token in ("true", "True", "false", "False"):
            return tree.truth(token.lower() == "true")
        if token in tree.WORDS:
            raise self.fault(at, f"found {token!r}" + (f" ({_HINTS[token]})" if token in _HINTS else ""))
        if self.parameter:
            if token != self.parameter[0]:
                raise self.fault(at, f"a function knows its parameter {self.parameter[0]!r} only")
            return tree.field(self.parameter[1])
        name = token if kind == "word" else token[1:-1].replace("``", "`")
        if not _can_be_name(name):
            raise self.fault(at, _NAMES)
        return tree.field(name)

    def number(self, token: str, at: int) -> ast.expr:
        """A number that is finite, and equal to what is written if that is whole."""
        value = float(token)
        mantissa = token.lower().partition("e")[0]
        if not math.isfinite(value) or (value == 0 and mantissa.strip("0.")):
            raise self.fault(at, "this number does not fit into 64 bits")
        if token.isdecimal() and value != int(token.lstrip("0") or "0"):
            raise self.fault(at, "numbers are floats of 64 bits: this number is too large to be exact")
        return tree.number(value)

    def quoted(self, token: str, at: int) -> ast.expr:
        """A text without its quotes and escapes."""

        def character(match: re.Match[str]) -> str:
            if match[1]:
                return _LETTERS.get(match[1], match[1])
            code = int(match[2] or match[3] or match[4] or "d800", 16)
            if code > sys.maxunicode or 0xD800 <= code < 0xE000:
                known = "a backslash must come before one of ' \" \\ n r t, xXX, uXXXX or UXXXXXXXX only"
                raise self.fault(at + 1 + match.start(), f"no character: {known}")
            return chr(code)

        value = _SPECIAL.sub(character, token[1:-1])
        if len(value) > tree.TEXT_CHARACTERS:
            raise self.fault(at, f"texts of more than {tree.TEXT_CHARACTERS} characters are not kept in indexes")
        return ast.Constant(value)

    def parsed(self, subject: str = "") -> ast.expr:
        """Python's tree of the text behind a `subject`."""
        source = subject + self.scanned()
        start = len(source) - len(source.lstrip())
        self.shift = start - len(subject)
        try:
            return ast.parse(source[start:], mode="eval").body
        except SyntaxError as error:
            what, offset = error.msg, error.offset
        except (MemoryError, RecursionError):  # Python's parser says so of what is very deep
            raise UserError(f"operators are nested too deeply: at most {DEPTH}") from None
        at = offset - 1 + self.shift if offset and start < len(source) else len(self.text)
        if what.startswith("invalid syntax"):
            found = _TOKENS.match(self.text, max(0, at))
            what = f"{found[0][:40]!r} does not fit here" if found else f"{_OPERAND}, found the end"
        raise self.fault(at, what)

    def condition(self, node: ast.expr, depth: int) -> ast.expr:
        """The condition that a node is. UserError for a value, and for what means nothing."""
        self.check_depth(node, depth)
        match node:
            case ast.BoolOp(sign, parts):
                return tree.joined(sign, [self.condition(part, depth + 1) for part in parts])
            case ast.UnaryOp(ast.Not(), inner):
                return ast.UnaryOp(ast.Not(), self.condition(inner, depth + 1))
            case ast.Compare(left, signs, rights):
                links = zip(signs, [left, *rights], rights, strict=False)
                return tree.joined(ast.And(), [self.link(*link, depth + 1) for link in links])
            case ast.Call(ast.Name("missing"), arguments, _):
                names = [self.value(argument, depth + 1) for argument in arguments]
                if len(names) != 1 or tree.field_of(names[0]) is None:
                    raise self.fault(node, "expected missing(field), with the name of one field")
                return ast.Call(ast.Name("missing"), names, [])
        value = self.value(node, depth)
        if tree.field_of(value) is None:
            raise self.fault(node, "expected a condition such as width >= 512, found a value")
        return value

    def link(self, sign: ast.cmpop, left: ast.expr, right: ast.expr, depth: int) -> ast.expr:
        """`left sign right`, if its sides can be compared."""
        before = self.value(left, depth)
        after = self.members(right) if isinstance(sign, ast.In | ast.NotIn) else self.value(right, depth)
        compared = ast.Compare(before, [sign], [after])
        if not any(tree.fields(compared)):
            raise self.fault(left, "this comparison has no field, so its result is the same for every sample")
        if ast.unparse(before) == ast.unparse(after):
            raise self.fault(left, "both sides are the same")
        sides = [before, *(after.elts if isinstance(after, ast.List) else [after])]
        kinds = {_kind(side) for side in sides} - {"a field"}
        if len(kinds) > 1:
            raise self.fault(left, " cannot be compared with ".join(sorted(kinds)))
        if kinds == {_TRUTH} and not isinstance(sign, ast.Eq | ast.NotEq):
            raise self.fault(left, "true and false are compared by == and != only")
        return compared

    def members(self, node: ast.expr) -> ast.List:
        if not isinstance(node, ast.List):
            raise self.fault(node, "expected a list such as [1, 2] or ['en', 'de']")
        found: list[ast.expr] = []
        for member in node.elts:
            value = self.value(member, 1)
            if not isinstance(value.operand if isinstance(value, ast.UnaryOp) else value, ast.Constant):
                raise self.fault(member, "expected a number or a quoted text")
            constant = tree.constant(value)
            found.append(value if constant is None else tree.number(constant))
        if not found:
            raise self.fault(node, "expected a number or a quoted text")
        return ast.List(found)

    def value(self, node: ast.expr, depth: int) -> ast.expr:
        """The value that a node is. UserError for a condition, and for what cannot be computed."""
        self.check_depth(node, depth)
        match node:
            case ast.Name("missing"):
                raise self.fault(node, "write missing(field); a field of that name must be in backticks")
            case ast.Name():
                return self.atoms[node.col_offset + self.shift]
            case ast.UnaryOp(ast.USub(), inner):
                return ast.UnaryOp(ast.USub(), self.operand(inner, depth + 1))
            case ast.BinOp(left, sign, right) if isinstance(sign, tree.ARITHMETIC):
                made = ast.BinOp(self.operand(left, depth + 1), sign, self.operand(right, depth + 1))
                if isinstance(sign, tree.DIVISIONS) and tree.constant(made.right) == 0:
                    raise self.fault(right, "a division by 0")
                result = tree.constant(made)
                if result is not None and not math.isfinite(result):
                    raise self.fault(right, "this number does not fit into 64 bits")
                return made
            case ast.BoolOp() | ast.Compare() | ast.UnaryOp(ast.Not()) | ast.Call(ast.Name("missing")):
                raise self.fault(node, "expected a value, found a condition: comparisons are joined by and, or, not")
            case ast.Call():
                raise self.fault(node, "the only function is missing(field)")
            case ast.List():
                raise self.fault(node, "a list can only follow `in`")
        raise self.fault(node, f"{_OPERAND}, found {self.text[node.col_offset + self.shift]!r}")

    def operand(self, node: ast.expr, depth: int) -> ast.expr:
        """A value that is a number or can be one."""
        value = self.value(node, depth)
        if _kind(value) in ("text", _TRUTH):
            raise self.fault(node, "expected a number: nothing can be computed with text, true or false")
        return value

    def check_depth(self, node: ast.expr, depth: int) -> None:
        """UserError for what would need a deeper tree."""
        if depth > DEPTH:
            raise self.fault(node, f"more than {DEPTH} operators in each other")


_TRUTH = "true or false"


def _kind(node: ast.expr) -> str:
    if tree.is_text(node):
        return "text"
    if tree.field_of(node) is not None:
        return "a field"
    return _TRUTH if isinstance(node, ast.Name) else "a number"
