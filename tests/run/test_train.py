"""`daguerre train` from end to end: what it leaves behind, how it goes on, what it refuses."""

import io
import json
import os
import re
import shutil
import signal
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from PIL import Image
from shards import build
from tiny_runs import assert_equal, lines, outcome, train

from daguerre import errors
from daguerre.cli import main
from daguerre.config.place import own_place
from daguerre.run import results
from daguerre.training import step
from daguerre.types import Batch


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder) == errors.DONE
    return folder / "tiny"


@pytest.fixture(scope="module")
def expected(whole):
    return outcome(whole)


def test_the_run_folder_holds_what_the_design_says(whole):
    for name in ("config.yaml", "environment.json", "data.json", "evaluation.json", "report.html"):
        assert (whole / name).stat().st_size > 0, name
    status = json.loads((whole / "status.json").read_text())
    assert (status["state"], status["step"], status["samples"]) == ("finished", 8, 16)
    assert sorted(p.name for p in (whole / "checkpoints").glob("step-*")) == ["step-00000006", "step-00000008"]
    assert sorted(p.name for p in (whole / "samples").iterdir()) == [f"step-0000000{n}" for n in (3, 6, 8)]
    assert len(list((whole / "samples" / "step-00000008").glob("*.png"))) == 2
    assert {"tokenizer.json", "tokenizer_config.json"} <= {
        p.name for p in (whole / "checkpoints" / "step-00000008" / "tokenizer").iterdir()
    }


def test_metrics_keep_their_names(whole):
    read = [json.loads(line) for line in (whole / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in read] == [3, 4, 6, 8, 8, 8]
    assert set(read[0]) >= {
        "learning/loss",
        "learning/current_learning_rate",
        "learning/gradient_norm",
        "learning/nonfinite_steps",
        "perf/step_time_seconds",
        "perf/per_device_tflops",
        "perf/per_device_tflops_per_sec",
        "perf/samples_per_second",
        "perf/data_wait_seconds",
        "memory/peak_bytes",
    }
    assert set(read[1]) >= {"validation/loss", "validation/loss_level_0", "validation/loss_level_1"}
    assert {"evaluation/shapes/background", "evaluation/shapes/size"} <= set(read[-1])
    per_second = read[0]["perf/per_device_tflops"] / read[0]["perf/step_time_seconds"]
    assert read[0]["perf/per_device_tflops_per_sec"] == pytest.approx(per_second)


@pytest.mark.long  # two trainings; of the quick tests, the ledger's measures raw weights beside their average
def test_validation_measures_the_raw_weights_beside_their_average(tmp_path):
    few = ["checkpoint.every=null", "checkpoint.export=false", "sampling.num_images=0"]
    assert train(tmp_path / "both", *few, "validation.raw_weights=true") == errors.DONE
    assert train(tmp_path / "alone", *few, "ema.enabled=false") == errors.DONE
    both, alone = lines(tmp_path / "both" / "tiny"), lines(tmp_path / "alone" / "tiny")
    raw = [line["validation/loss_raw"] for line in both if "validation/loss" in line]
    assert raw == [line["validation/loss"] for line in alone if "validation/loss" in line]
    assert raw != [line["validation/loss"] for line in both if "validation/loss" in line]


def test_stock_diffusers_opens_the_pipeline(whole):
    diffusers = pytest.importorskip("diffusers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers.StableDiffusionPipeline.from_pretrained(whole / "pipeline")
        pipeline.set_progress_bar_config(disable=True)
        assert pipeline("a red circle", num_inference_steps=2).images[0].size == (64, 64)


def test_a_finished_run_says_so_and_changes_nothing(whole, expected, capsys):
    assert train(whole.parent) == errors.DONE
    assert "is finished: 8 updates" in capsys.readouterr().out
    assert_equal(whole, expected)


@pytest.mark.long
@pytest.mark.parametrize("update", [2, 4, 7])
def test_killed_in_an_update_it_ends_equal_to_the_bit(tmp_path, expected, monkeypatch, update):
    unharmed, calls = step.update, []

    def deadly(*args, **kwargs):
        calls.append(1)
        if len(calls) == update:
            raise Killed
        return unharmed(*args, **kwargs)

    monkeypatch.setattr(step, "update", deadly)
    with pytest.raises(Killed):
        train(tmp_path)
    monkeypatch.setattr(step, "update", unharmed)
    assert train(tmp_path) == errors.DONE
    assert_equal(tmp_path / "tiny", expected)


@pytest.mark.long  # of the quick tests, the one of a damaged checkpoint is killed and ends equal to the bit
@pytest.mark.parametrize("what", ["validate", "save", "publish", "evaluate"])
def test_killed_between_updates_it_ends_equal_to_the_bit(tmp_path, expected, monkeypatch, what):
    def deadly(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(results, what, deadly)
        with pytest.raises(Killed):
            train(tmp_path)
    assert train(tmp_path) == errors.DONE
    assert_equal(tmp_path / "tiny", expected)


@pytest.mark.long
def test_tensorboard_gets_each_image_and_its_prompt_once(tmp_path, monkeypatch):
    """Also where a kill comes after the images, so that the restart draws them again."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = ["logging.tensorboard=true", 'sampling.prompts=["a small red star on white"]', "checkpoint.export=false"]

    def deadly(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(results, "write_json_atomically", deadly)
        with pytest.raises(Killed):
            train(tmp_path, *given)
    assert (tmp_path / "tiny" / "samples" / "step-00000003" / "samples.json").is_file()
    assert train(tmp_path, *given) == errors.DONE
    every = {"images": 0, "tensors": 0}
    events = EventAccumulator(str(tmp_path / "tiny" / "tensorboard"), size_guidance=every).Reload()
    for number in range(2):
        assert [event.step for event in events.Images(f"samples/00{number}")] == [3, 6, 8]
        texts = events.Tensors(f"samples/00{number}/text_summary")
        assert [event.step for event in texts] == [3, 6, 8]
        assert texts[0].tensor_proto.string_val[0].decode() == f"    a small red star on white\n    seed {number}"
    drawn = (tmp_path / "tiny" / "samples" / "step-00000008" / "000.png").read_bytes()
    shown = Image.open(io.BytesIO(events.Images("samples/000")[-1].encoded_image_string))
    assert np.array_equal(np.asarray(shown), np.asarray(Image.open(io.BytesIO(drawn))))


@pytest.mark.parametrize("stop_at", [pytest.param(1, marks=pytest.mark.long), 5])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_happened(tmp_path, expected, monkeypatch, stop_at):
    unharmed, calls = step.update, []

    def signalled(*args, **kwargs):
        calls.append(1)
        if len(calls) == stop_at:
            signal.raise_signal(signal.SIGTERM)
        return unharmed(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(step, "update", signalled)
        assert train(tmp_path) == errors.TERMINATED
    status = json.loads((tmp_path / "tiny" / "status.json").read_text())
    assert (status["state"], status["step"], status["reason"]) == ("saved", stop_at, "stopped by SIGTERM")
    assert train(tmp_path) == errors.DONE
    shutil.rmtree(tmp_path / "tiny" / "samples" / f"step-{stop_at:08d}")  # the one thing that the stop added
    assert_equal(tmp_path / "tiny", expected)


@pytest.mark.long  # of the quick tests, a signal in an update saves
def test_a_signal_while_validating_is_not_taken_for_saved(tmp_path, monkeypatch):
    unharmed = results.validate

    def signalled(run):
        signal.raise_signal(signal.SIGTERM)
        unharmed(run)

    with monkeypatch.context() as patched:
        patched.setattr(results, "validate", signalled)
        assert train(tmp_path) == errors.TERMINATED
    status = json.loads((tmp_path / "tiny" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("saved", 5)
    assert (tmp_path / "tiny" / "checkpoints" / "step-00000005" / "manifest.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("workers", [2])
def test_workers_change_nothing(tmp_path, expected, workers):
    assert train(tmp_path, f"loader.num_workers={workers}") == errors.DONE
    assert_equal(tmp_path / "tiny", expected)


@pytest.mark.long  # of the quick tests, training/test_step.py and data/test_loader.py have each half
def test_accumulation_sees_the_same_samples(tmp_path, expected):
    """Another cut of the global batch rounds otherwise, and is the same training to single precision."""
    assert train(tmp_path, "training.per_device_batch_size=1", "training.gradient_accumulation_steps=2") == errors.DONE
    ours = lines(tmp_path / "tiny")
    assert [line["samples"] for line in ours] == [line["samples"] for line in expected["lines"]]
    for a, b in zip(ours, expected["lines"], strict=True):
        assert a.get("learning/loss", 0) == pytest.approx(b.get("learning/loss", 0), rel=1e-4)


def damage_newest(run):
    path = run / "checkpoints" / "step-00000006" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_set_aside_by_name_and_the_one_before_is_used(tmp_path, expected, monkeypatch, capsys):
    unharmed, calls = step.update, []

    def deadly(*args, **kwargs):
        calls.append(1)
        if len(calls) == 7:
            raise Killed
        return unharmed(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(step, "update", deadly)
        with pytest.raises(Killed):
            train(tmp_path)
    damage_newest(tmp_path / "tiny")
    assert train(tmp_path) == errors.DONE
    said = capsys.readouterr().out
    assert "model.safetensors" in said
    assert "continuing from step-00000003" in said
    assert_equal(tmp_path / "tiny", expected)


def test_another_recipe_on_the_same_folder_is_refused_with_what_differs(whole, expected, capsys):
    assert train(whole.parent, "optimizer.learning_rate=5e-5", "seed=3") == errors.REFUSED
    said = capsys.readouterr().err
    assert re.search(r"seed: the run has 0, this command has 3", said)
    assert "optimizer.learning_rate" in said
    assert "init_from=" in said
    assert_equal(whole, expected)


@pytest.mark.long  # of the quick tests, test_new_duration.py
def test_a_longer_duration_goes_on(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "tiny")
    longer = ["training.duration=9 steps", "lr_scheduler.on_new_duration=stretch"]
    assert train(tmp_path, *longer) == errors.DONE
    assert json.loads((tmp_path / "tiny" / "status.json").read_text())["step"] == 9


@pytest.mark.long
def test_a_run_folder_as_recipe_is_that_run_wherever_it_lies(whole, tmp_path, monkeypatch, capsys):
    shutil.copytree(whole, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    for place in ("moved", "./moved/"):
        assert main.run(["train", place]) == errors.DONE
        said = capsys.readouterr().out
        assert "this run is finished" in said
        assert "images: moved/samples" in said
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    assert own_place(str(whole), ["run_name=another"]) == []


def test_steps_that_the_schedule_does_not_have_are_refused_before_training(tmp_path, capsys):
    assert train(tmp_path, "sampling.timestep_spacing=leading") == errors.REFUSED
    assert "timestep_spacing is leading" in capsys.readouterr().err
    assert not (tmp_path / "tiny" / "config.yaml").exists()


def test_held_out_samples_that_cannot_be_decoded_are_said():
    said = []
    valid_B = torch.tensor([1.0, 0.0])
    batch = Batch(None, {"image": torch.zeros(2, 3, 1, 1)}, ["", ""], valid_B, ["good", "broken"], np.zeros((2, 6)))
    assert list(results.named(SimpleNamespace(say=said.extend), iter([batch]))) == [batch]
    assert len(said) == 1
    assert said[0].endswith(": broken")


@pytest.mark.long  # of the quick tests, test_lora_runs.py starts from another run
def test_init_from_takes_the_weights_and_nothing_else(whole, tmp_path, capsys):
    assert (
        train(tmp_path, f"init_from={whole}", "training.duration=1 step", "lr_scheduler.warmup=1 step") == errors.DONE
    )
    assert "starting from the weights of" in capsys.readouterr().out
    assert json.loads((tmp_path / "tiny" / "status.json").read_text())["step"] == 1
    assert train(tmp_path / "no", "init_from=nowhere") == errors.REFUSED
    assert "init_from=nowhere" in capsys.readouterr().err


@pytest.mark.long  # of the quick tests, test_precision_runs.py takes a run back
def test_an_older_checkpoint_by_name(whole, tmp_path, expected):
    shutil.copytree(whole, tmp_path / "tiny")
    assert train(tmp_path, "resume_from_checkpoint=step-00000006") == errors.DONE
    assert_equal(tmp_path / "tiny", expected)
    assert "resume_from_checkpoint: latest" in (tmp_path / "tiny" / "config.yaml").read_text()


def test_dry_run_says_what_would_happen_and_writes_nothing(tmp_path, capsys):
    assert train(tmp_path, "--dry-run") == errors.DONE
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    for part in (
        "UNet2DConditionModel",
        "AutoencoderKL",
        "shapes: endless",
        "8 updates of 2 samples = 16 samples",
    ):
        assert part in said
    assert re.search(r"^Settings \(\d+ that differ from the defaults; --full shows all \d+\)$", said, re.MULTILINE)
    assert "learning_rate: 0.0015" in said
    assert "max_grad_norm" not in said


def test_dry_run_shows_every_setting_on_demand(tmp_path, capsys):
    assert train(tmp_path, "--dry-run", "--full") == errors.DONE
    assert "    max_grad_norm: 1.0\n" in capsys.readouterr().out
    assert train(tmp_path, "--full") == errors.REFUSED
    assert "--full needs --dry-run" in capsys.readouterr().err


def test_dry_run_refuses_a_data_set_smaller_than_a_batch(tmp_path, capsys):
    build(tmp_path / "raw", 1, 3)
    path = f"data.path={tmp_path / 'raw'}"
    given = [f"output_dir={tmp_path}", "data.source=webdataset", path, "training.global_batch_size=4"]
    code = main.run(["train", "quickstart", "--dry-run", *given])
    assert code == errors.REFUSED
    assert "a batch of 4 samples is larger than an epoch of the data set (2 to train on)" in capsys.readouterr().err


def test_a_run_that_diverges_is_stopped_and_names_the_samples(tmp_path, capsys):
    code = train(
        tmp_path, "optimizer.learning_rate=1e30", "training.max_nonfinite_steps=2", "training.max_grad_norm=null"
    )
    assert code == errors.FAILED
    said = capsys.readouterr().err
    assert "2 updates in a row" in said
    assert "shapes/train/" in said
    status = json.loads((tmp_path / "tiny" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "NaN or infinite" in status["reason"]


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file") == errors.REFUSED
    assert "output_dir" in capsys.readouterr().err


def refused_beside(first: int, folder):
    """A second process on the folder, which must name the first and be refused by what loads quickly."""
    with pytest.MonkeyPatch.context() as told:
        told.setenv("PYTHONPROFILEIMPORTTIME", "1")
        second = tiny_runs.start(folder)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == errors.HELD
    assert f"process {first}" in said
    loaded = {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}
    assert "daguerre.run.storage" in loaded
    assert "torch" not in loaded


@pytest.mark.long
def test_a_second_run_is_refused_before_the_heavy_imports(tmp_path, monkeypatch):
    unharmed = step.update

    def update(*args, **kwargs):
        refused_beside(os.getpid(), tmp_path)
        return unharmed(*args, **kwargs)

    monkeypatch.setattr(step, "update", update)
    more = ["training.duration=1 step", "lr_scheduler.warmup=0 steps", "sampling.num_images=0"]
    assert train(tmp_path, *more, "checkpoint.export=false", "data.checked_prompts=1") == errors.DONE


@pytest.mark.long  # of the quick tests, those of signals stop the run in this process, and the one above is refused
@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_run_is_refused_and_sigterm_ends_the_first_with_its_workers(tmp_path, workers):
    first = tiny_runs.start(tmp_path, "training.duration=100000 steps", f"loader.num_workers={workers}")
    try:
        tiny_runs.wait_for(tmp_path / "tiny" / "metrics" / "metrics.jsonl")
        refused_beside(first.pid, tmp_path)
        first.send_signal(signal.SIGTERM)
        said, _ = first.communicate(timeout=60)
    except BaseException:
        tiny_runs.kill(first)
        raise
    assert first.returncode == errors.TERMINATED, said
    assert "run the same command to continue" in said
    assert "Traceback" not in said
