"""The page of runs in a store: listed, opened, followed and asked as those of a folder are, and no less closed."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import browser
import fake_run
import pytest
import served
import tiny_runs
from buckets import in_memory, moto, s3_run  # noqa: F401 (fixtures)
from starlette.testclient import TestClient

from daguerre import errors
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli import main
from daguerre.remote import copies as far_copies
from daguerre.remote import export, lock
from daguerre.remote.copies import Copies
from daguerre.serve.catalog import identity
from daguerre.storage.bucket import Prefix, prefix
from daguerre.storage.errors import StoreError
from daguerre.threads import background

OWN = {"origin": served.HERE, "x-daguerre": "1"}


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prefix:
    """A place for runs in a store, with one in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    in_memory(monkeypatch)
    send(prefix("gs://bucket/runs/good"), fake_run.write_run(tmp_path / "good", steps=20, saves=1, log_every=1))
    return prefix("gs://bucket/runs")


def send(run: Prefix, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            run.write(path.relative_to(folder).as_posix(), path.read_bytes())


@contextmanager
def asked(copies: Copies, **rules: object) -> Iterator[TestClient]:
    """A client of the page, whose copies are brought up to date by hand."""
    copies.check()
    copies.look()
    with served.asked(copies.folder, copies=copies, **rules) as client:
        yield client


def again(copies: Copies) -> None:
    """Looks at all runs once more, as after some seconds."""
    copies._next_all = 0.0
    copies.look()
    assert copies.problem == ""


def write_metrics(run: Prefix, data: bytes) -> None:
    """Sends them as a run does: the status comes last."""
    run.write("metrics/metrics.jsonl", data)
    run.write("status.json", run.read("status.json")[0] + b" ")


def test_a_run_in_a_store_is_listed_and_opened(far: Prefix, tmp_path: Path) -> None:
    copies = Copies(far)
    with asked(copies) as client:
        place = f"/run/{identity(copies.folder / 'good', copies.folder)}/"
        listed = client.get("/").text
        assert "gs://bucket/runs" in listed
        assert "quickstart" in client.get(place).text
        assert "queue/" not in listed + client.get(place).text, "it starts no run"
        assert client.get("/queue/").status_code == client.get("/data/").status_code == 404
        assert len(client.get(f"{place}curves").json()["metrics"]["learning/loss"]["x"]) == 20
        image = copies.folder / "good" / "samples" / "step-00000020" / "000.png"
        assert not image.exists(), "images are brought when they are asked for"
        assert (
            client.get(f"{place}image/20/0").content
            == (tmp_path / "good" / image.relative_to(copies.folder / "good")).read_bytes()
        )
        assert client.get(f"{place}image/20/9").status_code == 404
        assert client.get(f"{place}report").text.count("data:image/") >= len(fake_run.WISHES)
        assert not (copies.folder / "good" / "report.html").exists()


def test_a_run_is_followed_from_its_last_byte(far: Prefix) -> None:
    copies, run = Copies(far), far / "good"
    with asked(copies) as client:
        place = f"/run/{identity(copies.folder / 'good', copies.folder)}/"
        path = copies.folder / "good" / "metrics" / "metrics.jsonl"
        first = client.get(f"{place}curves").json()
        inode, whole = path.stat().st_ino, path.read_bytes()
        line = {"step": 21, "samples": 672, "time": time.time(), "learning/loss": 0.25}
        write_metrics(run, whole + json.dumps(line).encode() + b"\n")
        again(copies)
        assert path.stat().st_ino == inode, "only what is new was brought"
        assert path.read_bytes().endswith(b"0.25}\n")
        # As a run that went back writes it: longer than it was, and other lines.
        write_metrics(run, whole.replace(b"learning/loss", b"learning/cost") * 2)
        again(copies)
        assert path.stat().st_ino != inode
        assert path.stat().st_size == 2 * len(whole)
        run.write("samples/step-00000020/000.png", b"another")
        client.get(f"{place}image/20/0")
        again(copies)
        assert first["step"] == 20
        later = Copies(far)  # of another server, which finds the copy
        run.delete([one.name for one in run.listing()])
        later.look()
        assert not path.exists()
        assert client.get("/").text.count("<article") == 0
        run.write("config.yaml", b"run_name: another")
        again(copies)
        assert (copies.folder / "good" / "config.yaml").is_file()
        run.delete(["config.yaml"])
        again(copies)
        assert not (copies.folder / "good").exists()


def test_who_works_at_a_run_is_known_by_its_lock(far: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, run = Copies(far), far / "good"
    status = json.loads(run.read("status.json")[0])
    run.write("status.json", json.dumps({**status, "state": "running"}).encode())
    with asked(copies, control=True) as client:
        place = f"/run/{identity(copies.folder / 'good', copies.folder)}/"
        assert "Interrupted" in client.get("/").text
        own = lock.Lock(run, print)
        with own.held():
            again(copies)
            assert copies.runs[copies.folder / "good"].holder == own.own
            sent = client.post(f"{place}action", content=b'{"kind": "save"}', headers=OWN)
            assert sent.status_code == 200, sent.text
            ident = sent.json()["id"]
            assert [one.name for one in run.listing("actions/")] == [f"actions/{ident}.json"]
            assert client.get(f"{place}action/{ident}").json() is None
            answer = {"kind": "save", "state": "done", "reason": "saved", "step": 20}
            run.write(f"answers/{ident}.json", json.dumps(answer).encode())
            assert client.get(f"{place}action/{ident}").json()["reason"] == "saved"
        again(copies)
        assert copies.runs[copies.folder / "good"].holder is None
        refused = client.post(f"{place}action", content=b'{"kind": "save"}', headers=OWN)
        assert "is not being trained now" in refused.text
    # Of a process of another machine that has died, nobody writes the lock any more.
    run.write(lock.NAME, json.dumps({"token": "x", "pid": 5, "host": "elsewhere", "since": "2026"}).encode())
    again(copies)
    assert copies.runs[copies.folder / "good"].holder is not None
    monkeypatch.setattr(far_copies, "MISSED_SECONDS", 0.0)
    again(copies)
    assert copies.runs[copies.folder / "good"].holder is None


def test_exports_are_sent_from_the_store_and_notes_go_there(far: Prefix, tmp_path: Path) -> None:
    copies, run = Copies(far), far / "good"
    adapter = tmp_path / "adapter"
    (adapter / "deep").mkdir(parents=True)
    weights = bytes(range(256)) * 5000
    (adapter / "weights.safetensors").write_bytes(weights)
    (adapter / "deep" / "config.json").write_text("{}")
    files = {"weights.safetensors": weights, "deep/config.json": b"{}"}
    assert export.send(run, adapter, lambda: True)
    with asked(copies, control=True) as client:
        place = f"/run/{identity(copies.folder / 'good', copies.folder)}/"
        part = client.get(f"{place}part/files").text
        addresses = [text.split('"')[0] for text in part.split('href="')[1:]]
        whole, single = (client.get(place + address) for address in addresses)
        assert single.content == weights
        with tarfile.open(fileobj=io.BytesIO(whole.content)) as tar:
            assert {name: tar.extractfile(f"adapter/{name}").read() for name in files} == files  # type: ignore[union-attr]
        assert not (copies.folder / "good" / "adapter").exists()
        note = b'{"name": "mine", "note": "a note", "archived": false}'
        assert client.post(f"{place}note", content=note, headers=OWN).status_code == 200
        assert json.loads(run.read("page.json")[0])["note"] == "a note"
        again(copies)
        assert "a note" in client.get("/").text


def test_what_a_stranger_put_into_a_run_stays_there(
    far: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_copies, "_MOST_BYTES", 100_000)
    run, copies, hostile = far / "good", Copies(far), "<img src=x onerror=alert(1)>"
    send(far / hostile, tmp_path / "good")
    run.write(
        "samples/step-00000020/samples.json",
        json.dumps([{"file": "../../../secret.png", "prompt": "x"}, {"file": "page.html", "prompt": "y"}]).encode(),
    )
    for name in (
        "samples/step-00000020/page.html",
        "samples/a.svg",
        "evil.so",
        ".held-elsewhere.json",
        "metrics/.hidden.json",
    ):
        run.write(name, b"<script>alert(1)</script>")
    run.write("samples/step-00000020/large.png", b"x" * 200_000)
    run.write("evaluations/" + "x" * 300 + "/result.json", b"{}")
    run.write(".lock", b'{"pid": "x"}')
    run.write("checkpoints/step-00000001/manifest.json", b'{"files": {"../../x": {}}}')
    (copies.folder.parent).mkdir(parents=True, exist_ok=True)
    (copies.folder.parent / "secret.png").write_bytes((tmp_path / "good/samples/step-00000020/000.png").read_bytes())
    with asked(copies) as client:
        place = f"/run/{identity(copies.folder / 'good', copies.folder)}/"
        assert copies.runs[copies.folder / "good"].problem == ""
        assert (listed := client.get("/").text).count("<article") == 2
        assert hostile not in listed
        for way in (
            "/run/..%2f..%2fgood/",
            f"{place}config.yaml",
            f"{place}file/config.yaml",
            f"{place}part/..%2fconfig",
        ):
            assert client.get(way).status_code == 404, way
        assert client.get(place).status_code == 200
        for number in (0, 1):
            assert client.get(f"{place}image/20/{number}").status_code in (404, 422)
        found = {
            path.relative_to(copies.folder / "good").as_posix()
            for path in (copies.folder / "good").rglob("*")
            if path.is_file()
        }
        assert not any(
            "html" in name or name.endswith((".svg", ".so", "large.png")) or "hid" in name for name in found
        ), found
        assert "step-00000001" not in client.get(f"{place}part/files").text


def test_a_store_that_cannot_be_read_is_said(far: Prefix, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    copies = Copies(far)
    with asked(copies) as client:
        monkeypatch.setattr(Prefix, "level", _refused)
        copies._next_all = 0.0
        copies.look()
        assert "no answer today" in client.get("/").text
        assert client.get("/").text.count("<article") == 1, "what was read before stays"
    assert main.run(["serve", "gs://bucket/runs", "--port", "0"]) == 2
    assert "no answer today" in capsys.readouterr().err
    assert main.run(["serve", "gs://bucket/runs", "--root", "."]) == 2
    assert "the page of a store shows its runs and starts none" in capsys.readouterr().err


def _refused(self: Prefix) -> None:
    raise StoreError(self.location("x"), "gives no answer today")


def newest(run: Path) -> datetime:
    """Time of the last line of a run's metrics."""
    lines = RunFolder(run).metrics.read_bytes().split(b"\n")
    return datetime.fromisoformat(json.loads(lines[-2])["time"])


@browser.needed
@pytest.mark.long
def test_a_training_in_a_bucket_is_watched_and_asked_in_a_browser(s3_run: Prefix, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    """What a page shows of it is at most 15 s old, and what it is asked is done after 30 s at most."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "trainer"))
    far = prefix(s3_run.url.rpartition("/")[0])
    trained = tiny_runs.start(far.url, "training.duration=100k steps", "checkpoint.every=null", "logging.every=1 step")  # type: ignore[arg-type]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "viewer"))
    copies = Copies(far)
    copies.check()
    try:
        with (
            served.running(copies.folder, copies=copies, control=True) as here,
            background("copies", copies.keep),
            browser.opened(tmp_path / "profile") as chromium,
        ):
            page = chromium.page()
            page.size(1280, 900)
            page.go(here)
            page.wait("document.querySelector('article .state.running')")
            page.go(f"{here}run/{identity(copies.folder / 'tiny', copies.folder)}/")
            page.wait(
                "document.querySelector('#control:not([hidden])') && document.querySelectorAll('.u-over').length >= 3"
            )
            (own,) = (tmp_path / "trainer").glob("daguerre/runs/*/tiny")  # where the training writes
            behind = []
            for _ in range(8):
                time.sleep(3)
                shown, written = newest(copies.folder / "tiny"), newest(own)
                behind.append((written - shown).total_seconds())
            assert max(behind) <= 15, behind
            page.evaluate("document.querySelector('[data-action=save]').click()")
            asked = time.monotonic()
            page.wait("/^Save now: (?!asked)/.test(document.querySelector('#answer').textContent)")
            took = time.monotonic() - asked
            page.wait("document.querySelector('#images img')")
            page.evaluate("document.querySelector('#images img').scrollIntoView()")
            page.wait("document.querySelector('#images img').naturalWidth > 0")
            page.evaluate("window.confirm = () => true")
            page.evaluate("document.querySelector('[data-action=stop]').click()")
            page.wait("document.querySelector('.state.saved') && document.querySelector('#control').hidden")
            assert [error for error in chromium.errors if "ERR_CONNECTION" not in error] == []
            print(f"behind {behind}, saved after {took:.1f} s")
            assert took <= 30
        trained.communicate(timeout=60)
        assert trained.returncode == errors.INTERRUPTED
    finally:
        if trained.poll() is None:
            tiny_runs.kill(trained)
