"""Class labels: the settings that give classes their words, and ImageNet's names."""

import json
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from daguerre.data import class_labels
from daguerre.data.class_labels import Labels
from daguerre.data.images.headers import Undecodable
from daguerre.errors import UserError

SETTING: TypeAdapter[Any] = TypeAdapter(Labels)


def test_imagenet_has_a_thousand_names_and_no_two_alike():
    names = class_labels.imagenet()
    assert len(names) == 1000
    assert len({name.lower() for name in names}) == 1000
    assert all(name == name.strip() and name.isascii() and name for name in names)
    known = {0: "tench", 1: "goldfish", 207: "golden retriever", 134: "crane bird", 517: "crane", 999: "toilet tissue"}
    known |= {281: "tabby", 386: "African elephant", 388: "giant panda", 537: "dogsled", 817: "sports car"}
    known |= {264: "Cardigan Welsh corgi", 474: "cardigan", 638: "maillot", 639: "tank suit", 963: "pizza"}
    assert {number: names[number] for number in known} == known


def test_imagenet_by_its_name():
    opened = class_labels.opened(SETTING.validate_python("imagenet"))
    assert opened.text(207) == "golden retriever"
    assert len(opened.prompts) == 1000
    with pytest.raises(Undecodable, match="class without a text in idx_to_prompt"):
        opened.text(1000)


@pytest.mark.parametrize("label", [7, 7.0, "7", " 007\n", b"7\n", np.int64(7), np.float32(7), np.uint8(7), "+7"])
def test_a_label_is_a_number_however_it_is_stored(label):
    assert class_labels.opened({"7": "seven"}).text(label) == "seven"


@pytest.mark.parametrize("label", [7.5, -7, "", "seven", None, b"\xff", float("nan"), float("inf"), "7 8", "9" * 5000])
def test_a_label_without_a_text_leaves_the_slot_empty(label):
    with pytest.raises(Undecodable, match="class without a text in idx_to_prompt"):
        class_labels.opened({"7": "seven"}).text(label)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (["a tench", " a goldfish "], {"0": "a tench", "1": "a goldfish"}),
        (
            {"1": "one", 2: "two", "n01440764": "tench", "-3": "minus"},
            {"1": "one", "2": "two", "n01440764": "tench", "-3": "minus"},
        ),
        (("a",), {"0": "a"}),
    ],
)
def test_maps_and_lists(given, prompts, tmp_path):
    checked = SETTING.validate_python(given)
    assert class_labels.opened(checked).prompts == prompts
    assert SETTING.validate_python(SETTING.dump_python(checked, mode="json")) == checked
    path = tmp_path / "names.json"
    path.write_text("\ufeff" + json.dumps(given), encoding="utf-8")
    assert class_labels.opened(SETTING.validate_python(str(path))).prompts == prompts


def test_a_file_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "names.json").write_text('["x"]', encoding="utf-8")
    assert class_labels.opened("~/names.json").text(0) == "x"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "the path of a JSON file"),
        ([], "names no class"),
        ({}, "names no class"),
        (["a", ""], "has no text for the class '1'"),
        (["a", " \n"], "has no text for the class '1'"),
        ({"7": "a", "07": "b"}, "names the class '7' twice"),
        ({"7": "a", 7: "b"}, "names the class '7' twice"),
        ([1, 2], "valid string"),
        (3, "valid string"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, words):
    with pytest.raises(ValidationError) as caught:
        SETTING.validate_python(given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"0": "a", "0": "b"}', "names the class '0' twice"),
        (b'{"0": "a", "00": "b"}', "names the class '0' twice"),
        (b'["a", 3]', "has no text for the class '1'"),
        (b'{"0": ["a"]}', "has no text for the class '0'"),
        (b'{"0": {"a": "b"}}', "has no text for the class '0'"),
        (b"3", "neither a map nor a list"),
        (b'"imagenet"', "neither a map nor a list"),
        (b"null", "neither a map nor a list"),
        (b"[]", "names no class"),
        (b'["a"', "is no JSON"),
        (b"", "is no JSON"),
        (b"<html>", "is no JSON"),
        (b'{"0": ' + b"1" * 5000 + b"}", "is no JSON"),
        (b'["\xff"]', "is not UTF-8"),
        (b"[" * 100_000, "is no"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_the_setting(content, words, tmp_path):
    path = tmp_path / "names.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        class_labels.opened(str(path), "data.sources.cats.idx_to_prompt")
    message = str(caught.value)
    assert message.startswith(f"data.sources.cats.idx_to_prompt: {str(path)!r} ")
    assert words in message
    assert '{"0": "tench", "1": "goldfish"}' in message
    assert len(message) < 500


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data\.idx_to_prompt: 'imagenet\.json' does not exist \(seen from '/"):
        class_labels.opened("imagenet.json")
    with pytest.raises(UserError, match="cannot be read"):
        class_labels.opened(str(tmp_path))


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(class_labels, "FILE_BYTES", 100)
    (tmp_path / "names.json").write_text(json.dumps(["x" * 200]), encoding="utf-8")
    with pytest.raises(UserError, match="more than 100 bytes"):
        class_labels.opened(str(tmp_path / "names.json"))


def test_a_map_in_the_recipe_that_is_wrong_is_named_too():
    with pytest.raises(UserError, match=r"^data\.idx_to_prompt: names no class\. Give the path"):
        class_labels.opened({})
