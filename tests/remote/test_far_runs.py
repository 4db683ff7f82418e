"""`daguerre train` with its run folder in a bucket: equal to the bit to a local one, whatever kills it and wherever it
goes on. Minutes: `make test-long`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
from buckets import moto, s3_run  # noqa: F401 (fixtures)
from tiny_runs import assert_equal, lines, outcome

from daguerre import errors
from daguerre.checkpoint import actions
from daguerre.cli import main
from daguerre.remote import actions as asking
from daguerre.remote import local_copy
from daguerre.storage import clients
from daguerre.storage.bucket import prefix

pytestmark = pytest.mark.long

LONGER = ["training.duration=24 steps", "checkpoint.every=4 steps", "validation.every=8 steps"]
KILLS_A_RUN = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict[str, Any], float, Path]:
    """The outcome of an uninterrupted local run, its seconds, and its folder."""
    folder, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    process = tiny_runs.start(folder, *LONGER)
    said, _ = process.communicate()
    assert process.returncode == errors.DONE, said
    return outcome(folder / "tiny"), time.monotonic() - began, folder / "tiny"


@pytest.fixture
def runs(s3_run, tmp_path, monkeypatch) -> str:  # noqa: F811
    """The address of a folder of runs; the working folder is this test's, and so is the machine's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clients, "PATIENCE", clients.Patience())
    clients.forget()
    another_machine(monkeypatch, tmp_path)
    return s3_run.url.rpartition("/")[0]


def another_machine(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """One whose cache is empty."""
    patch.setenv("XDG_CACHE_HOME", str(folder / f"machine-{time.monotonic_ns()}"))


def copy_of(runs: str) -> Path:
    """All of the run as a reader has it, laid out as a local one."""
    copy = local_copy.located(f"{runs}/tiny")
    assert local_copy.fetch(copy, "all") == []
    local_copy.fetch_export(copy, "pipeline")
    return copy


def finished(runs: str, *overrides: str) -> str:
    process = tiny_runs.start(runs, *overrides)  # type: ignore[arg-type]
    said, _ = process.communicate(timeout=300)
    assert process.returncode == errors.DONE, said
    return said


def test_a_run_in_a_bucket_equals_a_local_one_and_is_read_everywhere(runs, whole, tmp_path, monkeypatch, capsys):
    said = finished(runs, *LONGER)
    assert f"run folder: {runs}/tiny" in said
    assert f"report: {runs}/tiny/report.html" in said
    assert_equal(copy_of(runs), whole[0])
    another_machine(monkeypatch, tmp_path)
    assert "this run is finished: 24 updates" in finished(runs, *LONGER)

    def run(*words: str) -> str:
        another_machine(monkeypatch, tmp_path)
        code = main.run(list(words))
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    address = f"{runs}/tiny"
    assert "this run is finished" in run("train", address)
    assert f"step-00000024 of {address}" in run("generate", address, "prompt=a red circle", "out=drawn")
    assert f'"run": "{address}"' in Path("drawn/000.json").read_text()
    older = "resume_from_checkpoint=step-00000020"
    assert f"step-00000020 of {address}" in run("generate", address, "prompt=a red circle", older, "out=other")
    few = ["metrics=[shapes,validation_loss]", "metrics.validation_loss.num_samples=2", "num_images=4"]
    said = run("evaluate", address, *few)
    (result,) = Path("runs/evaluations/tiny").glob("step-00000024-*/result.json")
    assert f"written to {result}" in said
    run("evaluate", str(whole[2]), *few)
    (expected,) = (whole[2] / "evaluations").glob("*/result.json")
    assert json.loads(result.read_text())["tables"] == json.loads(expected.read_text())["tables"]
    assert "step 24, shapes" in run("evaluate", address, *few, "--follow", "patience_seconds=0", "out=followed")
    assert Path(run("report", address).split()[-1]).read_text().count("finished")
    run("convert", "export", address, "format=diffusers", "out=exported")
    assert (Path("exported") / "model_index.json").is_file()
    assert f"starting from the weights of {address}/checkpoints/step-00000024" in run(
        *tiny_runs.arguments(Path("local")), f"init_from={address}", "run_name=next"
    )
    assert f"{runs}/longer" in run(
        "train", address, "run_name=longer", "training.duration=2 steps", "lr_scheduler.warmup=1 steps"
    )
    assert f"a new run starts from the weights of step-00000024 of {address}" in run(
        *tiny_runs.arguments(Path("local")), f"init_from={address}", "run_name=third", "--dry-run"
    )


@pytest.mark.parametrize(("seed", "workers"), [(0, 0), (1, 1), (2, 0)])
def test_killed_at_random_moments_and_gone_on_elsewhere_it_ends_equal_to_the_bit(
    runs, whole, tmp_path, monkeypatch, seed, workers
):
    """SIGKILL, an empty cache, on. The lock of a process of this machine that is dead is taken over at once."""
    expected, seconds, _ = whole
    moments, killed = random.Random(seed), 0
    while killed < KILLS_A_RUN:
        process = tiny_runs.start(runs, *LONGER, f"loader.num_workers={workers}")
        try:
            said, _ = process.communicate(timeout=moments.uniform(0.35, 1.2) * seconds)
            assert process.returncode == errors.DONE, said
            break
        except subprocess.TimeoutExpired:
            tiny_runs.kill(process)
            killed += 1
            another_machine(monkeypatch, tmp_path)
    finished(runs, *LONGER, f"loader.num_workers={workers}")
    assert_equal(copy_of(runs), expected)


def test_a_second_run_is_refused_and_a_stopped_one_goes_on_elsewhere(runs, tmp_path, monkeypatch):
    endless = ["training.duration=5000 steps", "checkpoint.every=4 steps", "checkpoint.export=false"]
    first = tiny_runs.start(runs, *endless)
    wait_for(lambda: checkpoints(runs), 200)
    another_machine(monkeypatch, tmp_path)
    second = tiny_runs.start(runs, *endless)
    said, _ = second.communicate(timeout=200)
    assert second.returncode == errors.HELD, said
    assert f"{runs}/tiny is in use by process {first.pid} on {socket.gethostname()}" in said
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=200)
    assert first.returncode == errors.TERMINATED, said
    assert "tiny/.lock" not in names(runs)
    assert '"state": "saved"' in prefix(runs).read("tiny/status.json")[0].decode()
    newest = checkpoints(runs)[-1]
    then = tiny_runs.start(runs, *endless)
    wait_for(lambda: checkpoints(runs)[-1] > newest, 200)
    then.send_signal(signal.SIGTERM)
    said, _ = then.communicate(timeout=200)
    assert then.returncode == errors.TERMINATED, said
    assert f"continuing from {newest}" in said


def test_what_is_asked_in_a_bucket_is_done_in_time(runs, tmp_path):
    """By S3's protocol: a look every ten seconds, done at most thirty later."""
    address = f"{runs}/tiny"
    process = tiny_runs.start(
        runs, "training.duration=20k steps", "checkpoint.every=null", "validation.every=20k steps"
    )

    def asked(kind: actions.Kind, **values: object) -> tuple[actions.Answer, float]:
        began = time.monotonic()
        return asking.wait(address, asking.ask(address, kind, values), 120), time.monotonic() - began

    try:
        wait_for(lambda: any(name.endswith("metrics.jsonl") for name in names(runs)), 240)
        for kind, values in {"sample": {"prompts": ["a red star"]}, "change": {"prompts": ["a blue ring"]}}.items():
            found, seconds = asked(kind, **values)
            assert found.state == "done", found
            assert seconds < asking.POLL_SECONDS + 30
            if kind == "sample":
                assert f"tiny/{found.files}/000.png" in names(runs)
        assert asked("stop")[0].state == "done"
        said, _ = process.communicate(timeout=120)
        assert process.returncode == errors.INTERRUPTED, said
    finally:
        process.kill()
    assert "a blue ring" in prefix(runs).read("tiny/config.yaml")[0].decode()
    assert not [name for name in names(runs) if "/actions/" in name]


def checkpoints(runs: str) -> list[str]:
    found = (name.split("/") for name in names(runs))
    return sorted(parts[2] for parts in found if parts[1] == "checkpoints" and parts[-1] == "manifest.json")


def names(runs: str) -> list[str]:
    return [one.name for one in prefix(runs).listing()]


def wait_for(true, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ranks(runs: str, count: int, tmp_path: Path, *overrides: str) -> list[str]:
    """Runs so many processes to their end, each with a cache of its own, as on nodes that share no disk."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    common |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-m", "daguerre", *tiny_runs.arguments(runs, *overrides)]  # type: ignore[arg-type]
    started = [
        subprocess.Popen(
            words,
            env=common | {"RANK": str(rank), "XDG_CACHE_HOME": str(tmp_path / f"node-{count}-{rank}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(count)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [errors.DONE] * count, "\n".join(said)
    return said


def test_ranks_on_nodes_that_share_no_disk_save_and_other_numbers_of_them_go_on(runs, tmp_path):
    """Two save; one, two and three go on from what they saved: the same samples, the same losses."""
    sizes = ["training.global_batch_size=6", "training.per_device_batch_size=1", "logging.every=1 steps"]
    begun = [*sizes, "training.duration=8 steps", "checkpoint.every=4 steps", "mesh.ici_fsdp_parallelism=-1"]
    begun += ["mesh.ici_data_parallelism=1", "mesh.dcn_fsdp_parallelism=-1", "mesh.dcn_data_parallelism=1"]
    ranks(runs, 2, tmp_path, *begun)
    two = copy_of(runs)
    assert sorted(path.name for path in (two / "checkpoints/step-00000004").glob("ema-*")) == [
        "ema-00000-of-00002.safetensors",
        "ema-00001-of-00002.safetensors",
    ]
    expected = {line["step"]: line["learning/loss"] for line in lines(two) if "learning/loss" in line}
    for count in (1, 3, 2):
        again = [*begun, "resume_from_checkpoint=step-00000004"]
        shutil.rmtree(tmp_path / f"node-{count}-0", ignore_errors=True)
        said = ranks(runs, count, tmp_path, *again)
        assert "continuing from step-00000004" in said[0]
        assert "step-00000008 is set aside" in said[0]
        found = {line["step"]: line["learning/loss"] for line in lines(copy_of(runs)) if "learning/loss" in line}
        assert found.keys() == expected.keys()
        assert all(abs(found[step] - expected[step]) < 1e-5 for step in expected), (found, expected)
