"""What threads of the page share: what one makes or changes, another one that asks at that moment does not lose."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import photos
import pytest

from daguerre.captioning import folder as captioning
from daguerre.serve import notes
from daguerre.serve.catalog import Catalog, identity
from daguerre.serve.dataset import folders, uploads
from daguerre.serve.dataset.folders import Folders, Place
from daguerre.serve.summaries import PAGE


def slowly(monkeypatch: pytest.MonkeyPatch, of: object, name: str) -> threading.Event:
    """Makes a call wait for a moment before it does its work, so that threads meet there; set once one is there."""
    plain, there = getattr(of, name), threading.Event()

    def slow(*given: object) -> object:
        there.set()
        time.sleep(0.05)
        return plain(*given)

    monkeypatch.setattr(of, name, slow)
    return there


def test_files_of_one_name_that_come_at_once_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, sent = Place("id", tmp_path, tmp_path), [photos.image(width) for width in (16, 17, 18)]
    slowly(monkeypatch, uploads, "write_bytes_atomically")
    with ThreadPoolExecutor(3) as pool:
        kept = [each["name"] for each in pool.map(lambda data: uploads.keep(place, "1.png", data), sent)]
    assert [(tmp_path / name).read_bytes() for name in kept] == sent


def test_a_folder_that_is_made_while_others_are_looked_for_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    found = Folders((tmp_path,))
    plain, walks = folders.is_run, threading.Event()

    def slow(path: Path) -> bool:
        if path.name == "other":  # the root has been read by then
            walks.set()
            time.sleep(0.05)
        return plain(path)

    monkeypatch.setattr(folders, "is_run", slow)
    with ThreadPoolExecutor(1) as pool:
        walk = pool.submit(found.listed)
        walks.wait()
        made = uploads.new_folder(found, json.dumps({"root": 0, "name": "new"}).encode())
        walk.result()
    assert found.at(made.id).path == tmp_path / "new"


def test_a_run_that_is_asked_for_during_the_first_look_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("run_name: a")
    catalog, id = Catalog(tmp_path, (tmp_path,)), identity(tmp_path / "a", tmp_path)
    looks = slowly(monkeypatch, catalog, "_folders")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(catalog.at, id)
        looks.wait()
        assert catalog.at(id) == first.result() == tmp_path / "a"


def test_two_pages_write_a_note_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, notes, "write_json_atomically")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: notes.write(tmp_path, json.dumps({"note": str(i)}).encode()), range(4)))
    assert json.loads((tmp_path / PAGE).read_text())["note"] in "0123"


def test_captions_wait_for_a_change_of_the_page(tmp_path: Path) -> None:
    """The page reads, changes and writes a file while it holds the folder; `daguerre caption` has fields in it."""
    (tmp_path / "a.png").write_bytes(photos.image())
    speaker = SimpleNamespace(captions=lambda images: [{"wd14": "red"} for _ in images])
    with ThreadPoolExecutor(1) as pool:
        with captioning.locked(tmp_path):
            work = pool.submit(
                captioning.caption, tmp_path, lambda: speaker, "wd14", "json", False, 8, lambda done, total: None
            )
            time.sleep(0.1)
            (tmp_path / "a.json").write_text(json.dumps({"text": "mine"}))
        assert work.result().written == 1
    assert json.loads((tmp_path / "a.json").read_text()) == {"text": "mine", "wd14": "red"}
