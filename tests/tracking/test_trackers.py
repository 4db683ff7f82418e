"""Trackers: copies of the metrics file that survive a kill and a resume, whose errors end nothing but themselves."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import sleep

import pytest
import tiny_runs
import wandb_file

from daguerre import errors, faults, plugins
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.config import config as configs
from daguerre.contracts.trackers import GREY, TrackerContract, tracked, written
from daguerre.errors import UserError
from daguerre.report.evaluations import protocol_name
from daguerre.run.trackers import image_name, send_evaluations, send_late
from daguerre.tracking.background import Background
from daguerre.tracking.sinks import MetricsFile
from daguerre.tracking.tracker import TrackedRun
from daguerre.tracking.trackers import tensorboard as tensorboard_tracker
from daguerre.tracking.trackers import wandb as wandb_tracker

FAKE = Path(tiny_runs.__file__).parent / "fake_wandb"
NEEDED = {"wandb": {"mode": "offline", "project": "mine"}}
Rows = dict[int, dict[str, float]]


@pytest.fixture
def fake(monkeypatch):
    """The module that stands for wandb."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    import wandb

    assert Path(wandb.__file__).is_relative_to(FAKE)
    yield wandb
    sys.modules.pop("wandb", None)


def started(name: str, run: TrackedRun, **given: str):
    module = plugins.find("trackers", name)
    settings = module.Settings(**{**NEEDED.get(name, {}), **given})
    module.check(settings)
    return module.start(settings, run)


def of_tensorboard(folder: Path) -> tuple[Rows, list[int]]:
    """Numbers by step, and the steps with an image."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0}).Reload()
    rows: Rows = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in rows.setdefault(event.step, {}), "a point is there twice"
            rows[event.step][name] = event.value
    assert set(events.Tags()["images"]) <= {image_name(0)}
    return rows, [event.step for event in events.Images(image_name(0))]


def of_wandb(folder: Path) -> tuple[Rows, list[int]]:
    run = sys.modules["wandb"].RUNS[-1]
    numbers = {
        step: {name: v for name, v in row.items() if isinstance(v, int | float) and name[0] != "_"}
        for step, row in run.rows.items()
    }
    for row in numbers.values():
        row.pop("evaluation/step", None)
    return numbers, [step for step, row in run.rows.items() if image_name(0) in row]


READ = {"tensorboard": of_tensorboard, "wandb": of_wandb}


def expected(steps: range) -> Rows:
    """The rows of `written`."""
    rows = {step: {"learning/loss": pytest.approx(1 / step), "samples": 32 * step} for step in steps}
    rows[steps[-1]]["evaluation/shapes/colour"] = 0.5
    return rows


@pytest.mark.parametrize("name", plugins.names("trackers"))
@pytest.mark.usefixtures("fake")
class TestTracker(TrackerContract):
    """All."""

    @pytest.fixture
    def given(self, name):
        return NEEDED.get(name, {})


@pytest.mark.parametrize("name", plugins.names("trackers"))
def test_a_tracker_has_what_it_was_given(name, tmp_path, fake):
    sink = started(name, tracked(tmp_path))
    written(sink, range(1, 6))
    sink.close()
    rows, images = READ[name](tmp_path)
    assert (rows, images) == (expected(range(1, 6)), [5])


@pytest.mark.parametrize("name", plugins.names("trackers"))
def test_a_resume_repeats_no_point_and_loses_none(name, tmp_path, fake):
    """Killed after update 5, and gone on from the checkpoint of update 3, whose image is there."""
    killed = started(name, tracked(tmp_path))
    for step in range(1, 6):
        killed.write(step, 32 * step, {"learning/loss": 1 / step})
        if step in (3, 5):
            killed.show(step, image_name(0), GREY, "a star\nseed 3")
    sink = started(name, tracked(tmp_path, range(1, 4), resumed=True))
    written(sink, range(4, 8))
    sink.close()
    rows, images = READ[name](tmp_path)
    assert (rows, images) == (expected(range(1, 8)), [3, 7])


@pytest.mark.parametrize("name", plugins.names("trackers"))
def test_a_run_from_nothing_hides_what_an_earlier_process_wrote(name, tmp_path, fake, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    # A process counts its files from 0. Their names are sorted as text, so that of one second 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    written(started(name, tracked(tmp_path)), range(1, 6))
    sink = started(name, tracked(tmp_path))
    written(sink, range(1, 3))
    sink.close()
    assert READ[name](tmp_path) == (expected(range(1, 3)), [2])


def test_tensorboard_shows_the_text_of_an_image_as_it_is(tmp_path):
    from tensorboard.backend.event_processing import plugin_event_accumulator

    sink = started("tensorboard", tracked(tmp_path))
    sink.show(3, image_name(0), GREY, "# a *star*\n\nseed 0 \ud83d")
    sink.close()
    page = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # as the server reads it
    (found,) = page.Tensors("samples/000/text_summary")
    assert found.tensor_proto.string_val[0] == b"    # a *star*\n    \n    seed 0 ?"


def test_importing_a_tracker_is_light():
    code = (
        "import sys; from daguerre import plugins; [plugins.find('trackers', n) for n in plugins.names('trackers')]; "
        "print([m for m in ('torch', 'tensorboard', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Weights & Biases


def test_wandb_keeps_its_id_and_sends_the_server_no_step_twice(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    first = started("wandb", tracked(tmp_path), mode="online", entity="us")
    written(first, range(1, 6))
    again = started("wandb", tracked(tmp_path, range(1, 4), resumed=True), mode="online")
    written(again, range(4, 8))
    again.close()
    one, two = fake.RUNS[-2:]
    identity = json.loads((tmp_path / wandb_tracker.IDENTITY).read_text())["id"]
    assert one.arguments["id"] == two.arguments["id"] == identity
    assert (one.arguments["project"], one.arguments["entity"], one.arguments["resume"]) == ("mine", "us", "allow")
    rows, images = of_wandb(tmp_path)
    assert sorted(rows) == [1, 2, 3, 4, 5, 6, 7]
    assert images == [5, 7]
    assert two.finished


def test_wandb_gets_what_the_server_lacks(tmp_path, fake, monkeypatch):
    """The process was killed before its last numbers were sent."""
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    started("wandb", tracked(tmp_path), mode="online").write(1, 32, {"learning/loss": 1.0})
    again = started("wandb", tracked(tmp_path, range(1, 4), resumed=True), mode="online")
    rows, images = of_wandb(tmp_path)
    assert (sorted(rows), images) == ([1, 2, 3], [3])
    assert fake.RUNS[-1].rows[3]["_timestamp"] == 1795305603.0, "the time at which it was measured"
    again.close()


def test_an_evaluation_that_comes_late_has_its_own_axis(tmp_path, fake):
    sink = started("wandb", tracked(tmp_path))
    sink.write(50, 100, {"learning/loss": 1.0})
    sink.write(20, 40, {"evaluation/fid": 9.0})
    run = fake.RUNS[-1]
    assert run.axes == {"evaluation/*": "evaluation/step"}
    assert run.rows == {50: {"samples": 100, "learning/loss": 1.0, "evaluation/fid": 9.0, "evaluation/step": 20}}
    sink.close()


def test_evaluations_that_come_together_have_a_row_each(tmp_path, fake):
    sink = started("wandb", tracked(tmp_path, range(1, 4), resumed=True))
    for step in (1, 2, 3):
        sink.write(step, 0, {"evaluation/fid": 9.0 - step})
    sink.write(5, 160, {"learning/loss": 1.0})
    sink.close()
    rows = fake.RUNS[-1].rows
    found = {at: (row["evaluation/step"], row["evaluation/fid"]) for at, row in rows.items() if "evaluation/fid" in row}
    assert found == {3: (1, 8.0), 5: (2, 7.0), 6: (3, 6.0)}


def test_a_new_offline_folder_has_the_evaluations_of_the_older_one(tmp_path, fake):
    lines = [{"step": step, "samples": 0, "evaluation/fid": 9.0 - step} for step in (1, 2)]
    started("wandb", replace(tracked(tmp_path, range(1, 4), resumed=True), evaluations=lines)).close()
    assert [row.get("evaluation/fid") for row in fake.RUNS[-1].rows.values()] == [8.0, 7.0, None]


def test_only_the_newest_offline_folder_is_left(tmp_path, fake):
    """Of two files of one id that are sent, the later replaces the earlier, so it has the whole history."""
    for last in (0, 3, 6):
        sink = started("wandb", tracked(tmp_path, range(1, last + 1), resumed=last > 0))
        sink.write(last + 1, 0, {"learning/loss": 1.0})
    assert len(list((tmp_path / "wandb").iterdir())) == 3, "none is removed before the newest is surely written"
    sink.close()
    (left,) = (tmp_path / "wandb").iterdir()
    assert left == Path(fake.RUNS[-1].dir).parent
    assert sorted(fake.RUNS[-1].rows) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("saved", 0), ("failed", 1)])
def test_wandb_shows_a_run_that_failed_as_failed(tmp_path, fake, state, code):
    sink = started("wandb", tracked(tmp_path))
    RunFolder(tmp_path).write_status(state, step=3, samples=6)
    sink.close()
    assert fake.RUNS[-1].exit_code == code


def test_wandb_is_told_nothing_of_the_machine(tmp_path, fake):
    started("wandb", tracked(tmp_path)).close()
    settings = fake.RUNS[-1].arguments["settings"]
    assert settings.x_disable_meta
    assert settings.disable_git
    assert not settings.save_code
    assert not settings.x_save_requirements


def test_wandb_is_refused_in_words_where_it_cannot_work(tmp_path, fake, monkeypatch):
    settings = wandb_tracker.Settings()
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"set the environment variable WANDB_API_KEY, or set .*mode=offline"):
        wandb_tracker.check(settings)
    (tmp_path / "netrc").write_text("machine api.wandb.test login user password secret\n")
    wandb_tracker.check(settings)
    (tmp_path / "netrc").unlink()
    for mode, active in (("offline", True), ("disabled", False)):
        monkeypatch.setenv("WANDB_MODE", mode)
        wandb_tracker.check(settings)
        assert settings.active is active
    monkeypatch.setattr(wandb_tracker, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"which is not installed: .*pip install .*wandb, or leave it out"):
        wandb_tracker.check(settings)


# Threads


class Recording:
    """A sink that waits, or fails, as it is told."""

    def __init__(self, gate: threading.Event | None = None, error: Exception | None = None) -> None:
        self.gate, self.error, self.steps, self.closed = gate, error, [], False

    def write(self, step, samples, values):
        if self.gate is not None:
            self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.steps.append(step)

    def show(self, step, name, pixels_HWC, text):
        self.steps.append(name)

    def close(self):
        self.closed = True


def test_calls_reach_the_tracker_in_their_order():
    sink, said = Recording(), []
    background = Background("one", lambda: sink, said.append)
    for step in range(200):
        background.write(step, 0, {})
    background.show(5, "image", GREY, "")
    background.close()
    assert sink.steps == [*range(200), "image"]
    assert sink.closed
    assert said == []


def test_a_tracker_that_hangs_delays_nothing_and_is_told_once():
    gate, said = threading.Event(), []
    background = Background("slow", lambda: Recording(gate), said.append, limit=3, patience_seconds=0.01)
    for step in range(50):
        background.write(step, 0, {})  # would wait for ever otherwise
    background.close()
    assert said == [
        "tracker slow FAILED: it is 3 calls behind. The run continues without it; all numbers are in "
        "metrics/metrics.jsonl"
    ]
    gate.set()


def test_an_end_that_takes_too_long_is_told():
    gate, said = threading.Event(), []
    background = Background("slow", lambda: Recording(gate), said.append, patience_seconds=0.01)
    background.write(1, 0, {})
    background.close()
    assert len(said) == 1
    assert "has not finished within 0.01 s" in said[0]
    gate.set()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd"), SystemExit(3)])
@pytest.mark.parametrize("at_start", [True, False])
def test_an_error_of_any_kind_ends_the_tracker_alone(error, at_start):
    said = []

    def start():
        if at_start:
            raise error
        return Recording(error=error)

    background = Background("odd", start, said.append)
    for step in range(5):
        background.write(step, 0, {})
    background.close()
    assert len(said) == 1
    assert said[0].startswith(f"tracker odd FAILED: {type(error).__name__}: {error}. The run continues")


# Runs


def test_tensorboards_own_thread_that_loses_its_folder_is_no_fault_of_ours(tmp_path, monkeypatch, capsys):
    import torch.utils.tensorboard as library

    lines: list[str] = []
    before = {*threading.enumerate()}  # with the writers of other tests, which go on
    monkeypatch.setattr(library, "SummaryWriter", partial(library.SummaryWriter, flush_secs=0))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.chdir(tmp_path)
    faults.install()
    run = tracked(tmp_path / "run")
    tracker = Background("tensorboard", lambda: started("tensorboard", run), lines.append)
    tiny_runs.wait_for(tmp_path / "run" / "tensorboard")
    written(tracker, range(1, 3))
    run.folder.rename(tmp_path / "elsewhere")
    for step in range(3, 600):  # not in `show`, which would meet the error itself
        tracker.write(step, step, {"learning/loss": 0.5})
        sleep(0 if lines else 0.01)
    tracker.close()
    for thread in {*threading.enumerate()} - before:
        if "tensorboard" in type(thread).__module__:
            thread.join(60)
    assert len(lines) == 1
    assert lines[0].startswith("tracker tensorboard FAILED: FileNotFoundError")
    assert capsys.readouterr().err == ""
    assert not [*tmp_path.glob("daguerre-fault-*")]


def test_a_run_goes_on_without_a_tracker_that_fails(tmp_path, fake, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboard_tracker.TensorBoard, "write", full)
    run = tmp_path / "tiny"
    given = ["logging.every=1 steps", "logging.trackers={wandb: {mode: offline}}", "logging.tensorboard=true"]
    given += ["description=from https://me:secret123@host.test/x?token=abcdefgh", "checkpoint.export=false"]
    given += ["training.duration=2 steps", "sampling.num_images=1", "sampling.num_inference_steps=1"]
    given += ["validation.every=1 steps", "validation.num_samples=1", "validation.num_levels=1"]
    assert tiny_runs.train(tmp_path, *given, "data.checked_prompts=1") == errors.DONE
    assert capsys.readouterr().out.count("tracker tensorboard FAILED: OSError: [Errno 28] No space left") == 1
    told = fake.RUNS[-1]
    assert told.finished
    assert told.arguments["name"] == "tiny"
    assert told.arguments["config"]["training"]["global_batch_size"] == 2
    assert not any(secret in str(told.arguments) for secret in ("secret123", "abcdefgh"))
    assert [step for step, row in told.rows.items() if "samples/000" in row] == [2]
    merged: dict[int, dict[str, float]] = {}
    for line in tiny_runs.lines(run):
        merged.setdefault(line["step"], {}).update(line)
    assert sorted(merged) == [1, 2]
    for step, line in merged.items():
        assert {name: value for name, value in told.rows[step].items() if name in line} == {
            name: value for name, value in line.items() if name != "step"
        }


NOT_INSTALLED = (found := find_spec("wandb")) is None or found.origin is None


@pytest.mark.long
@pytest.mark.skipif(NOT_INSTALLED, reason="wandb is not installed: pip install wandb")
def test_the_offline_file_of_a_killed_and_resumed_run(tmp_path, monkeypatch):
    """What `wandb sync` would send, read from the file that wandb itself has written."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    given = [
        "logging.every=1 steps",
        "logging.trackers={wandb: {mode: offline, project: p}}",
        "checkpoint.export=false",
    ]
    given += ["training.duration=60 steps", "checkpoint.every=10 steps", "sampling.num_images=1"]
    run = tmp_path / "tiny"
    process = tiny_runs.start(tmp_path, *given)
    tiny_runs.wait_for(run / "checkpoints" / "step-00000030" / "manifest.json", 600)
    tiny_runs.kill(process)
    (folder,) = (run / "wandb").glob("offline-run-*")
    before = wandb_file.history(next(folder.glob("*.wandb")))
    lines = tiny_runs.lines(run)
    assert len(before) >= 10, "a kill costs the last second alone"
    identity = json.loads((run / "wandb.json").read_text())["id"]
    process = tiny_runs.start(tmp_path, *given)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert f"wandb: offline; `wandb sync {run}/wandb/offline-run-" in said
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert folder.name.endswith(identity)
    file = folder / f"run-{identity}.wandb"
    rows = wandb_file.history(file)
    assert [row["_step"] for row in rows] == list(range(1, 61)), "each step once, from first to last"
    assert lines[0]["step"] == 1
    merged: dict[int, dict[str, float]] = {}
    for line in tiny_runs.lines(run):
        merged.setdefault(line["step"], {}).update(line)
    for row in rows:
        line = merged[row["_step"]]
        assert {name: row[name] for name in line if name != "step"} == {n: v for n, v in line.items() if n != "step"}
    assert [row["_step"] for row in rows if "samples/000/path" in row] == [10, 20, 30, 40, 50, 60]
    assert rows[-1]["evaluation/step"] == 60
    kinds = {record.WhichOneof("record_type") for record in wandb_file.parsed(file)}
    assert "environment" not in kinds, "no command line, host or user"
    assert len(list(folder.rglob("*.png"))) == 6


def evaluation(folder: RunFolder, step: int, **protocol) -> str:
    """Writes a result of `daguerre evaluate`, and gives the name of its number in trackers."""
    protocol = {"step": step, "images": 2, "guidance_scale": 3.0, **protocol}
    place = folder.evaluations / f"step-{step:08d}-{len(protocol)}-{protocol['guidance_scale']}"
    place.mkdir(parents=True)
    rows = [{"name": "fid", "value": 7.5, "share": False}]
    document = {"protocol": protocol, "time": "a", "tables": {"fid-x": {"count": 2, "rows": rows}}}
    (place / "result.json").write_text(json.dumps(document))
    return f"evaluation/fid-x/fid/{protocol_name(protocol)}"


def test_results_of_evaluate_reach_trackers_once_and_the_metrics_file_never(tmp_path):
    seen: list[tuple[int, int, dict[str, float]]] = []
    folder, sink = RunFolder(tmp_path), Recording()
    sink.write = lambda *line: seen.append(line)
    tracker, file, name = Background("one", lambda: sink, print), MetricsFile(folder.metrics), ""
    for step in (10, 20):
        name = evaluation(folder, step)
        for _ in range(2):
            send_evaluations([file, tracker], folder, 160)
    for one in (tracker, file):
        one.close()
    assert seen == [(step, 160, {name: 7.5}) for step in (10, 20)]
    assert folder.metrics.read_bytes() == b""


def test_results_that_a_tracker_did_not_take_are_given_to_it_again(tmp_path):
    folder = RunFolder(tmp_path)
    evaluation(folder, 10)
    good, again = Recording(), Recording()
    for name, sink in (("bad", Recording(error=OSError("full"))), ("good", good), ("bad", again), ("good", good)):
        tracker = Background(name, lambda sink=sink: sink, lambda line: None)
        send_evaluations([tracker], folder, 160)
        tracker.close()
    assert (good.steps, again.steps) == ([10], [10])


def test_protocols_have_names_of_their_own_in_trackers(tmp_path):
    """Numbers of a sweep do not replace each other, nor those of the metric of the loop."""
    folder = RunFolder(tmp_path)
    names = [evaluation(folder, 10, guidance_scale=scale) for scale in (1.0, 3.0)]
    names.append(evaluation(folder, 10, sampler="ddim"))
    assert len({*names}) == 3
    assert evaluation(folder, 20, guidance_scale=1.0, checkpoint="step-00000020", run="moved") == names[0]
    assert names[0].startswith("evaluation/fid-x/fid/2-images-guidance-1-")


def test_results_that_come_after_training_reach_trackers(tmp_path, capsys):
    """From the process that measures, as long as no other one trains."""
    folder = RunFolder(tmp_path)
    name = evaluation(folder, 10)
    file = MetricsFile(folder.metrics)
    file.write(12, 384, {"learning/loss": 1.0})
    file.close()
    config = configs.load("quickstart", [f"output_dir={tmp_path}"]).config
    with folder.hold():
        send_late(config, folder, print)
        assert not (tmp_path / "tensorboard").exists()
    for _ in range(2):
        send_late(config, folder, print)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == [name]
    assert [(event.step, event.value) for event in events.Scalars(name)] == [(10, 7.5)]
    assert capsys.readouterr().out == ""
