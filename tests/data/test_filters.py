"""Filters: three spellings of one thing, what is refused, verdicts with counted reasons, life in a config."""

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import BaseModel, ValidationError

from daguerre.config import config as configs
from daguerre.config import schema
from daguerre.config.errors import ConfigError
from daguerre.data.filters.filter import CONDITIONS, Filters
from daguerre.data.index.index import Index

SPELLINGS = [
    ("pwatermark <= 0.5", "pwatermark <= 0.5"),
    ("original_width >= 512 and punsafe < 0.1", "original_width >= 512 and punsafe < 0.1"),
    ({"pwatermark": "<=0.5"}, "pwatermark <= 0.5"),
    ({"original_width": ">=512", "original_height": ">= 512"}, "original_width >= 512 and original_height >= 512"),
    ({"language": "== 'en'"}, "language == 'en'"),
    ({"language": 'in ["en", "de"]'}, "language in ['en', 'de']"),
    ({"language": "not in ['xx']"}, "language not in ['xx']"),
    ({"status": 200}, "status == 200"),
    ({"offset": -1.5}, "offset == -1.5"),
    ({"safe": True}, "safe == true"),
    ({"exif.iso": "<800"}, "`exif.iso` < 800"),
    ({"not": "> 1"}, "`not` > 1"),
    ({"a`b": "> 1"}, "`a``b` > 1"),
    ({"score": "lambda s: s > 4.5"}, "score > 4.5"),
    ({"a": "< b"}, "a < b"),
    (["aesthetic_score", "lambda s: s > 4.5"], "aesthetic_score > 4.5"),
    (
        [["aesthetic_score", "lambda s: s > 4.5"], ["nsfw_probability", "lambda x : 0 <= x < 0.01"]],
        "aesthetic_score > 4.5 and 0 <= nsfw_probability and nsfw_probability < 0.01",
    ),
    ((("aesthetic_score", "> 4.5"),), "aesthetic_score > 4.5"),
    ([["score", "lambda s: missing(s) or s > 4.5"]], "missing(score) or score > 4.5"),
    (["status", 200], "status == 200"),
    (None, ""),
    ("null", ""),
    ({}, ""),
    ([], ""),
]


@pytest.mark.parametrize(("given", "expression"), SPELLINGS)
def test_the_spellings_mean_one_expression(given, expression):
    filters = Filters(given)
    assert str(filters) == expression
    assert str(Filters(expression or None)) == expression


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "write an expression"),
        (True, "write an expression"),
        ("", "found the end"),
        ([1], "pairs"),
        (["a > 3"], "pairs"),
        ([["a", "> 3", "< 5"]], "pairs"),
        ([["a", "lambda s: s > 3"], "b > 3"], "pairs"),
        (["a > 3", "b > 2"], "a > 3: at character 1"),
        ({"a": "en"}, "a: at character 1: expected a comparison"),
        ({"a": "0.5"}, "expected a comparison"),
        ({"a": "> 0.5 or true"}, "expected one comparison"),
        ({"a": None}, "a: expected a comparison"),
        ({"a": ["en"]}, "a: expected a comparison"),
        ({"a": float("nan")}, "does not fit"),
        ({"a": float("inf")}, "does not fit"),
        ({"a": 10**400}, "does not fit"),
        ({"a": 2**53 + 1}, "does not fit"),
        ({"a": 10**5000}, "does not fit"),
        ({"": "> 3"}, "1 to 200 printable"),
        ({"a\x1b[31m": "> 3"}, "'a\\x1b[31m': a field's name has 1 to 200 printable"),
        ({"x" * 201: "> 3"}, "1 to 200 printable"),
        ({3: "> 3"}, "pairs"),
        ({str(i): "> 3" for i in range(CONDITIONS + 1)}, "1,001 fields are too many"),
        (
            {"a": "> 3", "b": "== a", "c": "lambda s: t > 3"},
            "c: at character 11: a function knows its parameter 's' only",
        ),
        ([["a", "> 3"], ["a", "== 'en'"]], "the field a is compared with text, and used as a number"),
    ],
)
def test_other_spellings_are_refused(given, words):
    with pytest.raises(ValidationError, match="error") as caught:
        Filters(given)
    (error,) = caught.value.errors()
    assert words in error["msg"]
    assert len(error["msg"]) < 500


def column(values, kind=None):
    return pa.array(values, kind or pa.float64())


def index(**fields):
    """An index whose fields are lists: numbers or None, or text or None."""
    count = len(next(iter(fields.values())))
    sizes = {name: np.array(fields.pop(name, [0] * count), np.int32) for name in ("heights_px", "widths_px")}
    numbers = {n: column([None if isinstance(v, str) else v for v in values]) for n, values in fields.items()}
    texts = {
        n: column([v if isinstance(v, str) else None for v in values], pa.string())
        for n, values in fields.items()
        if any(isinstance(v, str) for v in values)
    }
    for name, values in fields.items():
        if all(v is None or isinstance(v, str) for v in values):
            del numbers[name]
    return Index(np.arange(count), np.array([0, count]), **sizes, numbers=numbers, texts=texts)


def verdict(given, **fields):
    found = Filters(given).evaluate(index(**fields))
    assert found.passes.dtype == bool
    assert sum(found.rejected.values()) == np.count_nonzero(~found.passes)
    return found.passes.astype(int).tolist(), found.rejected


def test_no_filter_lets_all_pass():
    assert verdict(None, a=[1, None]) == ([1, 1], {})
    assert Filters().evaluate(index(a=[])).passes.shape == (0,)


def test_each_sample_is_counted_once_under_the_first_clause_that_it_fails():
    assert verdict(
        {"pwatermark": "<=0.5", "width": ">=512"}, pwatermark=[0.1, 0.9, 0.9, 0.1], width=[512, 512, 1, 1]
    ) == (
        [1, 0, 0, 0],
        {"filter: pwatermark <= 0.5": 2, "filter: width >= 512": 1},
    )


def test_a_missing_field_rejects_and_so_does_one_that_is_not_a_number():
    assert verdict("a <= 0.5", a=[0.1, None, "0.43", float("nan"), 0.9]) == (
        [1, 0, 0, 0, 0],
        {"filter: no a": 2, "filter: a is not a number": 1, "filter: a <= 0.5": 1},
    )
    assert verdict("lang == 'en'", lang=["en", 3, None, "de"]) == (
        [1, 0, 0, 0],
        {"filter: no lang": 1, "filter: lang is not text": 1, "filter: lang == 'en'": 1},
    )


@pytest.mark.parametrize("given", ["not a > 0.5", "a <= 0.5 or b == 1", "b == 1 or a <= 0.5", "a - a + b == 1"])
def test_a_missing_field_rejects_wherever_it_stands(given):
    passes, rejected = verdict(given, a=[0.1, None, float("nan")], b=[1, 1, 1])
    assert passes == [1, 0, 0]
    assert rejected == {"filter: no a": 2}


def test_missing_can_be_asked_for():
    a = [0.1, None, 0.9, "text", float("nan")]
    assert verdict("missing(a)", a=a)[0] == [0, 1, 0, 0, 1]
    assert verdict("not missing(a)", a=a)[0] == [1, 0, 1, 1, 0]
    assert verdict("missing(a) or a < 0.5", a=a) == (
        [1, 1, 0, 0, 1],
        {"filter: a is not a number": 1, "filter: missing(a) or a < 0.5": 1},
    )
    assert verdict("not missing(a) and a < 0.5", a=a)[1] == {
        "filter: not missing(a)": 2,
        "filter: a is not a number": 1,
        "filter: a < 0.5": 1,
    }
    assert verdict("missing(b) or a < 0.5", a=[0.1, 0.9], b=[None, 1])[0] == [1, 0]
    assert verdict("missing(a) and b == 1 or a < 0.5", a=[None, None, 0.1], b=[1, 2, 2]) == (
        [1, 0, 1],
        {"filter: no a": 1},
    )


def test_a_field_that_no_sample_has_is_missing_in_all():
    assert verdict("nothing > 3 and a > 1", a=[1, 2]) == ([0, 0], {"filter: no nothing": 2})
    assert verdict("nothing == 'x'", a=[1, 2]) == ([0, 0], {"filter: no nothing": 2})


def test_a_field_alone_is_true_or_false():
    a = [1, 0, 2, "true", None]
    assert verdict("a", a=a) == (
        [1, 0, 0, 0, 0],
        {"filter: no a": 1, "filter: a is not true or false": 2, "filter: a": 1},
    )
    assert verdict("not a", a=a)[0] == [0, 1, 0, 0, 0]
    assert verdict("a == true", a=a)[0] == [1, 0, 0, 0, 0]
    assert verdict("false == a", a=a)[0] == [0, 1, 0, 0, 0]


def test_two_fields_are_compared_where_they_are_of_one_kind():
    assert verdict("a < b", a=[1, "a", 1, "b", None, 2], b=[2, "b", "x", 3, 1, 2]) == (
        [1, 1, 0, 0, 0, 0],
        {"filter: no a": 1, "filter: a is not of the kind of b": 2, "filter: a < b": 1},
    )
    assert verdict("missing(a) or a == b", a=[None, 1, 1], b=[1, 1, None])[1] == {"filter: no b": 1}


def test_what_cannot_be_computed_is_its_own_reason():
    found = verdict("1 / a > 0", a=[1, 0, -1])
    assert found == ([1, 0, 0], {"filter: cannot be computed: 1 / a > 0": 1, "filter: 1 / a > 0": 1})
    assert verdict("not 5 % a == 1", a=[2, 0, 3])[0] == [0, 0, 1]
    assert verdict("not 5 // a == 1", a=[5, 0, 3])[0] == [0, 0, 0]
    big = [1e308, 1.0]
    assert verdict("a * a > 5", a=big)[0] == [1, 0]  # beyond all floats is more than 5
    assert verdict("not a * a - a * a == 0", a=big)[0] == [0, 0]


def test_the_size_of_the_image_is_there_without_metadata():
    sizes = {"heights_px": [512, 300, 0], "widths_px": [1024, 600, 600]}
    assert verdict("width >= 700 and aspect == 2", a=[1, 1, 1], **sizes) == (
        [1, 0, 0],
        {"filter: width >= 700": 2},
    )
    assert verdict("aspect == 2", a=[1, 1, 1], **sizes)[1] == {"filter: no aspect": 1}
    assert verdict("height > 300", a=[1, 1, 1], **sizes)[1] == {"filter: no height": 1, "filter: height > 300": 1}
    assert verdict("width > 10", width=[None, 11, 10], **sizes)[1] == {"filter: no width": 1, "filter: width > 10": 1}


def test_text_is_ordered_by_code_points():
    days = ["2019-12-31", "2020-01-01", "é", "Z", "z", "\U0001f600", ""]
    for sign, holds in {"<": str.__lt__, "<=": str.__le__, ">": str.__gt__, ">=": str.__ge__}.items():
        for text in ("2020-01-01", "é", "\uffff", ""):
            given = Filters({"day": f"{sign} '{text}'"})
            expected = [holds(day, text) for day in days]
            assert given.evaluate(index(day=days)).passes.tolist() == expected
            turned = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}[sign]
            assert Filters(f"'{text}' {turned} day").evaluate(index(day=days)).passes.tolist() == expected


@pytest.mark.parametrize("count", [0, 1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 200_001])
def test_stretches_join_without_a_seam(count):
    rng = np.random.default_rng(0)
    values = rng.random(count)
    texts = rng.choice(["en", "de", "fr"], count)
    mask = rng.random(count) < 0.1
    given = Index(
        np.arange(count),
        np.array([0, count]),
        rng.integers(0, 900, count).astype(np.int32),
        rng.integers(0, 900, count).astype(np.int32),
        {"a": pa.array(values, mask=mask)},
        {"lang": pa.array(texts)},
    )
    found = Filters("a < 0.5 and lang in ['en', 'de'] and width > 100").evaluate(given)
    expected = (values < 0.5) & ~mask & (texts != "fr") & (given.widths_px > 100)
    np.testing.assert_array_equal(found.passes, expected)
    assert sum(found.rejected.values()) == count - expected.sum()


def test_a_million_samples_take_no_time():
    count = 1_000_000
    values = np.random.default_rng(0).random(count)
    given = Index(np.arange(count), np.array([0, count]), np.zeros(count), np.zeros(count), {"a": pa.array(values)})
    start = time.process_time()
    assert Filters("a <= 0.5 and a * 2 > 0.5").evaluate(given).passes.sum() == np.sum((values <= 0.5) & (values > 0.25))
    assert time.process_time() - start < 1.0  # 0.015 s, measured


def test_columns_in_pieces_and_cut_out_ones_are_read_alike():
    pieces = pa.chunked_array([[1.0, None], [], [3.0]])
    texts = pa.array(["x", "a", None, "b", "c"]).slice(1, 3)
    given = Index(np.arange(3), np.array([0, 3]), np.zeros(3), np.zeros(3), {"a": pieces}, {"b": texts})
    assert Filters("a == 3 and b == 'b'").evaluate(given).passes.tolist() == [False, False, True]
    assert Filters("missing(a)").evaluate(given).passes.tolist() == [False, True, False]
    assert Filters("missing(b)").evaluate(given).passes.tolist() == [False, True, False]


def test_clauses_are_filters_of_their_own():
    filters = Filters({"a": "lambda s: 0 < s < 3", "b": "== 'x'"})
    assert [str(clause) for clause in filters.clauses()] == ["0 < a", "a < 3", "b == 'x'"]
    given = index(a=[1, 4, -1], b=["x", "x", "y"])
    assert [clause.evaluate(given).passes.sum() for clause in filters.clauses()] == [2, 2, 2]
    assert Filters().clauses() == ()


def test_fields():
    assert Filters("a < b + `c d` or not missing(e) and f in ['x']").fields() == {"a", "b", "c d", "e", "f"}
    assert Filters().fields() == frozenset()


def test_it_travels_to_other_processes():
    filters = Filters({"a": "> 3"})
    assert str(filters)
    again = pickle.loads(pickle.dumps(filters))  # noqa: S301
    assert again == filters
    assert str(again) == "a > 3"
    assert len(pickle.dumps(Filters("a > 1 and " * 900 + "b > 1"))) < 200_000


def test_it_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Filters("a > 3").root = None


class Holder(BaseModel):
    filters: Filters = Filters()


def test_it_is_a_field_of_settings():
    assert Holder(filters="a > 3").model_dump(mode="json") == {"filters": "a > 3"}
    assert Holder().model_dump(mode="json") == {"filters": None}
    with pytest.raises(ValidationError) as caught:
        Holder(filters="a >")
    (error,) = caught.value.errors()
    assert (error["loc"], error["type"]) == (("filters",), "value_error")
    found = Holder.model_json_schema()
    assert json.dumps(found)
    kinds = {option["type"] for option in found["$defs"]["Filters"]["anyOf"]}
    assert kinds == {"null", "string", "object", "array"}


RECIPE = """
run_name: tiny
model: {family: sd, pretrained_model_name_or_path: somewhere}
objective: {name: v}
data: {source: folder, path: somewhere%s}
training: {duration: 20 steps, global_batch_size: 4}
"""


def recipe(folder: Path, filters: str = "", name: str = "recipe.yaml") -> Path:
    (folder / name).write_text(RECIPE % (f", filters: {filters}" if filters else ""), encoding="utf-8")
    return folder / name


@pytest.mark.parametrize(
    "filters",
    [
        "",
        "null",
        "\"a > 3 and b in ['x', 'y']\"",
        '{pwatermark: "<=0.5", status: 200, safe: true}',
        '[[aesthetic_score, "lambda s: s > 4.5"], [nsfw, "lambda s: s < 0.01"]]',
        '[aesthetic_score, "lambda s: s > 4.5"]',
    ],
)
def test_a_config_is_dumped_as_it_was_given_and_read_back(tmp_path, filters):
    config = configs.load(str(recipe(tmp_path, filters))).config
    (tmp_path / "again.yaml").write_text(configs.dump(config), encoding="utf-8")
    again = configs.load(str(tmp_path / "again.yaml")).config
    assert again == config
    assert configs.diff(config, again) == []
    assert again.data.sources["images"].filters.root == config.data.sources["images"].filters.root
    assert str(again.data.sources["images"].filters) == str(config.data.sources["images"].filters)


def test_a_config_shows_what_changed(tmp_path):
    old = configs.load(str(recipe(tmp_path, '{a: ">3", b: "<2"}'))).config
    new = configs.load(str(recipe(tmp_path, '{a: ">4", b: "<2"}', "new.yaml"))).config
    assert [(c.path, c.old, c.new, c.resume) for c in configs.diff(old, new)] == [
        ("data.filters.a", ">3", ">4", "identity")
    ]


def test_on_the_command_line_it_is_an_expression(tmp_path):
    path = str(recipe(tmp_path, '{a: ">3"}'))
    assert configs.load(path, ["data.filters=width >= 512 and b == 'x: y'"]).config.data.sources[
        "images"
    ].filters.root == ("width >= 512 and b == 'x: y'")
    group = configs.load(path, ['data.filters={b: "<=0.5", c: 200}']).config.data.sources["images"].filters
    assert str(group) == "a > 3 and b <= 0.5 and c == 200"
    pairs = configs.load(path, ["data.filters=[[b, 'lambda s: s > 4.5']]"]).config.data.sources["images"].filters
    assert str(pairs) == "b > 4.5"
    assert configs.load(path, ["data.filters=null"]).config.data.sources["images"].filters == Filters()


def test_what_is_wrong_is_shown_with_its_place(tmp_path):
    with pytest.raises(ConfigError) as caught:
        configs.load(str(recipe(tmp_path, '"width >= 512 and"')))
    (problem,) = caught.value.problems
    assert problem.path == "data.filters"
    assert problem.text.splitlines() == [
        "at character 17: expected a field, a number or a quoted text, found the end",
        "    width >= 512 and",
        "                    ^",
    ]


def test_the_template_says_what_is_allowed():
    choices = {"model": "sd", "objective": "v", "adapter": "full", "data": "folder", "optimizer": "adamw"}
    text = schema.template(choices)
    assert "# filters: null" in text
    assert "[an expression, {field: comparison} or a list of pairs]" in " ".join(text.replace("#", "").split())


def test_the_schema_for_editors_knows_the_spellings():
    text = json.dumps(schema.json_schema()["$defs"]["Filters"])
    assert "prefixItems" in text
