"""The page of the queue: it says what the queue says, and changes it by the same code as `daguerre queue`."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import fake_run
import pytest
import served

from daguerre import system
from daguerre.queue.queue import Queue

CHANGE = {"origin": served.HERE, "x-daguerre": "1"}
HOSTILE = "<img src=x onerror=alert(1)>;$(touch x)`'\""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_run.write_run(tmp_path / "runs" / "done", steps=100, saves=1)
    return tmp_path / "runs"


@pytest.fixture
def queue(folder: Path) -> Queue:
    return served.queue_of(folder)


def put(queue: Queue, place: Path, *words: str) -> str:
    return queue.add(["quickstart", *words], str(place), place, place.parent)


def end(queue: Queue, ident: str, code: int) -> None:
    """Leaves what the processes of an entry leave that ended with this exit code."""
    for kind, own in (("begun", {"training": 1}), ("ended", {"code": code})):
        (queue.path / f"{ident}.{kind}.json").write_text(json.dumps({"attempt": 1, **own}))
    (queue.path / f"{ident}.log").write_text(f"{HOSTILE} {ident}\x1b[2J\n")


def order(queue: Queue) -> list[str]:
    return [each.ident for each in queue.entries()]


def test_the_page_says_what_the_queue_says(folder: Path, queue: Queue) -> None:
    done, failed, waits = (put(queue, folder / name, f"run_name={name}") for name in ("done", "bad", "next"))
    end(queue, done, 0)
    end(queue, failed, 1)
    with served.asked(folder) as client:
        page = client.get("/queue/").text
        for said in ("Finished", "Failed", "exit code 1: the log says why", "Waiting", "run_name=next"):
            assert said in page
        assert f'href="../run/{served.address(folder, "done").split("/")[2]}/"' in page
        assert page.index(waits) < page.index(failed) < page.index(done), "what waits stands above what has ended"
        assert "<button" not in page, "read-only"
        assert "daguerre queue run" in page, "nothing starts what waits, and this page does not say otherwise"
        printed = client.get(f"/queue/entry/{failed}/log")
        assert printed.headers["content-type"].startswith("text/plain")
        assert (HOSTILE in printed.text, "\x1b" in printed.text) == (True, False)
        assert client.get(f"/queue/entry/{waits}/log").status_code == 404
        assert client.get("/queue/entry/..%2f..%2fruns/log").status_code == 404


def test_a_run_that_is_paused_in_memory_is_said_to_be(folder: Path, queue: Queue) -> None:
    ident = put(queue, folder / "done")
    with (queue.path / f"{ident}.lock").open("w") as lock, served.asked(folder) as client:
        system.lock(lock.fileno())
        fake_run.write_status(folder / "done", "running", 100)
        assert '<span class="state running">Training now</span>' in client.get("/queue/").text
        fake_run.write_status(folder / "done", "running", 100, "paused")
        page = client.get("/queue/").text
        assert '<span class="state paused">Paused</span>' in page
        assert "its button Go on, or <code>daguerre control RUN continue</code>, continues it" in page


def test_changes_are_those_of_the_command(folder: Path, queue: Queue) -> None:
    first, second, third = (put(queue, folder / name) for name in "abc")

    with served.asked(folder, control=True) as client:

        def change(**message: object) -> str:
            sent = client.post("/queue/change", content=json.dumps(message), headers=CHANGE)
            assert sent.status_code == 200, sent.text
            return sent.json()["said"]

        change(kind="move", id=third, where=first)
        assert order(queue) == [third, first, second]
        change(kind="move", id=third, where="last")
        assert order(queue) == [first, second, third]
        assert "held back" in change(kind="pause", id=second)
        assert queue.get(second).state == "paused"
        change(kind="resume", id=second)
        assert queue.get(second).state == "waiting"
        change(kind="pause_all")
        assert queue.is_paused
        change(kind="resume_all")
        assert not queue.is_paused
        change(kind="remove", id=first)
        assert order(queue) == [second, third]
        refused = client.post("/queue/change", content=json.dumps({"kind": "stop", "id": third}), headers=CHANGE)
        assert (refused.status_code, "cannot be stopped" in refused.text) == (422, True)


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "remove", "id": "../runs/done"},
        {"kind": "remove", "id": "*"},
        {"kind": "remove", "id": ""},
        {"kind": "move", "id": "00000000", "where": "../x"},
        {"kind": "add", "words": ["quickstart"]},
        {"kind": "pause_all", "id": "00000000"},
        ["remove"],
        "x" * 9000,
    ],
)
def test_what_is_no_change_changes_nothing(folder: Path, queue: Queue, message: object) -> None:
    put(queue, folder / "a")
    before = sorted(path.name for path in queue.path.iterdir())
    with served.asked(folder, control=True) as client:
        assert client.post("/queue/change", content=json.dumps(message), headers=CHANGE).status_code == 422
    assert sorted(path.name for path in queue.path.iterdir()) == before


def test_other_sites_and_a_page_that_only_reads_change_nothing(folder: Path, queue: Queue) -> None:
    ident = put(queue, folder / "a")
    remove = json.dumps({"kind": "remove", "id": ident})
    with served.asked(folder, control=True) as client:
        for wrong in ({}, {"origin": "http://evil.example"}, {"origin": "null"}, {"x-daguerre": ""}):
            assert (
                client.post("/queue/change", content=remove, headers={**CHANGE, "origin": "", **wrong}).status_code
                == 403
            )
        assert client.get("/queue/change").status_code == 405
    with served.asked(folder) as client:
        assert client.post("/queue/change", content=remove, headers=CHANGE).status_code == 403
    with served.asked(folder, token="a-token-of-many-letters", control=True) as client:
        cors = {"sec-fetch-mode": "cors"}
        assert client.post("/queue/change", content=remove, headers=CHANGE | cors).status_code == 401
        assert client.get("/queue/events", headers=cors).status_code == 401
    assert order(queue) == [ident]


def test_names_words_and_reasons_of_an_entry_are_no_markup(folder: Path, queue: Queue) -> None:
    place = folder / HOSTILE.replace("/", "")
    ident = put(queue, place, f"description={HOSTILE}")
    fake_run.write_run(place, steps=10, saves=0)
    fake_run.document(
        place, "status.json", {"state": "failed", "reason": HOSTILE, "pid": 1, "step": 5, "total_steps": 9}
    )
    end(queue, ident, 1)
    with served.asked(folder, control=True) as client:
        page = client.get("/queue/").text
    assert "alert(1)" in page
    assert "<img" not in page
    assert page.count("onerror") == page.count("onerror=alert(1)&gt;")


def test_two_pages_over_one_queue_and_its_news(folder: Path, queue: Queue) -> None:
    first, second = put(queue, folder / "a"), put(queue, folder / "b")
    get = build_opener(ProxyHandler({})).open
    with (
        served.running(folder, control=True) as here,
        served.asked(folder, control=True) as other,
        get(f"{here}queue/events", timeout=60) as stream,
    ):
        now = json.loads(stream.readline().removeprefix(b"data: "))
        assert now["lists"] == {"running": [], "waiting": [first, second], "ended": []}
        stream.readline()
        move = {"kind": "move", "id": second, "where": "first"}
        assert other.post("/queue/change", content=json.dumps(move), headers=CHANGE).status_code == 200
        now = json.loads(stream.readline().removeprefix(b"data: "))
        assert now["lists"]["waiting"] == [second, first]
        assert now["rows"] == {}, "no row says something new"
        stream.readline()
        remove = json.dumps({"kind": "remove", "id": first})
        sent = [other.post("/queue/change", content=remove, headers=CHANGE).status_code for _ in range(2)]
        assert sent == [200, 404]
        now = json.loads(stream.readline().removeprefix(b"data: "))
        assert now["lists"]["waiting"] == [second]
