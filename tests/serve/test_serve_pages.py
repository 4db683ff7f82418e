"""The pages say what the files say, follow them as they grow, and give pictures, numbers and files by ids."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import fake_run
import numpy as np
import pytest
import served
from PIL import Image

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli import main
from daguerre.serve import figures, server
from daguerre.serve.catalog import News
from daguerre.serve.queueing import checking
from daguerre.tracking.sinks import MetricsFile, read_metrics, truncate_after


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_run.write_run(tmp_path / "runs" / "quickstart", steps=100, saves=2)
    slow = fake_run.write_run(tmp_path / "runs" / "sub" / "slow", steps=20, saves=1, state="running")
    (slow / "config.yaml").write_text(fake_run.CONFIG.replace("1.0e-3", "5.0e-4").replace("name: v", "name: flow"))
    return tmp_path / "runs"


def run_id(folder: Path, run: str) -> str:
    return served.address(folder, run).split("/")[2]


def test_the_list_has_every_run_with_its_state_by_the_lock(folder: Path) -> None:
    with served.asked(folder) as client:
        page = client.get("/").text
        assert page.count("<article") == 2
        assert "Finished" in page
        assert "Interrupted" in page
        assert "100 of 3,000 updates" in page
        assert "Training now" not in page
    with RunFolder(folder / "sub" / "slow").hold(), served.asked(folder) as client:
        page = client.get("/").text
        assert "Training now" in page
        assert page.index(">slow<") < page.index(">quickstart<"), "what runs stands first"
        assert " left<" in page


@pytest.mark.parametrize(
    ("state", "reason", "word", "command"),
    [
        ("running", "paused", "Paused", "daguerre control RUN continue"),
        ("saved", "released on request", "Released", "daguerre train RUN"),
    ],
)
def test_a_run_that_waits_says_since_when_and_what_lets_it_go_on(
    folder: Path, state: Any, reason: str, word: str, command: str
) -> None:
    run = RunFolder(folder / "quickstart")
    with ExitStack() as stack:
        if state == "running":
            stack.enter_context(run.hold())
        run.write_status(state, step=100, samples=3200, reason=reason, since="2100-11-28T04:20:00+00:00")
        with served.asked(folder) as client:
            listed, page = client.get("/").text, client.get(served.address(folder, "quickstart")).text
            assert f'<span class="state {word.lower()}">{word}</span>' in listed
            assert f'<span class="state {word.lower()}">{word}</span>' in page
            assert f"<b>{word} since 28 November 2100, 04:20 UTC</b>" in page
            assert f"<code>{command}</code>" in listed
            assert f"<code>{command}</code>" in page
            assert "0 training now" in listed
            assert client.get("/match", params={"q": word}).json()["ids"] == [run_id(folder, "quickstart")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("quick", {"quickstart"}),
        ("learning_rate<7e-4", {"sub/slow"}),
        ("optimizer.learning_rate>=5e-4", {"quickstart", "sub/slow"}),
        ("objective.name=flow inter", {"sub/slow"}),
        ("objective.name!=flow", {"quickstart"}),
        ("rate=1", set()),
        ("nothing", set()),
    ],
)
def test_runs_are_found_by_text_and_by_settings(folder: Path, text: str, found: set[str]) -> None:
    with served.asked(folder) as client:
        client.get("/")
        assert set(client.get("/match", params={"q": text}).json()["ids"]) == {run_id(folder, run) for run in found}


def test_a_page_has_the_parts_of_a_report_and_the_numbers_of_the_file(folder: Path) -> None:
    place = served.address(folder, "quickstart")
    with served.asked(folder) as client:
        page = client.get(place).text
        for said in ("A model of the family <b>sd</b>", "3.71M", "aim reached", "a small green star", "not an image"):
            assert said in page
        assert "Edit name and note" not in page, "read-only"
        curves = client.get(f"{place}curves").json()
        lines = read_metrics(folder / "quickstart" / "metrics" / "metrics.jsonl")
        loss = [(line["step"], line["learning/loss"]) for line in lines if "learning/loss" in line]
        assert curves["metrics"]["learning/loss"]["x"] == [step for step, _ in loss]
        assert curves["metrics"]["learning/loss"]["y"] == pytest.approx([value for _, value in loss], rel=1e-5)
        assert curves["clock"]["samples"] == [32 * line["step"] for line in lines]
        titles = [chart["title"] for chart in curves["charts"]]
        assert titles[:2] == ["Loss", "Training loss by noise quartile"]
        assert "Memory of the device" in titles


def test_a_run_that_trains_here_says_how_busy_its_devices_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, run = tmp_path / "nvidia-smi", RunFolder(folder / "quickstart")
    program.write_text("#!/bin/sh\necho '93, 12288, 81559'\necho '0, 4, 81559'\necho '[N/A], 8, 40960'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def head() -> str:
        with served.asked(folder) as client:
            return client.get(served.address(folder, "quickstart")).text.partition("<dl")[0]

    gpus = {"gpus": [{"name": "a card"}, {"name": "a card"}]}
    assert " core" not in head().partition("free on the disk")[0].rpartition("<p")[2]
    with run.hold():
        run.write_status("running", step=100, samples=3200, total_steps=3000)
        assert re.search(r"load [0-9.]+ on \d+ cores? · ", head())
        fake_run.document(run.path, "environment.json", fake_run.ENVIRONMENT | gpus)
        assert "GPU 93 % busy, 12.9 GB of 85.5 GB in use · GPU 0 % busy" in head()
        assert " · GPU 8.39 MB of 42.9 GB in use · " in head(), "of a card in parts the driver says memory alone"
    assert checking.machine()[-1] == "card=40960MiB"
    assert "busy" not in head()


def test_a_run_that_goes_on_is_followed_from_its_last_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daguerre.serve.watched._LEAST_SECONDS", 0.0)
    monkeypatch.setattr("daguerre.serve.watched._SHARE", 1e9)
    place, metrics = served.address(folder, "quickstart"), folder / "quickstart" / "metrics" / "metrics.jsonl"
    with served.asked(folder) as client:
        first = client.get(f"{place}curves").json()
        head = client.get(f"{place}part/head")
        fake_run.write_status(folder / "quickstart", "saved", 110)
        file = MetricsFile(metrics)
        file.write(110, 3520, {"learning/loss": 7.0})
        file.close()
        tail = client.get(f"{place}curves", params={"version": first["version"], "after": first["step"]}).json()
        assert tail["metrics"]["learning/loss"] == {"x": [110], "y": [7.0]}
        assert (tail["version"], tail["step"]) == (first["version"], 110)
        now = client.get(f"{place}part/head")
        assert now.headers["x-mark"] != head.headers["x-mark"]
        assert "Saved, not finished" in now.text
        truncate_after(metrics, 50)
        whole = client.get(f"{place}curves", params={"version": first["version"], "after": 110}).json()
        assert whole["version"] != first["version"], "a run that went back: all is sent again"
        assert whole["metrics"]["learning/loss"]["x"] == [10, 20, 30, 40, 50]


def test_pictures_come_by_save_and_number(folder: Path) -> None:
    place = served.address(folder, "quickstart")
    with served.asked(folder) as client:
        for step in (50, 100):
            path = folder / "quickstart" / "samples" / f"step-{step:08d}" / "001.png"
            whole = client.get(f"{place}image/{step}/1")
            assert whole.content == path.read_bytes()
            assert whole.headers["content-type"] == "image/png"
            small = client.get(f"{place}image/{step}/1/small")
            assert small.headers["content-type"] == "image/webp"
            with Image.open(path) as one, Image.open(io.BytesIO(small.content)) as other:
                np.testing.assert_array_equal(one, other)
        assert [client.get(f"{place}image/{rest}").status_code for rest in ("100/4", "50/99", "60/0")] == [404] * 3


def test_checkpoints_and_exports_are_there_to_take(folder: Path) -> None:
    run = folder / "quickstart"
    for name in (
        "checkpoints/step-00000100/shard.bin",
        "checkpoints/step-00000020/a",
        "adapter/deep/x",
        "adapter/w.safetensors",
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(name.encode() * 100)
    place = served.address(folder, "quickstart")
    with served.asked(folder) as client:
        part = client.get(f"{place}part/files").text
        order = [
            part.index(name) for name in ("adapter.tar", "adapter/w.safetensors", "step-00000100", "step-00000020")
        ]
        assert order == sorted(order)
        files = {text.split('"')[0]: text.split(">")[1] for text in part.split('href="')[1:]}
        for address, name in files.items():
            sent = client.get(place + address)
            assert sent.headers["content-disposition"].startswith("attachment")
            assert sent.headers["content-type"] == "application/octet-stream"
            if name.startswith("adapter.tar"):
                with tarfile.open(fileobj=io.BytesIO(sent.content)) as held:
                    assert sorted(held.getnames()) == ["adapter/deep/x", "adapter/w.safetensors"]
                    assert held.extractfile("adapter/deep/x").read() == b"adapter/deep/x" * 100
            elif name.startswith("adapter/w"):
                assert sent.content == (run / "adapter" / "w.safetensors").read_bytes()
        assert client.get(f"{place}file/{'0' * 12}").status_code == 404


def test_what_a_run_has_otherwise_than_its_recipe(folder: Path) -> None:
    with served.asked(folder) as client:
        part = client.get(f"{served.address(folder, 'quickstart')}part/config").text
    assert "Recipe quickstart" in part
    assert "<code>training.duration</code></td><td>1750 steps</td><td>3k steps" in part


def test_runs_are_compared(folder: Path) -> None:
    ids = [run_id(folder, run) for run in ("quickstart", "sub/slow")]
    with served.asked(folder) as client:
        page = client.get("/compare", params={"run": ids}).text
        assert "<code>objective.name</code></td><td>v</td><td>flow" in page
        assert "<code>seed</code>" not in page
        numbers = client.get("/compare.json", params={"run": ids}).json()
        loss = numbers["charts"][0]
        assert [line["label"] for line in loss["lines"]] == ["quickstart", "slow"]
        assert numbers["metrics"][loss["lines"][1]["metric"]]["x"] == [10, 20]
        assert client.get("/compare").status_code == 404


def test_a_note_is_written_only_with_control(folder: Path) -> None:
    place = f"{served.address(folder, 'quickstart')}note"
    headers = {"origin": served.HERE, "x-daguerre": "1"}
    note = json.dumps({"name": "the first", "note": "<b>good</b>", "archived": True})
    with served.asked(folder) as client:
        assert client.post(place, content=note, headers=headers).status_code == 403
    assert not (folder / "quickstart" / "page.json").exists()
    with served.asked(folder, control=True) as client:
        assert client.post(place, content=note, headers=headers).status_code == 200
        page = client.get("/").text
        assert "the first" in page
        assert "&lt;b&gt;good" in page
        assert 'class="archived"' in page
        for wrong in (
            b"[]",
            b"{",
            json.dumps({"name": "x" * 300}).encode(),
            json.dumps({"folder": "/"}).encode(),
            b"x" * 99999,
        ):
            assert client.post(place, content=wrong, headers=headers).status_code == 422
        assert json.loads((folder / "quickstart" / "page.json").read_text())["name"] == "the first"


def test_what_a_page_asks_a_run_gets(folder: Path) -> None:
    run, place = RunFolder(folder / "quickstart"), served.address(folder, "quickstart")
    headers = {"origin": served.HERE, "x-daguerre": "1"}
    sample = {"kind": "sample", "values": {"prompts": ["a fox"], "seed": 3}}
    with served.asked(folder) as client:
        assert client.post(f"{place}action", content=json.dumps({"kind": "save"}), headers=headers).status_code == 403
        assert "Save now" not in client.get(place).text
    with served.asked(folder, control=True) as client:
        refused = client.post(f"{place}action", content=json.dumps({"kind": "save"}), headers=headers)
        assert refused.status_code == 404
        assert "is not being trained now" in refused.text
        with run.hold():
            wrong = (
                {"kind": "format"},
                {"kind": "save", "values": {"seed": 1}},
                {"kind": "sample", "values": {"x": 1}},
            )
            for one in wrong:
                assert client.post(f"{place}action", content=json.dumps(one), headers=headers).status_code == 422
            assert not run.actions.exists()
            ident = client.post(f"{place}action", content=json.dumps(sample), headers=headers).json()["id"]
            asked = json.loads((run.actions / f"{ident}.json").read_text())
            assert (asked["kind"], asked["values"]) == ("sample", {"prompts": ["a fox"], "seed": 3})
            assert client.get(f"{place}action/{ident}").json() is None
            made = run.samples / "asked" / ident
            made.mkdir(parents=True)
            Image.new("RGB", (8, 8), "red").save(made / "000.png")
            fake_run.document(made, "samples.json", [{"file": "000.png", "prompt": "a fox", "seed": 3, "step": 40}])
            run.answers.mkdir()
            fake_run.document(run.answers, f"{ident}.json", {"kind": "sample", "state": "done", "reason": "1 image"})
            assert client.get(f"{place}action/{ident}").json()["reason"] == "1 image"
            assert client.get(f"{place}action/..%2f..%2fstatus").status_code in (404, 422)
        page = client.get(place).text
        assert "Save now" in page
    with served.asked(folder) as client:
        assert "a fox" in client.get(f"{place}part/asked").text
        assert client.get(f"{place}asked/0").content == (made / "000.png").read_bytes()
        assert client.get(f"{place}asked/1").status_code == 404


def test_a_report_is_made_again_from_the_data(folder: Path) -> None:
    (folder / "quickstart" / "report.html").write_text("<script>alert(1)</script>")
    with served.asked(folder) as client:
        sent = client.get(f"{served.address(folder, 'quickstart')}report")
    assert "alert(1)" not in sent.text
    assert "training report" in sent.text
    assert "sandbox" in sent.headers["content-security-policy"]


def test_a_run_that_begins_is_in_the_list_and_one_that_is_gone_is_not(folder: Path) -> None:
    catalog = served.site(folder).catalog
    news = News(catalog)

    def scanned(everything: bool = True) -> set[str]:
        catalog.scan(everything)
        return {*news.take()}

    assert len(scanned()) == 2
    assert scanned() == set()
    fake_run.write_run(folder / "new", steps=10, saves=0)
    assert scanned() == {run_id(folder, "new")}
    file = MetricsFile(folder / "new" / "metrics" / "metrics.jsonl")
    file.write(20, 640, {"learning/loss": 1.0})
    file.close()
    assert scanned() == {run_id(folder, "new")}
    with RunFolder(folder / "sub" / "slow").hold():
        assert scanned() == {run_id(folder, "sub/slow")}, "its lock alone has changed"
    assert scanned(everything=False) == {run_id(folder, "sub/slow")}
    fake_run.document(folder / "new", "page.json", {"name": "mine"})
    catalog.refresh(run_id(folder, "new"))  # as its own page does
    assert scanned() == {run_id(folder, "new")}
    (folder / "new").rename(folder.parent / "gone")
    assert scanned() == {run_id(folder, "new")}
    assert catalog.entries.get(run_id(folder, "new")) is None


def test_events_tell_of_what_changes(folder: Path) -> None:
    with served.running(folder) as here:
        get = build_opener(ProxyHandler({})).open
        place = here + served.address(folder, "quickstart").lstrip("/")
        with get(f"{place}events", timeout=60) as stream:
            first = json.loads(stream.readline().removeprefix(b"data: "))
            assert (first["state"], first["step"], first["read"]) == ("finished", 100, None)
            assert first["done"] == pytest.approx(100 / 3000)
            stream.readline()
            fake_run.write_status(folder / "quickstart", "failed", 100, "no memory")
            second = json.loads(stream.readline().removeprefix(b"data: "))
            assert (second["state"], second["reason"]) == ("failed", "no memory")
            assert second["parts"]["head"] != first["parts"]["head"]
            assert second["parts"]["config"] == first["parts"]["config"]


def test_numbers_are_rounded_to_what_a_screen_shows() -> None:
    values = np.array([0.0, 1 / 3, -123456.789, 1.23456789e-9, 9.87654321e20])
    np.testing.assert_allclose(figures._rounded(values), values, rtol=1e-5)
    assert figures._rounded(values)[1] == 0.333333


def test_no_torch_is_loaded() -> None:
    script = (
        "import sys, daguerre.cli.serve; print(sorted({'torch', 'transformers', 'diffusers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere", "there is no folder nowhere"),
        ("--prot 3", "there is no option --prot"),
        ("--port", "--port needs a value"),
        (". --port 99999", "--port takes a number up to 65535"),
        (". --root nowhere", "there is no folder nowhere"),
        (". --cert x", "--cert and --key belong together"),
        ("a b", "takes one folder or address"),
        ("s3://bucket/runs --root .", "the page of a store shows its runs"),
    ],
)
def test_a_command_that_cannot_be(words: str, said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["serve", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("DAGUERRE_SERVE_TOKEN", "secret")
    assert main.run(["serve", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "6 characters" in capsys.readouterr().err


def test_a_client_without_runs_is_told_how_to_begin(tmp_path: Path) -> None:
    with served.asked(tmp_path) as client:
        assert "daguerre train quickstart" in client.get("/").text


def test_who_begins_with_the_page_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "serve", lambda *_: None)
    assert main.run(["serve", "--port", "0", "--queue", str(tmp_path / "queue")]) == 2, "it only reads"
    assert not (tmp_path / "runs").exists()
    assert main.run(["serve", "--port", "0", "--queue", str(tmp_path / "queue"), "--control"]) == 0
    assert (tmp_path / "runs").is_dir()
    with served.asked(tmp_path / "runs", control=True) as client:
        assert "add pictures of your own" in client.get("/").text
