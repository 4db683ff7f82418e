"""The message at the end of a run: one, with what it says, whoever listens; and no file or output has its address."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny_runs

from daguerre import errors, webhook
from daguerre.queue.keeper import TOLD, keep
from daguerre.queue.queue import Queue
from daguerre.queue.runner import Runner

SECRET = "T0PSECRETPATH"
FAKE = [sys.executable, "-S", "-E", str(Path(__file__).parent.parent / "queue" / "fake_training.py")]


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch, status: int = 204) -> Iterator[list[dict[str, Any]]]:
    """The messages that come, at an address which is set."""
    found: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *given: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv(webhook.VARIABLE, f"http://127.0.0.1:{server.server_port}/{SECRET}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def test_a_run_tells_of_its_end_and_of_its_failure_and_keeps_the_address(tmp_path, monkeypatch, capfd):
    with listening(monkeypatch, status=500) as found:
        assert tiny_runs.train(tmp_path, "training.duration=2 steps", "data.checked_prompts=0") == errors.DONE
        assert tiny_runs.train(tmp_path, "training.duration=2 steps", "seed=9") == errors.REFUSED
    ended, failed = found
    assert (ended["run"], ended["state"], ended["step"], ended["total_steps"]) == ("tiny", "finished", 2, 2)
    assert ended["text"] == ended["content"] == "tiny: finished at update 2"
    assert (failed["state"], failed["reason"] != "") == ("failed", True)
    said = capfd.readouterr()
    assert f"{webhook.VARIABLE} got no message of the end of this run: it answered 500" in said.out + said.err
    assert SECRET not in said.out + said.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("what", "state", "reason"),
    [
        ("works", "finished", ""),
        ("fails", "failed", "out of memory"),
        ("killed", "interrupted", "its process was killed, or the machine went down"),
    ],
)
def test_the_queue_tells_of_every_end_once(tmp_path, monkeypatch, what, state, reason):
    queue, place = Queue(tmp_path / "queue"), tmp_path / "a"
    ident = queue.add(["a", what, str(place)], str(place), place, tmp_path)
    with listening(monkeypatch) as found, (queue.path / f"{ident}.lock").open("w") as lock:
        keep(queue, ident, 1, FAKE, lock.fileno())
    assert [(one["run"], one["state"], one["reason"]) for one in found] == [("a", state, reason)]


def test_the_next_runner_tells_of_a_run_whose_keeper_was_killed(tmp_path, monkeypatch):
    """Of its end, once, whichever runners look; of attempts that a version before this one kept, never."""
    queue, place = Queue(tmp_path / "queue"), tmp_path / "a"
    ident = queue.add(["a", "works", str(place)], str(place), place, tmp_path)
    begun = {"attempt": 1, "keeper": 2**22 + 1, "training": 2**22 + 2, "begun": 0.0}
    status = {"state": "finished", "pid": 2**22 + 2, "step": 7, "total_steps": 7, "updated": "1"}
    place.mkdir()
    (place / "status.json").write_text(json.dumps(status))
    with listening(monkeypatch) as found:
        for known in (begun, {**begun, TOLD: False}):
            (queue.path / f"{ident}.begun.json").write_text(json.dumps(known))
            for _ in range(2):
                own = Runner(queue, [""], FAKE, say=lambda text: None)
                own.step()
                own.step()
    assert [(one["run"], one["state"], one["step"]) for one in found] == [("a", "finished", 7)]


def test_who_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(webhook, "SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv(webhook.VARIABLE, f"http://127.0.0.1:{deaf.getsockname()[1]}/{SECRET}")
        began = time.monotonic()
        said = webhook.tell(tmp_path, "finished")
        assert time.monotonic() - began < 30
    assert said
    for address in (f"ftp://{SECRET}", f"http://[{SECRET}", f"http://{SECRET}.invalid/", f"https://a b/{SECRET}"):
        monkeypatch.setenv(webhook.VARIABLE, address)
        said = webhook.tell(tmp_path, "finished")
        assert said.startswith(webhook.VARIABLE)
        assert SECRET not in said
    monkeypatch.delenv(webhook.VARIABLE)
    assert webhook.tell(tmp_path, "finished") == ""
