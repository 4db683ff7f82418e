"""`daguerre report` writes the page, prints its path, and opens a browser only when asked."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from daguerre.cli import report
from daguerre.errors import UserError


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", addresses.append)
    return addresses


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("run_name: mine\n", encoding="utf-8")
    return tmp_path


def test_it_writes_the_page_and_prints_its_path(
    folder: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.run([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert "mine" in (folder / "report.html").read_text(encoding="utf-8")
    assert opened == []


def test_it_opens_the_page_when_asked(folder: Path, opened: list[str]) -> None:
    assert report.run([str(folder), "--open"]) == 0
    assert opened == [(folder / "report.html").as_uri()]


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--opne", "a"], ["--open"]])
def test_wrong_arguments_are_explained(arguments: list[str]) -> None:
    with pytest.raises(UserError, match="takes one run folder"):
        report.run(arguments)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        report.run([str(tmp_path / "nothing")])


def test_a_page_that_cannot_be_written(folder: Path) -> None:
    (folder / "report.html").mkdir()
    with pytest.raises(UserError, match="cannot write the report"):
        report.run([str(folder)])
