"""Attacks on the page, each with the proof that it fails. A run folder may come from a stranger."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import fake_run
import pytest
import served
from PIL import Image

from daguerre.serve import app, patience, pictures, site
from daguerre.serve.gate import Rules
from daguerre.tracking.sinks import MetricsFile

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;</title></script>"
TOKEN = "a-token-of-many-letters"
SECRET = "the content of a file outside"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_run.write_run(tmp_path / "runs" / "good", steps=20, saves=1)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text(f"run_name: {SECRET}\n")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "outside" / "secret.png")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "path",
    [
        "/../../outside/secret.txt",
        "/%2e%2e/%2e%2e/outside/secret.txt",
        "/static/../../../pyproject.toml",
        "/static/..%2f..%2fapp.py",
        "/static/%2fetc%2fpasswd",
        "/run/..%2f..%2foutside/",
        "/run/good/",
        "{run}image/20/..%2f..%2fsecret.png",
        "{run}image/20/-1",
        "{run}part/..%2f..%2fconfig.yaml",
        "{run}file/..%2f..%2f..%2foutside%2fsecret.txt",
        "{run}file/config.yaml",
        "{run}config.yaml",
        "{run}samples/step-00000020/000.png",
    ],
)
def test_no_path_leads_anywhere(folder: Path, path: str) -> None:
    with served.asked(folder) as client:
        sent = client.get(path.replace("{run}", served.address(folder, "good")))
        assert sent.status_code == 404, sent.text
        assert SECRET not in sent.text


@pytest.mark.parametrize(
    "name", ["config.yaml", "status.json", "environment.json", "data.json", "metrics/metrics.jsonl"]
)
def test_links_out_of_the_folder_are_not_followed(folder: Path, name: str) -> None:
    path = folder / "good" / name
    path.unlink()
    path.symlink_to(folder.parent / "outside" / "secret.txt")
    place = served.address(folder, "good")
    with served.asked(folder) as client:
        assert SECRET not in client.get("/").text
        for address in (place, f"{place}part/config", f"{place}curves", f"{place}report", f"{place}image/20/0"):
            sent = client.get(address)
            assert sent.status_code == 422, address
            assert SECRET not in sent.text
    with served.asked(folder, folder.parent / "outside") as client:
        assert client.get(place).status_code == 200, "--root lets it"


def test_folders_and_pictures_that_are_links_are_not_followed(folder: Path) -> None:
    elsewhere = fake_run.write_run(folder.parent / "outside" / "run", steps=20, saves=1)
    (folder / "link").symlink_to(elsewhere)
    (folder / "round").symlink_to(folder)
    with served.asked(folder) as client:
        page = client.get("/").text
        assert page.count("<article") == 1
        image = folder / "good" / "samples" / "step-00000020" / "000.png"
        image.unlink()
        image.symlink_to(folder.parent / "outside" / "secret.png")
        assert client.get(f"{served.address(folder, 'good')}image/20/0").status_code == 422
    with served.asked(folder, folder.parent / "outside") as client:
        assert client.get("/").text.count("<article") == 2


def test_a_download_holds_nothing_from_outside(folder: Path) -> None:
    adapter = folder / "good" / "adapter"
    adapter.mkdir()
    (adapter / "own.txt").write_text("own")
    (adapter / "a.txt").symlink_to(folder.parent / "outside" / "secret.txt")
    (adapter / "b.safetensors").symlink_to(folder.parent / "outside" / "secret.txt")
    os.mkfifo(adapter / "pipe")
    place = served.address(folder, "good")
    with served.asked(folder) as client:
        part = client.get(f"{place}part/files").text
        addresses = [text.split('"')[0] for text in part.split('href="')[1:]]
        sent = b"".join(client.get(place + address).content for address in addresses)
    assert b"own" in sent
    assert SECRET.encode() not in sent
    assert "b.safetensors" not in part


@pytest.mark.parametrize(
    "name", ["config.yaml", "status.json", "data.json", "evaluation.json", "metrics/metrics.jsonl"]
)
def test_a_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / "good" / name).unlink()
    os.mkfifo(folder / "good" / name)
    with served.asked(folder) as client:
        assert client.get("/").status_code == 200
        assert client.get(served.address(folder, "good")).status_code in (404, 422)


LARGE = ("config.yaml", "status.json", "data.json", "evaluation.json", "environment.json", "evaluations/a/result.json")
LARGE += ("evaluations/ledger-1/ledger.json", "samples/step-00000001/samples.json", "page.json")


@pytest.mark.parametrize("name", LARGE)
def test_a_file_that_is_too_large_takes_its_own_part_away(folder: Path, name: str) -> None:
    path = folder / "good" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with served.asked(folder) as client:
        assert client.get("/").status_code == 200
        text = client.get(served.address(folder, "good")).text
    assert (f"{path.name} has 1,099,511,627,776 bytes, more than such a file ever has" in text) == (name != "page.json")


def test_texts_that_unfold_for_ever_cost_nothing(folder: Path) -> None:
    bomb = ["a: &a0 [x]"] + [f"b{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 60)]
    (folder / "good" / "config.yaml").write_text("\n".join(bomb))
    with served.asked(folder) as client:
        place = served.address(folder, "good")
        assert client.get(place).status_code == 200
        assert client.get("/match?q=b3.x=1").status_code == 200
        other = served.address(folder, "good").split("/")[2]
        assert client.get(f"/compare?run={other}").status_code == 200


def test_names_and_texts_of_a_run_are_no_markup(folder: Path) -> None:
    run = folder / "<img src=x onerror=alert(3)>;$(touch x)`"
    fake_run.write_run(run, steps=20, saves=1)
    (run / "config.yaml").write_text(json.dumps({"run_name": HOSTILE, "description": HOSTILE, HOSTILE: HOSTILE}))
    fake_run.write_status(run, HOSTILE, 20, reason=HOSTILE)
    fake_run.document(run, "data.json", {"skipped": {HOSTILE: {"count": 1, "examples": [HOSTILE]}}})
    fake_run.document(
        run, "environment.json", {HOSTILE: HOSTILE, "command": ["daguerre", "quickstart", f"a={HOSTILE}"]}
    )
    fake_run.document(run, "evaluation.json", {HOSTILE: {"rows": [{"name": HOSTILE, "value": 0.5}]}})
    fake_run.document(run, "page.json", {"name": HOSTILE, "note": HOSTILE})
    (run / "log.txt").write_text(HOSTILE)
    listing = run / "samples" / "step-00000020" / "samples.json"
    listing.write_text(
        json.dumps([{**one, "prompt": HOSTILE, "sampler": HOSTILE} for one in json.loads(listing.read_text())])
    )
    file = MetricsFile(run / "metrics" / "metrics.jsonl")
    file.write(30, 960, {f"evaluation/m/{HOSTILE}": 0.5, HOSTILE: 1.0})
    file.close()
    id = served.address(folder, run.name).split("/")[2]
    with served.asked(folder) as client:
        pages = [client.get("/"), client.get(f"/run/{id}/"), client.get(f"/compare?run={id}&run={id}")]
        pages += [client.get(f"/run/{id}/part/{part}") for part in ("head", "log", "skipped", "config", "images")]
        for page in pages:
            assert page.status_code == 200
            assert "alert(1)" in page.text
            assert "<script>alert" not in page.text
            assert "<img src=x" not in page.text
        curves = client.get(f"/run/{id}/curves")
        assert curves.headers["content-type"] == "application/json"


def test_every_answer_forbids_what_it_does_not_need(folder: Path) -> None:
    place = served.address(folder, "good")
    with served.asked(folder) as client:
        for address in ("/", place, f"{place}image/20/0", f"{place}curves", "/static/run.js", "/nothing", "/login"):
            headers = client.get(address).headers
            assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
            assert "unsafe-inline" not in headers["content-security-policy"].split("style-src-attr")[0]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "<script>" not in client.get(place).text
        assert " onclick" not in client.get(place).text


@pytest.mark.parametrize(
    "content",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        b"<html><script>alert(1)</script></html>",
        b"GIF89a\x01\x00\x01\x00",
        b"",
    ],
)
def test_what_is_no_picture_is_not_sent(folder: Path, content: bytes) -> None:
    (folder / "good" / "samples" / "step-00000020" / "000.png").write_bytes(content)
    place = served.address(folder, "good")
    with served.asked(folder) as client:
        for address in (f"{place}image/20/0", f"{place}image/20/0/small"):
            sent = client.get(address)
            assert sent.status_code == 422
            assert "alert(1)" not in sent.text


def test_a_picture_that_unfolds_to_gigabytes_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MOST_PIXELS", 1000)
    with served.asked(folder) as client:
        sent = client.get(f"{served.address(folder, 'good')}image/20/0/small")
        assert sent.status_code == 422
        assert "too many" in sent.text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8800", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_a_name_that_means_this_machine_is_no_way_in(folder: Path, host: str) -> None:
    with served.asked(folder) as client:
        assert client.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:8800", "127.0.0.1", "[::1]:8800", "192.168.1.5:8800", "Train.example"])
def test_own_names_are(folder: Path, host: str) -> None:
    with served.asked(folder, hosts=frozenset({"train.example"})) as client:
        assert client.get("/", headers={"host": host}).status_code == 200


def test_other_sites_get_nothing_and_change_nothing(folder: Path) -> None:
    place = served.address(folder, "good")
    own = {"origin": served.HERE, "x-daguerre": "1"}
    with served.asked(folder, control=True, hosts=frozenset({"train.example"})) as client:
        cross = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert client.get(f"{place}image/20/0", headers=cross).status_code == 403
        note = json.dumps({"note": "x"})
        for wrong in ({}, {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:3000"}):
            assert client.post(f"{place}note", content=note, headers={"x-daguerre": "1", **wrong}).status_code == 403
        assert client.post(f"{place}note", content=note, headers={"origin": served.HERE}).status_code == 403
        assert not (folder / "good" / "page.json").exists()
        for method in ("PUT", "DELETE", "PATCH"):
            assert client.request(method, f"{place}note", headers=own).status_code == 405
        assert client.post(f"{place}note", content=note, headers=own).status_code == 200
        behind = {"origin": "https://train.example", "x-daguerre": "1"}
        assert client.post(f"{place}note", content=note, headers=behind).status_code == 200, "a proxy's name"


def test_without_the_token_there_is_only_the_form(folder: Path) -> None:
    place = served.address(folder, "good")
    with served.asked(folder, token=TOKEN) as client:
        for address, up in (("/", "login"), (place, "../../login"), (f"{place}report", "../../login")):
            sent = client.get(address)
            assert (sent.status_code, sent.headers["location"]) == (303, up)
        cors = {"sec-fetch-mode": "cors"}
        for address in (f"{place}curves", f"{place}events", f"{place}image/20/0", "/static/run.js", "/nothing"):
            assert client.get(address, headers=cors).status_code == 401
        assert "password" in client.get("/login").text
        for sheet in re.findall('href="(static/[^"]+)"', client.get("/login").text):
            assert client.get(f"/{sheet}", headers=cors).status_code == 200, "the form has its style"
        for cookie in (TOKEN, "x", Rules(token="another token").pass_):
            client.cookies.set("daguerre-8800", cookie)
            assert client.get(f"{place}curves", headers=cors).status_code == 401
        client.cookies.clear()
        assert client.get("/", params={"token": TOKEN}).status_code == 303, "none in an address"


def test_the_token_opens_it_and_no_script_sees_the_cookie(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(seconds: float) -> None:
        assert seconds > 0

    monkeypatch.setattr(app.asyncio, "sleep", at_once)
    form = {"origin": served.HERE}
    with served.asked(folder, token=TOKEN) as client:
        assert client.post("/login", data={"token": "wrong"}, headers=form).status_code == 403
        assert (
            client.post("/login", data={"token": TOKEN}, headers={"origin": "http://evil.example"}).status_code == 403
        )
        large = client.post("/login", content=b"token=" + b"x" * 10_000_000, headers=form)
        assert large.status_code == 413
        sent = client.post("/login", data={"token": TOKEN}, headers=form)
        assert (sent.status_code, sent.headers["location"]) == (303, "./")
        cookie = sent.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        assert client.get(served.address(folder, "good")).status_code == 200


def test_a_flood_of_streams_leaves_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MOST_STREAMS", 0)
    with served.asked(folder) as client:
        assert client.get("/events").status_code == 503
        assert client.get(f"{served.address(folder, 'good')}events").status_code == 503
        assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTT",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: ",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nContent-Length: 100\r\n\r\ntok",
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTT",
    ],
)
def test_a_request_that_is_never_complete_is_cut_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(patience, "REQUEST_SECONDS", 0.5)
    with served.running(folder) as here, socket.create_connection(("127.0.0.1", urlsplit(here).port)) as attacker:
        attacker.sendall(begun)
        attacker.settimeout(60)
        with suppress(ConnectionResetError):
            while attacker.recv(1 << 16):
                pass  # an answer to what was complete; then the end, or TimeoutError


def test_connections_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MOST_CONNECTIONS", 3)
    with served.running(folder) as here:
        port = urlsplit(here).port
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        try:
            deadline = time.monotonic() + 60
            while True:  # until the server has taken the three
                more = socket.create_connection(("127.0.0.1", port))
                more.settimeout(2)
                try:
                    assert more.recv(1) == b""
                    break
                except ConnectionResetError:
                    break
                except TimeoutError:
                    assert time.monotonic() < deadline
                finally:
                    more.close()
        finally:
            for one in held:
                one.close()


def test_two_pages_over_one_folder_do_no_harm(folder: Path) -> None:
    with served.asked(folder, control=True) as one, served.asked(folder, control=True) as other:
        place = f"{served.address(folder, 'good')}note"
        for i, client in enumerate((one, other, one)):
            headers = {"origin": served.HERE, "x-daguerre": "1"}
            assert client.post(place, content=json.dumps({"note": f"{i}"}), headers=headers).status_code == 200
        assert json.loads((folder / "good" / "page.json").read_text())["note"] == "2"
        assert "2" in other.get(f"{served.address(folder, 'good')}part/head").text
