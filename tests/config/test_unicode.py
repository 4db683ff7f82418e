"""Strings that are no text: found, shown and mended."""

import json

import pytest

from daguerre import unicode

HALF = "\ud83d"


@pytest.mark.parametrize(
    ("text", "is_text"), [("a cat", True), ("\U0001f600 \u00e9", True), (HALF, False), ("a\udcff", False)]
)
def test_text_is_what_utf_8_can_hold(text, is_text):
    assert unicode.is_text(text) is is_text
    assert unicode.may_hold_halves(json.dumps(text).encode()) or is_text
    assert unicode.printable(text).encode()


def test_json_is_mended_everywhere_however_deep_it_is():
    document = {"a": HALF, f"{HALF}b": [1, f"{HALF}\u00e9", {"c": HALF}], "d": None}
    before = json.dumps(document)
    assert unicode.mended(document) == {"a": "?", "?b": [1, "?\u00e9", {"c": "?"}], "d": None}
    assert json.dumps(document) == before
    deep = found = [HALF]
    for _ in range(50_000):
        deep = [deep]
    mended = unicode.mended(deep)
    for _ in range(50_000):
        mended = mended[0]
    assert (mended, found) == (["?"], [HALF])
