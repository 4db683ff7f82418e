"""Attacks on the pages about pictures, each with the proof that it fails. A folder of pictures may come from a
stranger, and so may the runs that name it."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fake_run
import photos
import pytest
import served
from photos import OWN, Shown

from daguerre.data.folder import scan
from daguerre.serve import patience
from daguerre.serve.dataset import uploads
from daguerre.serve.dataset.folders import identity

SECRET = "the content of a file outside"
CHANGED = {"id": f"{scan.sample_id('a.png'):016x}", "file": "a.txt", "key": "", "before": "x", "after": SECRET}
CHANGED |= {"made": True}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;</textarea>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text(SECRET)
    (tmp_path / "outside" / "secret.png").write_bytes(photos.image(colour="blue"))
    return photos.write(tmp_path / "below" / "photos")


@pytest.fixture
def page(folder: Path) -> Iterator[Shown]:
    with photos.shown(folder, control=True) as found:
        yield found


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.parent.parent.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "path",
    [
        "/data/..%2f..%2foutside/",
        "/data/../../outside/secret.txt",
        "/data/photos/",
        "/data/%2fetc/",
        "{here}picture/..%2f..%2f..%2foutside%2fsecret.png",
        "{here}picture/%2fetc%2fpasswd/small",
        "{here}picture/a.png",
        "{here}caption/..%2fsecret.txt",
        "{here}cover/-1",
        "{here}cover/99",
        "{here}picture/0000000000000000/beside/0",
        "{here}shown/../../../outside/secret.txt",
        "{here}shown?as=../../outside",
        "{here}shown?page=-1",
        "{here}shown?show=../x",
    ],
)
def test_no_path_leads_anywhere(page: Shown, path: str) -> None:
    sent = page.client.get(path.replace("{here}", page.address))
    assert sent.status_code == 404, sent.text
    assert SECRET not in sent.text


def test_links_out_of_the_root_are_not_followed(folder: Path) -> None:
    outside = folder.parent.parent / "outside"
    links = {"x.png": outside / "secret.png", "e.txt": outside / "secret.txt", "away": outside, ".daguerre": outside}
    before = everything(folder)
    for name, target in links.items():
        (folder / name).symlink_to(target)
        with photos.shown(folder, control=True) as page:
            sent = page.get("shown")
            assert sent.status_code == 422, name
            assert "a link to a place outside" in sent.text
            assert SECRET not in sent.text
            everyone = {"kind": "many", "change": {"kind": "add", "tag": "x"}}
            assert page.post("edit", everyone).status_code == 422, name
        (folder / name).unlink()
    (folder.parent / "linked").symlink_to(outside)
    with photos.shown(folder, control=True) as page:
        assert "linked" not in page.client.get("/data/").text
        linked = identity(folder.parent / "linked")
        assert page.client.get(f"/data/{linked}/").status_code == 404
    assert everything(folder) == before


def test_a_caption_that_is_a_link_to_another_file_is_not_written(folder: Path) -> None:
    config = fake_run.write_run(folder.parent / "runs" / "one", steps=20, saves=0) / "config.yaml"
    (folder / "e.txt").symlink_to(config)
    before = config.read_bytes()
    with photos.shown(folder, control=True) as page:
        id = page.ids()["e.webp"]
        refused = page.caption(id, before.decode().strip(), "x")
        assert refused.status_code == 422
        assert "a link out of this folder" in refused.text
        assert page.many({"kind": "add", "tag": "x"}).json()["refused"]
    assert config.read_bytes() == before


def test_other_sites_change_nothing(folder: Path) -> None:
    with photos.shown(folder) as page:
        id = page.ids()["a.png"]
    changes = {
        "edit": {"kind": "caption", "id": id, "was": "a cat, grass", "text": "x"},
        "move": {"ids": [id], "to": "trash"},
        "job": {"kind": "caption", "by": "wd14"},
        "/data/new": {"root": 1, "name": "made"},
        "upload": None,
    }
    before = everything(folder)
    strange = [{}, {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:3000"}]
    for control, wrong in [(False, OWN), *((True, headers | {"x-daguerre": "1"}) for headers in strange)]:
        with photos.shown(folder, control=control) as page:
            for path, document in changes.items():
                body = photos.image() if document is None else json.dumps(document)
                place = path if path.startswith("/") else page.address + path
                method, query = ("PUT", {"name": "x.png"}) if document is None else ("POST", {})
                sent = page.client.request(method, place, params=query, content=body, headers=wrong)
                assert sent.status_code == 403, (path, wrong)
                bare = page.client.request(method, place, params=query, content=body, headers={"origin": served.HERE})
                assert bare.status_code == 403, path
                assert page.client.get(place).status_code in (200, 404, 405), "asking changes nothing"
    assert everything(folder) == before


def test_names_and_captions_are_no_markup(folder: Path) -> None:
    name = "<img src=x onerror=alert(3)>.png"
    (folder / name).write_bytes(photos.image())
    (folder / f"{name[:-4]}.txt").write_text(HOSTILE)
    (folder / "a.txt").write_text(HOSTILE)
    (folder.parent / "<b onclick=alert(4)>").mkdir()
    (folder.parent / "<b onclick=alert(4)>" / "x.png").write_bytes(photos.image())
    run = fake_run.write_run(folder.parent / "runs" / "one", steps=20, saves=0, state="stopped")
    data = {"sources": {"images": {"source": "folder", "path": str(folder)}}}
    (run / "config.yaml").write_text(json.dumps({"run_name": HOSTILE, "data": data}))
    fake_run.document(run, "page.json", {"name": HOSTILE})
    with photos.shown(folder, control=True) as page:
        page.many({"kind": "add", "tag": "<i>tag</i>"})
        found = page.cards()
        for text in (page.client.get("/data/").text, page.get("").text, found["cards"], found["facts"]):
            assert "<script>alert" not in text
            assert "<img src=x" not in text
            assert "<b onclick" not in text
            assert "<i>tag" not in text
        assert "alert(1)" in found["cards"]
        assert "&lt;i&gt;tag" in found["cards"]
        assert page.get("shown").headers["content-type"] == "application/json"
        assert "<script>" not in page.get("").text


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, *chunks: bytes) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + b"".join(chunks)
        + _chunk(b"IDAT", zlib.compress(b"\0" * 9))
        + _chunk(b"IEND", b"")
    )


def _of_text() -> bytes:
    """A picture whose text unfolds to 200 MB, which takes a second to fold."""
    return _png(8, 8, _chunk(b"zTXt", b"k\0\0" + zlib.compress(b"\0" * 200_000_000, 9)))


def _zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../x.png", b"\0" * 5_000_000)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
        ("svg.png", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
        ("page.jpg", b"<html><script>alert(1)</script></html>"),
        ("x.html", photos.image() * 0 + b"<html>"),
        ("g.png", b"GIF89a\x01\x00\x01\x00"),
        ("empty.png", b""),
        ("pictures.zip", _zip()),
        ("zip.png", _zip()),
        ("cut.png", photos.image(400, 400)[:-40]),
        ("bomb.png", _png(60_000, 60_000)),
        ("negative.png", _png(2**31 - 1, 2**31 - 1)),
        ("text.png", _of_text),
        ("metadata.jsonl", b'{"file_name": "a.png", "text": "x"}'),
        ("run.py", b"import os"),
        ("a.txt", b"\xff\xfe"),
        ("b.txt", b"a\0b"),
        ("c.txt", b"   "),
        ("model.safetensors", photos.image()),
        (".htaccess", b"x"),
        ("", photos.image()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_training_cannot_decode_is_not_kept(page: Shown, folder: Path, name: str, data: Any) -> None:
    data = data() if callable(data) else data
    before = everything(folder)
    began = time.process_time()
    sent = page.put(name, data)
    assert sent.status_code == 422, sent.text
    assert time.process_time() - began < 3, "nothing is unfolded"
    assert everything(folder) == before


def test_a_name_leads_nowhere(page: Shown, folder: Path) -> None:
    home = folder.parent.parent
    for number, name in enumerate(
        ("../../up.png", "/etc/up.png", r"..\..\up.png", "a/../../up.png", "%2e%2e%2fup.png")
    ):
        assert page.put(name, photos.image(8 + number)).status_code == 200
    made = [*home.rglob("*up*.png")]
    assert {path.parent for path in made} == {folder}
    for name in ("../made", "/etc/made", "..", ""):
        page.client.post("/data/new", content=json.dumps({"root": 1, "name": name}), headers=OWN)
    assert [path.parent for path in home.rglob("made")] == [folder.parent]
    for root in (-1, 9, "/etc"):
        sent = page.client.post("/data/new", content=json.dumps({"root": root, "name": "x"}), headers=OWN)
        assert sent.status_code == 422


def test_a_link_is_not_overwritten(page: Shown, folder: Path) -> None:
    outside = folder.parent.parent / "outside" / "secret.png"
    before = outside.read_bytes()
    (folder / "new.png").symlink_to(outside.with_name("none.png"))
    assert page.put("new.png", photos.image()).json()["name"] == "new-2.png"
    assert outside.read_bytes() == before
    assert not outside.with_name("none.png").exists()


def test_files_are_limited_in_size_and_number(page: Shown, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything(folder)
    monkeypatch.setattr(uploads, "MOST_BYTES", 1000)
    assert page.put("large.png", photos.image() + b"\0" * 1000).status_code == 422

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"\0" * 100

    sent = page.client.put(f"{page.address}upload", params={"name": "x.png"}, content=chunks(), headers=OWN)
    assert sent.status_code == 422, "without a length"
    monkeypatch.setattr(uploads, "MOST_FILES", 3)
    assert "files already" in page.put("x.png", photos.image()).text
    monkeypatch.setattr(uploads, "MOST_FILES", 100)
    monkeypatch.setattr(uploads, "LEAST_FREE_BYTES", 1 << 60)
    assert "the disk has less" in page.put("x.png", photos.image()).text
    monkeypatch.setattr(uploads, "MOST_AT_ONCE", 0)
    assert page.put("x.png", photos.image()).status_code == 409
    assert page.post("edit", {"kind": "caption", "id": "x" * 3_000_000}).status_code == 422
    assert everything(folder) == before


@pytest.mark.parametrize(
    "lines",
    [
        [{"file_name": "../../outside/secret.png", "text": "x"}, {"file_name": "/etc/passwd", "text": "x"}],
        [{"file_name": "a.png", "text": {"a": "b"}}, {"file_name": ["a.png"], "text": "x"}],
        ["[" * 100_000, '{"file_name": "a.png", "text": ' + "9" * 5000 + "}", "\0", "not json"],
        [{"file_name": "d.jpg", "text": ["one", "two"]}],
        [{"file_name": "d.jpg", "text": "\ud800"}],
    ],
)
def test_a_forged_metadata_file_says_nothing(folder: Path, lines: list[object]) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "metadata.jsonl").write_text("\n".join(texts))
    before = everything(folder)
    with photos.shown(folder, control=True) as page:
        found = page.cards()
        assert "passwd" not in found["cards"]
        assert "secret" not in found["cards"]
        ids = page.ids()
        refused = page.caption(ids["d.jpg"], "one", "x") if "one" in texts[0] else None
        assert refused is None or "several captions" in refused.text
        assert page.get(f"caption/{ids['d.jpg']}").status_code == 200
        assert page.post("move", {"ids": [ids["a.png"]], "to": "left_out"}).status_code == 200
        away = next(id for name, id in page.ids().items() if name == "a.png")
        assert page.post("move", {"ids": [away], "to": "back"}).status_code == 200
    assert {name: data for name, data in everything(folder).items() if ".daguerre" not in name} == before


@pytest.mark.parametrize(
    "journal",
    [
        "[" * 100_000,
        json.dumps({"changes": 1}),
        json.dumps([{"title": "x", "changes": [CHANGED | {"id": "../../outside"}]}]),
        json.dumps([{"title": "x", "changes": [CHANGED | {"file": "../../outside/secret.txt"}]}]),
        json.dumps([{"title": "x", "changes": [CHANGED | {"file": "a.png", "after": ""}]}]),
        json.dumps([{"title": HOSTILE, "changes": [CHANGED | {"before": [], "after": None}]}]),
        json.dumps([{"changes": [CHANGED | {"id": {}}]}]),
    ],
)
def test_a_forged_journal_undoes_nothing(folder: Path, journal: str) -> None:
    (folder / ".daguerre").mkdir()
    (folder / ".daguerre" / "undo.json").write_text(journal)
    before = everything(folder)
    with photos.shown(folder, control=True) as page:
        assert page.get("shown").status_code == 200
        sent = page.post("edit", {"kind": "undo"})
        assert sent.status_code in (404, 422) or sent.json()["changed"] == 0
    now = everything(folder)
    assert {name: data for name, data in now.items() if "undo.json" not in name} == {
        name: data for name, data in before.items() if "undo.json" not in name
    }


def test_nothing_that_a_run_names_is_opened(folder: Path) -> None:
    outside = folder.parent.parent / "outside"
    (outside / "a.png").write_bytes(photos.image(64, 48, "blue"))
    os.mkfifo(outside / "pipe")
    own = {"source": "folder", "path": str(folder), "mask_dir": str(outside), "control_dir": {"control": str(outside)}}
    forged = [
        own,
        own | {"captions_from": "folder_names", "idx_to_prompt": str(outside / "pipe")},
        {"source": "folder", "path": f"{folder}/../../../../../outside"},
        {"source": "csv", "path": str(outside / "pipe")},
        {"source": "folder", "path": 3},
    ]
    for number, source in enumerate(forged):
        run = fake_run.write_run(folder.parent / "runs" / f"run{number}", steps=20, saves=0, state="stopped")
        data = {"sources": {"images": source}, "resolution": 10**9, "saliency": str(outside / "pipe")}
        (run / "config.yaml").write_text(json.dumps({"data": data}))
    with photos.shown(folder, control=True) as page:
        whole = page.get("").text
        assert [f"run{i}" in whole for i in range(len(forged))] == [True, True, False, False, False]
        for number in (0, 1):
            id = served.address(folder.parent / "runs", f"run{number}").split("/")[2]
            cards = page.cards(**{"as": id})["cards"]
            assert "control" not in cards
            picture = page.ids()["a.png"]
            beside = page.client.get(f"{page.address}picture/{picture}/beside/0")
            assert beside.content != (outside / "a.png").read_bytes()


def test_a_pipe_among_the_pictures_is_not_waited_for(folder: Path) -> None:
    for name in ("pipe.png", "e.txt", "e.json"):
        os.mkfifo(folder / name)
    with photos.shown(folder, control=True) as page:
        assert page.get("shown").status_code == 200
        assert page.post("edit", {"kind": "many", "change": {"kind": "add", "tag": "x"}}).status_code == 200


def test_two_pages_change_one_folder_one_after_the_other(folder: Path) -> None:
    with photos.shown(folder, control=True) as one, photos.shown(folder, control=True) as other:
        id = one.ids()["a.png"]
        assert one.caption(id, "a cat, grass", "first").status_code == 200
        stale = other.caption(id, "a cat, grass", "second")
        assert stale.status_code == 422
        assert other.caption(id, "first", "second").status_code == 200
        assert one.post("edit", {"kind": "undo"}).json()["changed"] == 1
    assert (folder / "a.txt").read_text() == "first\n"


def test_a_slow_picture_arrives_and_one_that_stops_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "REQUEST_SECONDS", 0.6)
    monkeypatch.setattr(patience, "LEAST_BYTES", 1000)
    data = photos.image(64, 48) + b"\0" * 5000
    place = f"/data/{identity(folder.resolve())}/upload?name=slow.png"
    with served.running(folder.parent, control=True) as here:
        host = urlsplit(here).netloc
        head = f"PUT {place} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nX-Daguerre: 1\r\n"
        with socket.create_connection(("127.0.0.1", urlsplit(here).port)) as sender:
            sender.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode())
            for start in range(0, len(data), 1100):
                sender.sendall(data[start : start + 1100])
                time.sleep(0.25)
            sender.settimeout(60)
            assert sender.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with socket.create_connection(("127.0.0.1", urlsplit(here).port)) as sender:
            sender.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:1500])
            sender.settimeout(60)
            assert sender.recv(1 << 16) == b""
        with socket.create_connection(("127.0.0.1", urlsplit(here).port)) as sender:
            sender.settimeout(60)
            answer = b"-"
            try:
                sender.sendall(head.encode() + b"X-Long: " + b"x" * 10_000_000)
                answer = sender.recv(1 << 16)
            except ConnectionError:
                answer = b""
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert [path.name for path in folder.glob("slow*")] == ["slow.png"]
