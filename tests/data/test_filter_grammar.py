"""The grammar of filters: what is read how, what is refused and where, and that nothing hostile costs anything."""

import ast
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daguerre.data.filters import expression as tree
from daguerre.data.filters import parser
from daguerre.data.filters.expression import canonical, uses
from daguerre.data.filters.parser import CHARACTERS, DEPTH, about, expression
from daguerre.data.index import file


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a>1", "a > 1"),
        ("  a\n  >\t1 ", "a > 1"),
        ("((a)) > (1)", "a > 1"),
        ("a > 1 and b > 2 or c > 3 and d > 4", "a > 1 and b > 2 or c > 3 and d > 4"),
        ("a > 1 and (b > 2 or c > 3)", "a > 1 and (b > 2 or c > 3)"),
        ("(a > 1 and b > 2) and (c > 3 and d > 4)", "a > 1 and b > 2 and c > 3 and d > 4"),
        ("not a > 1 and b > 2", "not a > 1 and b > 2"),
        ("not (a > 1 and b > 2)", "not (a > 1 and b > 2)"),
        ("not not a", "not not a"),
        ("a + b * c - d / e // f % g > 1", "a + b * c - d / e // f % g > 1"),
        ("(a + b) * (c - d) > -(e + 1)", "(a + b) * (c - d) > -(e + 1)"),
        ("a - (b - c) > 1", "a - (b - c) > 1"),
        ("(a - b) - c > 1", "a - b - c > 1"),
        ("-a * b < - - c", "-a * b < --c"),
        ("0.1 < a <= 0.5", "0.1 < a and a <= 0.5"),
        ("1 < a < b in [3, -4.5]", "1 < a and a < b and b in [3, -4.5]"),
        ("a not in ['x', \"y\"]", "a not in ['x', 'y']"),
        ("not a in [1]", "not a in [1]"),
        ("a % 64 in [0]", "a % 64 in [0]"),
        ("a == True or b != False", "a == true or b != false"),
        ("missing(a) or missing( `b c` )", "missing(a) or missing(`b c`)"),
        ("`a.b` > 1 and `and` and `a``b` < 2", "`a.b` > 1 and `and` and `a``b` < 2"),
        ("größe > 1", "größe > 1"),
        (r"a == 'it\'s' or a == " + r'"\\ \" \n\t"', 'a == "it\'s" or a == ' + r"'\\ " + '"' + r" \n\t'"),
        (r"a == '\u00e9' or a == '\U0001F600'", "a == 'é' or a == '\U0001f600'"),
        (r"a == '\x41\r'", r"a == 'A\r'"),
        ("a == '\x1b\u202e\U000e0001'", r"a == '\x1b\u202e\U000e0001'"),
        ("a in [1, ]", "a in [1]"),
        (
            "class > 1 and ﬁ > 1 and with",
            "class > 1 and ﬁ > 1 and with",
        ),
        ("a > 1e3 and a < .5 and a != 5. and a > 1E-7", "a > 1000 and a < 0.5 and a != 5 and a > 1e-07"),
        ("a > 9007199254740992", "a > 9007199254740992.0"),
        ("a > 007", "a > 7"),
        ("a > 2 * 3 + 1", "a > 2 * 3 + 1"),
        ("__import__ > 3", "__import__ > 3"),  # a field of that name, and nothing else
    ],
)
def test_what_is_read(text, meant):
    found = expression(text)
    assert canonical(found) == meant
    assert ast.dump(expression(meant)) == ast.dump(found)


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("", 1, "expected a field, a number or a quoted text, found the end"),
        ("a >", 4, "found the end"),
        ("(a > 1", 1, "never closed"),
        ("a > 1)", 6, "unmatched ')'"),
        ("a > 1 b", 7, "'b' does not fit"),
        ("512px < a", 4, "found 'px'"),
        ("a > > 1", 5, "'>' does not fit"),
        ("a > and", 5, "'and' does not fit"),
        ("a > 0x10", 6, "found 'x10'"),
        ("a > 1_000", 6, "found '_000'"),
        ("a > +1", 5, "found '+'"),
        ("a ** 2 > 1", 3, "'*' is not allowed"),
        ("a => 1", 3, "'is equal to' is written =="),
        ("a = 1", 3, "written =="),
        ("a <> 1", 3, "'<' is not allowed"),
        ("a > 1 && b > 1", 7, "write and"),
        ("a > 1 || b > 1", 7, "write or"),
        ("!a", 1, "write not"),
        ("a > ~1", 5, "'~' is not allowed here"),
        ("a; b", 2, "';' is not allowed here"),
        ("a > 'x", 5, "no closing quote"),
        ('a > "x', 5, "no closing quote"),
        ("a == 'x\ny'", 6, "no closing quote"),
        ("`a > 1", 1, "no closing backtick"),
        ("`` > 1", 1, "1 to 200 printable"),
        ("`a\nb` > 1", 1, "1 to 200 printable"),
        (r"a == '\x4g'", 7, "a backslash must come before"),
        (r"a == '\a'", 7, "a backslash must come before"),
        (r"a == '\u00g1'", 7, "a backslash must come before"),
        (r"a == '\u 041'", 7, "a backslash must come before"),
        (r"a == '\u41'", 7, "a backslash must come before"),
        (r"a == '\U00110000'", 7, "a backslash must come before"),
        (r"a == '\ud800'", 7, "a backslash must come before"),
        ("a is None", 3, "write ==, or missing(field)"),
        ("a == null", 6, "write missing(field)"),
        ("missing > 1", 1, "write missing(field)"),
        ("missing()", 1, "the name of one field"),
        ("missing('a')", 1, "the name of one field"),
        ("missing(a, b)", 1, "the name of one field"),
        ("missing(a) > 1", 1, "found a condition"),
        ("lambda s: s > 4.5", 1, "a lambda must be in a pair"),
        ("a if b else c", 3, "found 'if'"),
        ("a in 'xyz'", 6, "expected a list"),
        ("a in b", 6, "expected a list"),
        ("a in []", 6, "expected a number or a quoted text"),
        ("a in [1 2]", 9, "'2' does not fit"),
        ("a in [b]", 7, "expected a number or a quoted text"),
        ("a in [-'x']", 8, "expected a number"),
        ("a in [1] < 3", 6, "a list can only follow `in`"),
        ("[1, 2] == a", 1, "a list can only follow `in`"),
        ("a not > 3", 7, "'>' does not fit"),
        ("a < not b", 5, "'not' does not fit"),
        ("a == (b > 3)", 7, "found a condition"),
        ("(a > 3) + 1 > 2", 2, "found a condition"),
        ("-(a > 3) > 2", 3, "found a condition"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text, at, words):
    refused(text, at, words)


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("1 < 2", 1, "no field"),
        ("a > 1 or 1 < 2", 10, "no field"),
        ("0 < 1 < a", 1, "no field"),
        ("'a' == 'b'", 1, "no field"),
        ("3 in [3]", 1, "no field"),
        ("true", 1, "expected a condition"),
        ("a > 1 and true", 11, "expected a condition"),
        ("a > 1 and 3", 11, "expected a condition"),
        ("'x'", 1, "expected a condition"),
        ("a + 1", 1, "expected a condition"),
        ("not 'x'", 5, "expected a condition"),
        ("a == a", 1, "both sides are the same"),
        ("a + 1 > a + 1", 1, "both sides are the same"),
        ("a + 1 > 'x'", 1, "a number cannot be compared with text"),
        ("-a == 'x'", 1, "a number cannot be compared with text"),
        ("a + 1 == true", 1, "a number cannot be compared with true or false"),
        ("a > true", 1, "== and != only"),
        ("a > 'x' + 1", 5, "nothing can be computed with text"),
        ("a * true > 1", 5, "nothing can be computed with text"),
        ("-'x' == a", 2, "nothing can be computed with text"),
        ("a in [1, 'x']", 1, "a number cannot be compared with text"),
        ("a + 1 in ['x']", 1, "a number cannot be compared with text"),
        ("'x' in ['x']", 1, "no field"),
        ("a / 0 > 1", 5, "a division by 0"),
        ("a % (2 - 2) > 1", 6, "a division by 0"),
        ("a // -0 > 1", 6, "a division by 0"),
        ("a > 1e999", 5, "does not fit"),
        ("a > " + "9" * 400, 5, "does not fit"),
        ("a > 1e-999", 5, "does not fit"),
        ("a > 1e200 * 1e200", 13, "does not fit"),
        ("a == 9007199254740993", 6, "this number is too large to be exact"),
        ("a == " + "0" * 5000 + "9007199254740993", 6, "this number is too large to be exact"),
        (f"a == '{'x' * 64}'", 6, "more than 63 characters"),
        ("a == '\ud800'", 7, "no character"),
        ("x" * 201 + " > 1", 1, "1 to 200 printable"),
    ],
)
def test_what_means_nothing_is_refused_with_its_place(text, at, words):
    refused(text, at, words)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true') == 0",
        "a.__class__ > 3",
        "().__class__.__bases__[0].__subclasses__() == a",
        "open('/etc/passwd') == a",
        "eval('1') > a",
        "(lambda: 1)() > a",
        "[x for x in a] == 3",
        "{a: 1} == b",
        "a[0] > 1",
        "f'{a}' == b",
        "a := 3",
        "a > 1; import os",
        "a > 1\nimport os",
        "a if a > 1 else b",
        "await a",
        "a @ b > 1",
        "a ^ b > 1",
        "a << 3 > 1",
        "`a > 1`; drop",
        "a == 'x' 'y'",
        "\x00 > 1",
        "a > １",  # a digit, but not one of ours
        "%s > 1",
        "$HOME > 1",
        "${a} > 1",
    ],
)
def test_code_is_refused(text):
    refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "lambda s: __import__('os').system('true')",
        "lambda s: s.lower() == 'x'",
        "lambda s: len(s) > 3",
        "lambda s: t > 3",
        "lambda s: `s` > 3",
        "lambda s: missing(t)",
        "lambda s: True",
        "lambda s: 1 < 2",
        "lambda: a > 3",
        "lambda s, t: s > 3",
        "lambda s=3: s > 3",
        "lambda *s: s > 3",
        "lambda `s`: s > 3",
        "lambda and: and > 3",
        "lambda s: lambda t: t > 3",
        "lambda s: (lambda t: t > 3)(s)",
        "lambda s s > 3",
        "lambda s:",
        "lambda",
        "lambda s: s > 3, 4",
    ],
)
def test_other_functions_are_refused(text):
    with pytest.raises(ValueError, match="at character"):
        about("field", text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000 + "a > 1" + ")" * 100_000,
        "(" * 4_000 + "a > 1" + ")" * 4_000,
        "(" * 9_999,
        "not " * 2_400 + "a > 1",
        "-" * 9_000 + "a > 1",
        "a" + " + a" * 2_000 + " > 1",
        "a" + " - (a" * 1_500,
        "a > 1 or (b > 1 and (" * 300,
        "[" * 9_999,
        "a" * 10_000_000,
        "a > " + "9" * 10_000_000,
        "a in [" + "1, " * 3_000_000 + "1]",
        "'" + "\\" * 9_998,
        "`" * 9_999,
        "a == '" + "\\'" * 4_000,
        "\u00e9" * 9_999,
        " " * 10_000_000,
    ],
    ids=lambda text: f"{text[:12]}...{len(text)}",
)
def test_what_is_deep_or_long_is_refused_at_once(text):
    calls = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        with pytest.raises(ValueError, match=r"at character|at most") as caught:
            expression(text)
    finally:
        sys.setprofile(before)
    assert len(calls) < 200_000
    assert len(str(caught.value)) < 400


def test_as_much_as_is_allowed_is_read_and_worked_with():
    deep = "(" * (DEPTH - 1) + "a" + ")" * (DEPTH - 1) + " > 1"
    assert canonical(expression(deep)) == "a > 1"
    sums = "a" + " + a" * (DEPTH - 3) + " > 1"
    assert canonical(expression(sums)) == sums
    nots = "not " * (DEPTH - 1) + "a"
    assert canonical(expression(nots)) == nots
    wide = " and ".join(f"f{i} > 1" for i in range(700))
    assert len(tree.clauses(expression(wide))) == 700
    either = " or ".join("a > 1" for _ in range(1_000))
    assert canonical(expression(either)) == either
    assert len(either) <= CHARACTERS
    with pytest.raises(ValueError, match="10,001 characters"):
        expression(" " * (CHARACTERS + 1))


def test_a_fault_shows_one_line_around_its_place():
    with pytest.raises(ValueError, match="at character 113") as caught:
        expression("aaaaa > 1 and " * 8 + "\x1b[31m\nbbbb > 1" + " and ccccc > 1" * 8)
    first, shown, caret = str(caught.value).splitlines()
    assert first == "at character 113: '\\x1b' is not allowed here"
    assert shown.isprintable()
    assert caret == " " * 44 + "^"
    assert shown[44:].strip().startswith("[31m bbbb > 1")


def test_a_character_that_moves_the_cursor_is_not_shown():
    with pytest.raises(ValueError, match="is not allowed here") as caught:
        expression("a > 1 \u202e")
    assert str(caught.value).splitlines()[0].isascii()


def test_uses_name_fields_and_what_they_must_be():
    found = [(use.name, use.kind) for use in uses(expression("a + 1 > b and c == 'x' and d < e and missing(f) or g"))]
    assert found == [
        ("a", "number"),
        ("b", "number"),
        ("c", "text"),
        ("d", "any"),
        ("e", "any"),
        ("f", "missing"),
        ("g", "flag"),
    ]


def refused(text, at=None, words=""):
    with pytest.raises(ValueError, match=r"at character|at most") as caught:
        expression(text)
    message = str(caught.value)
    first, _, caret = message.splitlines() if "at character" in message else (message, "", "")
    assert words in first
    if at is not None:
        assert f"at character {at}:" in first
        assert len(caret) == 5 + min(at - 1, 40)


NAMES = st.sampled_from(["a", "b", "c", "width", "größe", "a_1"])
NUMBERS = st.integers(0, 2000).map(str) | st.floats(0, 1e6).map(repr)
PLAIN = st.characters(
    min_codepoint=32, max_codepoint=0x2FF, exclude_characters="'\\\"", exclude_categories=["Cc", "Cf"]
)
QUOTED = st.text(PLAIN, max_size=6).map(lambda text: f"'{text}'") | st.sampled_from(
    ['"x"', r"'\''", r'"\n"', r"'\\'", r"'\u202e'"]
)


def loosely(parts):
    """Joined with more or less white space, in parentheses or not."""
    return st.tuples(parts, st.booleans()).map(lambda found: f"( {found[0]} )" if found[1] else found[0])


VALUES = st.recursive(
    NAMES | NUMBERS,
    lambda inner: loosely(
        st.tuples(inner, st.sampled_from(["+", " - ", "*", "/ ", " //", "%"]), inner).map("".join)
        | inner.map(lambda text: f"-{text}")
    ),
    max_leaves=5,
)
COMPARISONS = st.sampled_from([" < ", "<=", ">", " >=", "==", " != "])
SIMPLE = (
    st.tuples(VALUES, COMPARISONS, VALUES).map("".join)
    | st.tuples(VALUES, COMPARISONS, VALUES, COMPARISONS, VALUES).map("".join)
    | st.tuples(NAMES, COMPARISONS, QUOTED).map("".join)
    | st.tuples(
        NAMES, st.sampled_from([" in ", " not in "]), st.lists(QUOTED, min_size=1, max_size=3).map(", ".join)
    ).map(lambda found: f"{found[0]}{found[1]}[{found[2]}]")
    | st.tuples(
        VALUES, st.sampled_from([" in ", " not in "]), st.lists(NUMBERS, min_size=1, max_size=3).map(", ".join)
    ).map(lambda found: f"{found[0]}{found[1]}[{found[2]}]")
    | NAMES
)
EXPRESSIONS = st.recursive(
    SIMPLE,
    lambda inner: loosely(
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map("".join) | inner.map(lambda text: f"not {text}")
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(EXPRESSIONS)
def test_trees_are_those_of_python(text):
    """Python's tree of the text itself has the same parts (it is looked at, never run)."""
    found = read(text)
    if isinstance(found, str):
        assert any(word in found for word in ("no field", "same", "division", "does not fit", "compared", "computed"))
    else:
        assert ast.dump(found) == ast.dump(from_python(ast.parse(text, mode="eval").body))
        assert ast.dump(expression(canonical(found))) == ast.dump(found)


def read(text):
    """The tree, or the text of the refusal."""
    try:
        return expression(text)
    except ValueError as error:
        return str(error)


def from_python(node):
    """Our tree of a part of Python's."""
    match node:
        case ast.Name(name):
            return tree.field(name)
        case ast.Constant(str() as value):
            return ast.Constant(value)
        case ast.Constant(value):
            return tree.number(float(value))
        case ast.UnaryOp(sign, inner):
            return ast.UnaryOp(sign, from_python(inner))
        case ast.BinOp(left, sign, right):
            return ast.BinOp(from_python(left), sign, from_python(right))
        case ast.BoolOp(sign, parts):
            return tree.joined(sign, [from_python(part) for part in parts])
        case ast.List(members):
            return ast.List([from_python(member) for member in members])
        case ast.Compare(left, signs, rights):
            sides = [from_python(side) for side in (left, *rights)]
            links = zip(sides[:-1], signs, sides[1:], strict=True)
            return tree.joined(ast.And(), [ast.Compare(first, [sign], [second]) for first, sign, second in links])
    raise AssertionError(ast.dump(node))


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from([*"ab1.'\"`()[]<>=!+-*/%,: \\\n", " and ", " in ", "not "]), max_size=30).map("".join)
)
def test_whatever_is_given_is_a_tree_or_a_refusal(text):
    found = read(text)
    if isinstance(found, str):
        assert len(found.splitlines()) in (1, 3)
        assert found.splitlines()[0].isprintable()
    else:
        assert ast.dump(expression(canonical(found))) == ast.dump(found)


def test_texts_are_as_long_as_indexes_keep_them():
    assert tree.TEXT_CHARACTERS == file.TEXT_LIMIT


def test_python_sees_nothing_that_a_user_wrote(monkeypatch):
    seen, parse = [], ast.parse
    with monkeypatch.context() as patch:
        patch.setattr(parser.ast, "parse", lambda text, **given: seen.append(text) or parse(text, **given))
        expression("`os.system` == 'x' or __import__ > 1e3 and missing(a) or not b in ['c'] and d in [-2]")
        about("a", "lambda s: s > 9 and s != true")
    for text in seen:
        assert set(re.findall(r"[^\W_]+", text)) <= tree.KEYWORDS, text
    assert len(seen) == 2
