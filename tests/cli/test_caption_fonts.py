"""Captions of a contact sheet are drawn by a font that has their characters, and what none has is said."""

from __future__ import annotations

import pytest
from PIL import ImageFont

from daguerre.cli.data import fonts


def test_pillows_own_font_draws_plain_letters():
    font, lacking = fonts.best("a cafe, 3 dogs", 15)
    assert not lacking
    assert font.getname() == ImageFont.load_default(15).getname()


def test_what_no_font_has_is_named(monkeypatch):
    monkeypatch.setattr(fonts, "PLACES", ())
    monkeypatch.setattr(fonts, "SCRIPTS", ())
    _, lacking = fonts.best("a 狗 and a 猫, 狗", 15)
    assert lacking == "狗猫"


def test_a_font_of_the_machine_that_lacks_less_is_taken(tmp_path, monkeypatch):
    found = [place for place in fonts.PLACES if fonts._at(place, 15) is not None]
    if not found:
        pytest.skip("this machine has no font of the list")
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    monkeypatch.setattr(fonts, "PLACES", (str(tmp_path / "broken.ttf"), *found))
    font, lacking = fonts.best("собака", 15)
    assert not lacking
    assert font.getname() != ImageFont.load_default(15).getname()


def test_a_font_of_one_script_is_found_in_a_folder_of_many(tmp_path, monkeypatch):
    places = [place for place in fonts.PLACES if fonts._at(place, 15) is not None]
    if not places:
        pytest.skip("this machine has no font of the list")
    (tmp_path / "NotoSansAny-Regular.ttf").symlink_to(places[0])
    monkeypatch.setattr(fonts, "PLACES", ())
    monkeypatch.setattr(fonts, "SCRIPTS", (str(tmp_path),))
    assert not fonts.best("собака", 15)[1]
