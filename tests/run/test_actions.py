"""What is asked of a run while it trains: done or refused in words, and the same weights to the bit."""

from __future__ import annotations

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import tiny_runs

from daguerre import errors
from daguerre.checkpoint import actions
from daguerre.checkpoint.async_save import Saver
from daguerre.checkpoint.manifest import CheckpointError
from daguerre.checkpoint.run_dir import Holder, RunFolder
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.remote import actions as asking
from daguerre.run import results
from daguerre.training import step

FEW = ["checkpoint.every=null", "checkpoint.export=false", "sampling.num_images=1"]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(actions, "LOOK_SECONDS", 0.0)


def weights(run):
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return newest.name, {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def train(output_dir, monkeypatch, plan, *overrides):
    """Trains and asks, before the updates that `plan` names, for (kind, values); the answers by their order."""
    folder, made, idents = RunFolder(output_dir / "tiny"), [], []
    unharmed = step.update

    def asking_update(*args, **kwargs):
        made.append(1)
        for kind, values in plan.get(len(made), []):
            idents.append(actions.ask(folder, kind, values))
        return unharmed(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(step, "update", asking_update)
        code = tiny_runs.train(output_dir, *FEW, *overrides)
    return code, [actions.answer(folder, ident) for ident in idents]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert tiny_runs.train(folder, *FEW) == errors.DONE
    return weights(folder / "tiny")


def test_actions_are_done_and_weights_stay_equal(tmp_path, monkeypatch, undisturbed, capsys):
    run = tmp_path / "tiny"

    def goes_on():
        tiny_runs.wait_for(run / "samples" / "asked")
        while json.loads((run / "status.json").read_text())["reason"] != "paused":
            time.sleep(0.02)
        words = ["control", str(run), "sample", 'prompts=["a red star", "a blue ring"]', "seed=5", "sampler=euler"]
        codes.append(main.run(words))
        codes.append(main.run(["control", str(run), "continue"]))

    codes: list[int] = []
    thread = threading.Thread(target=goes_on)
    thread.start()
    plan = {
        2: [("save", {}), ("sample", {"prompts": ["a green star"], "num_inference_steps": 1})],
        3: [("change", {"prompts": ["a pink square"], "guidance_scale": 2.0}), ("continue", {})],
        4: [("evaluate", {}), ("pause", {})],
    }
    code, found = train(tmp_path, monkeypatch, plan)
    thread.join()
    assert code == errors.DONE, capsys.readouterr().err
    assert codes == [errors.DONE, errors.DONE]
    assert weights(run) == undisturbed
    assert [answer.state for answer in found] == ["done", "done", "done", "refused", "done", "done"], found
    assert found[0].files == "checkpoints/step-00000002"
    assert (run / found[0].files / "manifest.json").is_file()
    (image,) = json.loads((run / found[1].files / "samples.json").read_text())
    assert (image["prompt"], image["step"]) == ("a green star", 2)
    assert found[3].reason == "the run is not paused"
    recipe = (run / "config.yaml").read_text()
    assert "a pink square" in recipe
    assert "guidance_scale: 2.0" in recipe
    (last,) = json.loads((run / "samples" / "step-00000008" / "samples.json").read_text())
    assert last["prompt"] == "a pink square"
    (asked,) = [path for path in (run / "samples" / "asked").iterdir() if path.name not in found[1].files]
    assert [image["prompt"] for image in json.loads((asked / "samples.json").read_text())] == [
        "a red star",
        "a blue ring",
    ]
    assert not list((run / "actions").iterdir())


@pytest.mark.parametrize("kind", ["stop", pytest.param("release", marks=pytest.mark.long)])
def test_a_run_ends_on_request_and_goes_on(tmp_path, monkeypatch, undisturbed, kind):
    code, (answer,) = train(tmp_path, monkeypatch, {3: [(kind, {})]})
    status = json.loads((tmp_path / "tiny" / "status.json").read_text())
    assert code == errors.INTERRUPTED
    assert (answer.state, answer.step) == ("done", 3)
    assert (status["state"], status["step"]) == ("saved", 3)
    assert status["reason"] == {"stop": "stopped on request", "release": "released on request"}[kind]
    assert train(tmp_path, monkeypatch, {})[0] == errors.DONE
    assert weights(tmp_path / "tiny") == undisturbed


@pytest.mark.long  # of the quick tests, one pauses and one stops
def test_a_paused_run_saves_when_it_is_stopped(tmp_path, monkeypatch):
    run = tmp_path / "tiny"

    def stops():
        tiny_runs.wait_for(run / "answers")
        while json.loads((run / "status.json").read_text())["reason"] != "paused":
            time.sleep(0.02)
        actions.ask(RunFolder(run), "stop")

    thread = threading.Thread(target=stops)
    thread.start()
    code, found = train(tmp_path, monkeypatch, {3: [("pause", {})]})
    thread.join()
    assert code == errors.INTERRUPTED
    assert found[0].state == "done"
    assert weights(run)[0] == "step-00000003"


REFUSED = [
    ("sample", {"sampler": "no"}, "sampler"),
    ("sample", {"no_such": 1}, "no_such"),
    ("sample", {"prompts_file": "/etc/passwd"}, "give the prompts themselves"),
    ("sample", {"num_images": 10**9}, "the most"),
    ("sample", {"height": 10**9}, "px a side"),
    ("sample", {"strength": 0.5}, "nothing that this run trains"),
    ("change", {"height": 7}, "height"),
]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_ranks_agree_on_whether_a_save_is_missing(tmp_path, monkeypatch, fails, seen):
    """A save that all ranks make is never left out by one that has not seen yet that the last one failed."""

    class Store:
        def plan(self, name, groups, documents, files):
            return SimpleNamespace(name=name, local={}, local_bytes=0)

        def commit(self, planned, local):
            if fails:
                raise CheckpointError("no room")
            return tmp_path / planned.name

        def purge(self, keep):
            return []

    made: list[int] = []
    saver = Saver(Store())
    run = SimpleNamespace(state=SimpleNamespace(step=3), saver=saver, saved=lambda outcomes: None)
    saver.save(results.checkpoint_name(run), {}, {})
    saver.wait()
    if seen:
        saver.settle()
    monkeypatch.setattr(results, "save", lambda run: made.append(run.state.step))
    results.save_if_missing(run)
    saver.finish()
    assert made == ([3] if fails else [])


def test_what_cannot_be_done_is_refused_in_words(tmp_path, monkeypatch, undisturbed):
    plan = {2: [(kind, values) for kind, values, _ in REFUSED]}
    code, found = train(tmp_path, monkeypatch, plan)
    assert code == errors.DONE
    assert weights(tmp_path / "tiny") == undisturbed
    for answer, (_, _, words) in zip(found, REFUSED, strict=True):
        assert answer.state == "refused", answer
        assert words in answer.reason


HERE = Holder(1, "here", "now")


def inbox(folder):
    told = []
    return actions.Inbox(RunFolder(folder), HERE, told.append), told


def forged(**other):
    return json.dumps({"kind": "save", "expires": time.time() + 60, **vars(HERE), **other}).encode()


FORGED = {
    "nothing": (b"", "not an action"),
    "no JSON": (b"\xff\x00{", "not an action"),
    "nested": (b"[" * 60_000, "not an action"),
    "a list": (b"[1]", "not an action"),
    "another kind": (forged(kind="format"), "kind"),
    "more keys": (forged(path="/etc"), "path"),
    "values of another shape": (forged(kind="sample", values=[1]), "values"),
    "values without effect": (forged(values={"seed": 1}), "only sample and change"),
    "a number beyond all": (b'{"expires": ' + b"9" * 400 + b"}", "digits"),
    "no number": (forged(expires=float("inf")).replace(b"Infinity", b"1e999"), "expires"),
    "huge": (b" " * (actions.MOST_BYTES + 1), "bytes, more than"),
    "too late": (forged(expires=1.0), "expired"),
    "of another start": (forged(since="before"), "earlier start"),
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_files_are_refused(tmp_path, what):
    own, told = inbox(tmp_path)
    data, words = FORGED[what]
    (tmp_path / "actions").mkdir()
    ident = actions.new_id()
    (tmp_path / "actions" / f"{ident}.json").write_bytes(data)
    assert own.take() == []
    answer = actions.answer(RunFolder(tmp_path), ident)
    assert answer.state == "refused"
    assert words in answer.reason
    assert not list((tmp_path / "actions").iterdir())
    assert not told


def test_links_folders_and_pipes_are_not_opened(tmp_path):
    own, _ = inbox(tmp_path)
    (tmp_path / "actions").mkdir()
    (tmp_path / "elsewhere").write_bytes(forged())
    names = [f"{actions.new_id()}.json" for _ in range(3)]
    (tmp_path / "actions" / names[0]).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "actions" / names[1]).mkdir()
    os.mkfifo(tmp_path / "actions" / names[2])
    (tmp_path / "actions" / "notes.txt").write_text("not ours")
    assert own.take() == own.take() == []
    for name in names:
        assert actions.answer(RunFolder(tmp_path), name.removesuffix(".json")).state == "refused"
    assert (tmp_path / "elsewhere").read_bytes()
    assert (tmp_path / "actions" / "notes.txt").is_file()


def test_a_folder_that_is_a_link_is_not_looked_into(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    (other / f"{actions.new_id()}.json").write_bytes(forged())
    (run / "actions").symlink_to(other)
    own, told = inbox(run)
    assert own.take() == own.take() == []
    assert len(told) == 1
    assert len(list(other.iterdir())) == 1


def test_an_action_is_taken_once_and_in_order(tmp_path):
    own, _ = inbox(tmp_path)
    (tmp_path / "actions").mkdir()
    idents = [actions.new_id() for _ in range(5)]
    for ident in reversed(idents):
        (tmp_path / "actions" / f"{ident}.json").write_bytes(forged())
    assert [asked.ident for asked in own.take()] == idents
    assert own.take() == []
    later, _ = inbox(tmp_path)  # a kill: the next start knows that it was not done
    assert later.take() == []
    assert {actions.answer(RunFolder(tmp_path), ident).reason for ident in idents} == {
        "the run ended before this was done; ask again"
    }


def test_nothing_can_be_asked_of_a_run_that_does_not_train(tmp_path, capsys):
    with pytest.raises(UserError, match="is not being trained now"):
        asking.ask(str(tmp_path), "save")
    assert main.run(["control", str(tmp_path), "sve"]) == errors.REFUSED
    assert main.run(["control", str(tmp_path), "sample", "guidence_scale=2"]) == errors.REFUSED
    assert "did you mean guidance_scale?" in capsys.readouterr().err
    assert main.run(["control", str(tmp_path), "save", "seed=2"]) == errors.REFUSED


def test_what_is_not_taken_can_be_taken_back(tmp_path):
    run = RunFolder(tmp_path)
    with run.hold():
        ident = asking.ask(str(tmp_path), "save")
        with pytest.raises(UserError, match="was taken back"):
            asking.wait(str(tmp_path), ident, 0.1)
    assert not list((tmp_path / "actions").iterdir())
    with pytest.raises(UserError, match="is not the ID"):
        actions.answer(run, "../config.yaml")


@pytest.mark.long
def test_fifty_updates_with_and_without_actions(tmp_path, monkeypatch):
    given = ["training.duration=50 steps", "checkpoint.every=20 steps"]
    assert train(tmp_path / "a", monkeypatch, {}, *given)[0] == errors.DONE
    plan = {
        n: [("sample", {"prompts": ["a red star"], "seed": n}), ("evaluate", {}), ("save", {})][: n % 4]
        for n in range(2, 50)
    }
    code, found = train(tmp_path / "b", monkeypatch, plan, *given)
    assert code == errors.DONE
    assert {answer.state for answer in found} == {"done"}
    assert weights(tmp_path / "a" / "tiny") == weights(tmp_path / "b" / "tiny")
