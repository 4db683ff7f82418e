"""The form of a new run: what it shows, what a draft means, and that it reaches no other file and no other command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_run
import pytest
import served
from starlette.testclient import TestClient

from daguerre.config import config, fields, roots, schema
from daguerre.config.errors import ConfigError, Problem
from daguerre.errors import UserError
from daguerre.formatting import format_size
from daguerre.queue import check
from daguerre.queue.keeper import keep
from daguerre.queue.queue import Queue
from daguerre.serve.queueing import checking, drafts, entries, trial
from daguerre.serve.queueing.schema import Schema
from daguerre.settings import ROOTS

CHANGE = {"origin": served.HERE, "x-daguerre": "1"}
BOMB = ["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    return schema.json_schema()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_run.write_run(tmp_path / "runs" / "one", steps=20, saves=0)
    return tmp_path / "runs"


@pytest.fixture
def client(folder: Path, document: dict[str, object]):
    with served.asked(folder, control=True) as found:
        found.app.state.site.schema = Schema(document)
        yield found


def run_of(folder: Path, name: str = "one") -> str:
    return served.address(folder, name).split("/")[2]


def draft(client: TestClient, **message: object) -> dict[str, object]:
    sent = client.post("/queue/draft", content=json.dumps(message), headers=CHANGE)
    assert sent.status_code == 200, sent.text
    return sent.json()


def rows(found: dict[str, object]) -> dict[str, str]:
    return {path: html for group in found["groups"] for path, html in group["rows"]}


def test_the_form_has_every_setting_with_its_documentation_and_the_recipes_own_first(client: TestClient) -> None:
    found = draft(client, recipe="quickstart")
    shown, first = rows(found), found["groups"][0]["rows"]
    assert len(shown) > 200
    assert [path for path, _ in first][:3] == ["run_name", "data.source", "training.duration"]
    assert {"model.unet", "optimizer.beta2", "lr_scheduler.warmup"} <= {path for path, _ in first}
    assert "loader.num_workers" not in dict(first)
    assert "updates" in shown["training.duration"]
    assert 'value="1750 steps"' in shown["training.duration"]
    assert '<option value="v" selected>' in shown["objective.name"]
    assert 'placeholder="1.0"' in shown["training.max_grad_norm"]
    tree = {**config.sketch("quickstart", []).tree, "adapters": {"full": {"name": "full"}}}
    leaves = fields.leaves(config.Config, tree)
    whole = {path for path in leaves if not any(other.startswith(f"{path}.") for other in leaves)}
    assert set(shown) == {path.replace("sources.images.", "") for path in whole} - {"output_dir", "plugins"}


def test_a_choice_changes_the_settings_and_the_yaml_says_the_same(client: TestClient) -> None:
    found = draft(client, recipe="quickstart", yaml="seed: 3", change={"data.source": "folder", "data.path": "photos"})
    assert found["yaml"].split() == ["seed:", "3", "data:", "source:", "folder", "path:", "photos"]
    assert {"data.path", "data.captions_from"} <= set(rows(found))
    assert "setting given" in rows(found)["data.path"]
    again = draft(client, recipe="quickstart", yaml=found["yaml"], change={"data.path": "", "optimizer.name": "lion"})
    assert "path" not in again["yaml"]
    assert ("optimizer.beta2" in rows(again), again["problems"]) == (True, [])
    typed = draft(client, recipe="quickstart", change={"seed": "5", "run_name": "5", "sampling.prompts": '["a: b"]'})
    assert drafts.overrides(typed["yaml"]) == {"seed": 5, "run_name": "5", "sampling.prompts": ["a: b"]}
    assert "seed=5 run_name=5 'sampling.prompts=[\"a: b\"]'" in typed["command"]


def test_what_is_wrong_is_said_by_setting(client: TestClient) -> None:
    found = draft(client, recipe="quickstart", yaml="optimizer: {learning_rat: 1}")
    assert [path for path, _ in found["problems"]] == ["optimizer.learning_rat"]
    wrong = [Problem("seed", "allowed: a whole number", "a"), Problem("data.path", "must be given\nAllowed: text")]
    told = checking.problems(str(ConfigError(wrong, "x with 1 override")))
    assert [(one.path, one.text) for one in told] == [(one.path, one.text) for one in wrong]
    assert [(one.path, one.text) for one in checking.problems("no memory\n\nat all")] == [("", "no memory\n\nat all")]
    for text in ("seed: [", "seed: &x 1\ndescription: *x", "- seed", "config: /etc/passwd", "'--x': 1", "a b: 1"):
        sent = client.post("/queue/draft", content=json.dumps({"recipe": "sd15", "yaml": text}), headers=CHANGE)
        assert sent.status_code == 422, text


@pytest.mark.parametrize(
    "message",
    [
        {"recipe": "/etc/passwd"},
        {"recipe": "../one"},
        {"recipe": "--help"},
        {"run": "../../outside"},
        {"run": "000000000000"},
        {"recipe": "quickstart", "words": ["x"]},
        {"recipe": "quickstart", "goes_on": True},
        {"recipe": "quickstart", "yaml": "output_dir: /tmp"},
        {"recipe": "quickstart", "yaml": "output_dir: ../.."},
        {"recipe": "quickstart", "yaml": "queue: /tmp/q"},
        {"recipe": "quickstart", "yaml": "extends: /etc/passwd"},
        {"recipe": "quickstart", "yaml": 'run_name: "a\\0b"'},
        {"recipe": "quickstart", "yaml": "a" * 300_000},
        {
            "recipe": "quickstart",
            "yaml": "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]),
        },
    ],
)
def test_a_draft_names_nothing_but_recipes_runs_and_settings(client: TestClient, message: dict[str, object]) -> None:
    for place in ("draft", "check", "add"):
        sent = client.post(f"/queue/{place}", content=json.dumps(message), headers=CHANGE)
        assert sent.status_code in (404, 422), (place, sent.text)


def test_a_run_is_copied_and_goes_on(client: TestClient, folder: Path) -> None:
    id = run_of(folder)
    page = client.get(f"/queue/new?run={id}").text
    assert "run_name: one-2" in page
    found = draft(client, run=id, yaml="run_name: one-2")
    assert found["command"].endswith(f"train {folder / 'one'} run_name=one-2 output_dir={folder}")
    assert 'value="one-2"' in rows(found)["run_name"]
    assert "goes on in its folder" in client.get(f"/queue/new?on={id}").text
    found = draft(client, run=id, goes_on=True, yaml="training: {duration: 4k steps}")
    assert found["command"].endswith(f"train {folder / 'one'} 'training.duration=4k steps'")
    sent = client.post(
        "/queue/draft", content=json.dumps({"run": id, "goes_on": True, "yaml": "run_name: x"}), headers=CHANGE
    )
    assert "copy it" in sent.text


def test_a_recipe_that_lies_beside_the_runs_is_trained(client: TestClient, folder: Path) -> None:
    (folder / "foxes.yaml").write_text("extends: sdxl_lora\ndata:\n  source: folder\n  path: photos\n")
    assert '<option value="foxes.yaml" selected>' in client.get("/queue/new?recipe=foxes.yaml").text
    found = draft(client, recipe="foxes.yaml", yaml="run_name: a")
    assert found["command"] == f"daguerre train {folder / 'foxes.yaml'} run_name=a output_dir={folder}"
    assert 'value="photos"' in rows(found)["data.path"]
    assert 'value="32"' in rows(found)["adapters.lora.rank"]
    for above in ("/etc/passwd", "../one", "[x]"):
        (folder / "foxes.yaml").write_text(f"extends: {above}\n")
        sent = client.post("/queue/draft", content=json.dumps({"recipe": "foxes.yaml"}), headers=CHANGE)
        assert (sent.status_code, "root:" in sent.text) == (422, False)
    (folder / "linked.yaml").symlink_to("/etc/passwd")
    sent = client.post("/queue/draft", content=json.dumps({"recipe": "linked.yaml"}), headers=CHANGE)
    assert sent.status_code == 422


def test_a_config_of_a_stranger_is_data(client: TestClient, folder: Path) -> None:
    path, id = folder / "one" / "config.yaml", run_of(folder)
    hostile = "<img src=x onerror=alert(1)>"
    path.write_text(path.read_text() + json.dumps({"description": hostile, hostile: hostile})[1:-1] + "\n")
    sent = client.post("/queue/draft", content=json.dumps({"run": id}), headers=CHANGE)
    assert sent.status_code == 422, "a key that is no setting's name"
    path.write_text(fake_run.CONFIG + f"ema: {{path: {json.dumps(hostile)}}}\n")
    found = draft(client, run=id, yaml=f"description: {json.dumps(hostile)}")
    assert "<img" not in json.dumps(found["groups"])
    for text in ("extends: /etc/passwd\n", "a: &a [x]\nb: *a\n", "x" * 100, ""):
        path.write_text(text and fake_run.CONFIG + text)
        sent = client.post("/queue/draft", content=json.dumps({"run": id}), headers=CHANGE)
        assert (sent.status_code == 422) == bool(text), sent.text
        assert "root:" not in sent.text
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert client.post("/queue/draft", content=json.dumps({"run": id}), headers=CHANGE).status_code == 422


def test_the_page_adds_what_the_command_would(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    hostile = "a; touch x $(id) `id` '\" \n&"

    def said(words: list[str], where: Path, bounds: list[str], good: object) -> str:
        asked.append((words, where, bounds))
        return "fine"

    monkeypatch.setattr(check, "_said", said)
    message = {"recipe": "quickstart", "yaml": json.dumps({"run_name": "mine", "description": hostile})}
    sent = client.post("/queue/add", content=json.dumps(message), headers=CHANGE)
    (entry,) = (each.entry for each in served.queue_of(folder).entries())
    words = ["quickstart", "run_name=mine", f"description={hostile}", f"output_dir={folder}"]
    assert (entry.words, entry.place, entry.folder, entry.roots) == (
        words,
        f"{folder}/mine",
        f"{folder}",
        [f"{folder}"],
    )
    assert asked == [(["train", *words, "--dry-run"], folder, (f"{folder}",))]
    assert sent.json()["id"] in entries.render(served.queue_of(folder), client.app.state.site.catalog, True)
    again = client.post("/queue/add", content=json.dumps(message), headers=CHANGE)
    assert (again.status_code, "in the queue already" in again.text) == (422, True)
    (folder / "photos").mkdir()
    (folder / "photos" / "a.png").write_bytes(b"a picture")
    taken = client.post(
        "/queue/add", content=json.dumps({"recipe": "quickstart", "yaml": "run_name: photos"}), headers=CHANGE
    )
    assert "photos is a folder with other files" in taken.json()["problems"][0][1]
    secret = {"recipe": "quickstart", "yaml": "init_from: https://me:secretword@example.com/x"}
    refused = client.post("/queue/add", content=json.dumps(secret), headers=CHANGE).json()
    assert "no secret is written" in refused["problems"][0][1]
    assert len(served.queue_of(folder).entries()) == 1


def test_a_draft_is_tried_unless_a_run_has_the_device(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def tried(words: list[str], where: Path, bounds: tuple[str, ...], stopping: object) -> trial.Trial:
        asked.append((words, where, bounds))
        return trial.Trial(1.5, 3 << 30, 4800)

    monkeypatch.setattr(trial, "tried", tried)
    message = {"recipe": "quickstart", "yaml": "run_name: mine"}
    sent = client.post("/queue/try", content=json.dumps(message), headers=CHANGE)
    for said in ("1.5 s", "4,800 updates, 2 h", format_size(3 << 30)):
        assert said in sent.text
    assert asked == [(["quickstart", "run_name=mine", f"output_dir={folder}"], folder, (f"{folder}",))]
    outside = {"recipe": "quickstart", "yaml": "run_name: ../x"}
    assert client.post("/queue/try", content=json.dumps(outside), headers=CHANGE).status_code == 422
    queue = served.queue_of(folder)
    ident = queue.add(["next"], str(folder / "next"), folder, folder)
    monkeypatch.setattr(Queue, "entries", lambda own: [SimpleNamespace(ident=ident, state="running")])
    taken = client.post("/queue/try", content=json.dumps(message), headers=CHANGE)
    assert "a run of the queue trains now" in taken.text
    assert len(asked) == 1


def test_only_the_page_itself_adds_and_only_with_control(client: TestClient, folder: Path) -> None:
    message = json.dumps({"recipe": "quickstart"})
    for place in ("draft", "check", "plan", "try", "add"):
        for wrong in ({"origin": "http://evil.example"}, {"origin": ""}, {"x-daguerre": ""}):
            assert client.post(f"/queue/{place}", content=message, headers=CHANGE | wrong).status_code == 403
        assert client.get(f"/queue/{place}").status_code == 405
    with served.asked(folder) as reads:
        assert reads.post("/queue/add", content=message, headers=CHANGE).status_code == 403
        assert reads.get("/queue/new").status_code == 422
    assert not served.queue_of(folder).path.exists()


@pytest.mark.parametrize(
    ("path", "is_inside"),
    [
        ("photos", True),
        ("photos/{00..09}.tar::more/*.tar", True),
        ("org/model", True),
        ("s3://bucket/open/a.tar", True),
        ("../outside", False),
        ("/etc", False),
        ("~/photos", False),
        ("link/x", False),
        ("file:///etc/passwd", False),
        ("file:/etc/passwd", False),
        ("file:%2e%2e/outside", False),
        ("photos::/etc", False),
        ("{photos,/etc}/x", False),
        ("photos/*/../../..", False),
        ("s3://bucket/open/../x", False),
        ("s3://bucket/opener/x", False),
        ("https://169.254.169.254/x", False),
        ("pipe:cat /etc/passwd", False),
    ],
)
def test_a_recipe_that_is_bound_reads_below_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_inside: bool
) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to("/etc")
    monkeypatch.chdir(tmp_path / "inside")
    given = ["data.source=webdataset", f"data.path={path}"]
    config.load("quickstart", given)
    monkeypatch.setenv(ROOTS, json.dumps([str(tmp_path / "inside"), "s3://bucket/open"]))
    if is_inside:
        config.load("quickstart", given)
    else:
        with pytest.raises(UserError, match=r"data\.path.*\n.*--root"):
            config.load("quickstart", given)


def test_places_are_found_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ROOTS, json.dumps([str(tmp_path)]))
    for given in ("model.vae=/x", "ema.path=/x", "cache.path=/x", "sampling.prompts_file=/x", "init_from=/x"):
        with pytest.raises(UserError, match=given.partition("=")[0]):
            config.load("quickstart", [given])
    (tmp_path / "mine.yaml").write_text("extends: /etc/passwd\n")
    for name in ("/etc/passwd", str(tmp_path / "mine.yaml")):
        with pytest.raises(UserError, match="outside of the folders"):
            config.load(name)
    assert ("data.sources.images.path", "x") in roots.places(
        config.load("sd15", ["data.source=folder", "data.path=x"]).config
    )


def test_a_queued_training_is_bound_itself(folder: Path, tmp_path: Path) -> None:
    queue = served.queue_of(folder)
    ident = queue.add(["x"], str(folder / "x"), folder / "x", folder, roots=[str(folder)])
    code = f"import os; open({str(tmp_path / 'said')!r}, 'w').write(os.environ[{ROOTS!r}])"
    lock = (queue.path / f"{ident}.lock").open("w")
    keep(queue, ident, 1, [sys.executable, "-c", code], lock.fileno())
    lock.close()
    assert json.loads((tmp_path / "said").read_text()) == [str(folder)]


@pytest.mark.long  # processes that import torch
def test_a_schema_is_made_once_and_a_draft_is_checked_and_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with served.asked(folder, control=True) as client:
        assert len(rows(draft(client, recipe="sdxl_lora"))) > 200
        (kept,) = (tmp_path / "cache" / "daguerre" / "schema").iterdir()
        assert Schema().document() == json.loads(kept.read_text())
        message = {"recipe": "quickstart", "yaml": "data: {source: folder, path: /etc}"}
        sent = client.post("/queue/check", content=json.dumps(message), headers=CHANGE).json()
        assert [path for path, _ in sent["problems"]] == ["data.path"]
        message = json.dumps({"recipe": "quickstart", "yaml": "run_name: mine"})
        assert "Nothing was trained" in client.post("/queue/check", content=message, headers=CHANGE).json()["said"]
        plan = client.post("/queue/plan", content=message, headers=CHANGE).text
        assert "It fits this machine" in plan
        assert "1,750 updates" in plan
