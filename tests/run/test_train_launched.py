"""`daguerre train` by launchers: signals, processes that die or stand still, and jobs that queue again."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import tiny_runs
from launched import Launched, Queue, runs
from tiny_runs import assert_equal, outcome

from daguerre import errors
from daguerre.checkpoint import actions
from daguerre.cli import main
from daguerre.remote import actions as asking

LONGER = (
    "training.per_device_batch_size=1",
    "training.duration=20 steps",
    "checkpoint.every=10 steps",
    "validation.every=10 steps",
    "logging.every=2 steps",
)


def status(folder: Path) -> dict:
    return json.loads((folder / "tiny" / "status.json").read_text())


def uninterrupted(folder: Path, size: int, *overrides: str) -> dict:
    """What a run of so many processes comes to."""
    with Launched(folder, size, *LONGER, *overrides) as run:
        assert run.codes(300) == [errors.DONE] * size, run.log()
    return outcome(folder / "tiny")


def forget_the_stop(folder: Path, expected: dict) -> None:
    """Removes the images that a stop adds."""
    known = {Path(name).parts[1] for name in expected["files"] if name.startswith("samples/")}
    for drawn in (folder / "tiny" / "samples").iterdir():
        if drawn.name not in known:
            shutil.rmtree(drawn)


@pytest.mark.long
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_job_whose_time_is_up_goes_on_by_itself(tmp_path: Path, tasks: int):
    """From `daguerre launch slurm` to the end of the run, over two turns that are cut short."""
    words = tiny_runs.arguments(tmp_path / "runs", *LONGER)[1:]
    job = Queue(tmp_path, tmp_path / "run.sbatch", 1, tasks)
    own = ["gpus_per_node=0", f"tasks_per_node={tasks}", "cpus_per_task=1", f"out={job.script}", f"python={job.python}"]
    assert main.run(["launch", "slurm", *words, "num_workers=0", *own]) == 0
    steps, updates = [], job.work / "training-0"
    for _ in range(2):
        seen = updates.stat().st_size if updates.exists() else 0
        process = job.turn()
        while not updates.exists() or updates.stat().st_size < seen + 4:
            time.sleep(0.02)
            assert process.poll() is None, job.log()
        process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == errors.PREEMPTED, job.log()
        assert job.asked_again()
        said = status(tmp_path / "runs")
        assert (said["state"], said["reason"]) == ("saved", "stopped by SIGUSR1")
        steps.append(said["step"])
    assert 0 < steps[0] < steps[1] < 20
    assert job.turn().wait(300) == 0, job.log()
    assert f"continuing from step-{steps[1]:08d}" in job.log()
    assert not job.asked_again()
    assert status(tmp_path / "runs")["state"] == "finished"
    expected = uninterrupted(tmp_path / "whole", tasks)
    forget_the_stop(tmp_path / "runs", expected)
    assert_equal(tmp_path / "runs" / "tiny", expected)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What an uninterrupted run of two processes comes to."""
    return uninterrupted(tmp_path_factory.mktemp("whole"), 2)


def goes_on(folder: Path, expected: dict) -> None:
    """The same command ends equal to the bit with a run that nothing interrupted."""
    with Launched(folder, 2, *LONGER) as run:
        assert run.codes(300) == [errors.DONE] * 2, run.log()
    assert status(folder)["state"] == "finished"
    forget_the_stop(folder, expected)
    assert_equal(folder / "tiny", expected)


@pytest.mark.long
def test_a_signal_to_one_rank_saves_all_of_them(tmp_path: Path):
    """The fast one: the time of a job is up."""
    with Launched(tmp_path, 2, *LONGER, "sampling.num_images=0", "checkpoint.export=false") as run:
        run.reached("training", 3)
        run.send(signal.SIGUSR1, to=[1])
        assert run.codes(60) == [errors.PREEMPTED] * 2, run.log()
        assert "Traceback" not in run.log()
    said = status(tmp_path)
    assert (said["state"], said["reason"]) == ("saved", "stopped by SIGUSR1")
    assert (tmp_path / "tiny" / "checkpoints" / f"step-{said['step']:08d}" / "manifest.json").exists()
    assert 3 <= said["step"] <= 6


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "number", "to"),
    [
        ("training", signal.SIGTERM, (0, 1)),
        ("training", signal.SIGINT, (0,)),
        ("validating", signal.SIGUSR1, (0, 1)),
        ("saving", signal.SIGTERM, (1,)),
        ("saving", signal.SIGINT, (0, 1)),
        ("drawing", signal.SIGUSR1, (0,)),
        ("drawing", signal.SIGTERM, (1,)),
    ],
)
def test_signals_in_any_phase(tmp_path: Path, expected: dict, phase: str, number: signal.Signals, to: tuple[int, ...]):
    with Launched(tmp_path, 2, *LONGER, LINGER=phase) as run:
        run.reached(phase, 4 if phase == "training" else 1, by=[0] if phase == "drawing" else None)
        run.send(number, to)
        assert run.codes(90) == [128 + number] * 2, run.log()
        assert run.alive() == []
        assert "Traceback" not in run.log()
    said = status(tmp_path)
    assert (said["state"], said["reason"]) == ("saved", f"stopped by {number.name}")
    assert said["step"] <= (7 if phase == "training" else 11)
    goes_on(tmp_path, expected)


@pytest.mark.long
def test_all_ranks_do_what_is_asked_of_the_first(tmp_path: Path, expected: dict):
    """Each action rides on the question of all ranks, in the midst of updates and in a pause; weights stay equal."""
    run = str(tmp_path / "tiny")

    def asked(kind: actions.Kind, **values: object) -> actions.Answer:
        found = asking.wait(run, asking.ask(run, kind, values), 120)
        assert found.state == "done", found
        return found

    with Launched(tmp_path, 2, *LONGER, LINGER="training") as group:
        group.reached("training", 2)
        image = asked("sample", prompts=["a red star"], num_inference_steps=1)
        assert (tmp_path / "tiny" / image.files / "000.png").exists()
        paused = asked("pause")
        saved = asked("save")
        assert saved.step == paused.step, "no rank went on"
        assert (tmp_path / "tiny" / saved.files / "manifest.json").exists()
        asked("change", prompts=["a pink square"])
        asked("continue")
        assert group.codes(300) == [errors.DONE] * 2, group.log()
    found = outcome(tmp_path / "tiny")["files"]
    names = [name for name in expected["files"] if name.endswith(".safetensors")]
    assert names
    assert all(found[name] == expected["files"][name] for name in names)
    assert "a pink square" in found["samples/step-00000020/samples.json"].decode()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_to_torchruns_agent(tmp_path: Path, expected: dict, number: signal.Signals):
    """It hands them on, and exits 1 whatever its workers say."""
    options = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    with Launched(tmp_path, 2, *LONGER, torchrun=options) as run:
        run.reached("training", 3)
        run.send(number)
        assert run.codes(60) == [1], run.log()
        assert run.alive() == []
    assert (status(tmp_path)["state"], status(tmp_path)["reason"]) == ("saved", f"stopped by {number.name}")
    goes_on(tmp_path, expected)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_torchruns_agent_dies(tmp_path: Path, expected: dict, number: signal.Signals):
    """Killed, or by a signal that it was not told to handle: its workers save and go."""
    with Launched(tmp_path, 2, *LONGER, torchrun=[]) as run:
        run.reached("training", 3)
        run.send(number)
        assert run.codes(10) == [-number], run.log()
        deadline = time.monotonic() + 30
        while run.alive():
            assert time.monotonic() < deadline, run.log()
            time.sleep(0.05)
    assert (status(tmp_path)["state"], status(tmp_path)["reason"]) == ("saved", "stopped by SIGTERM")
    goes_on(tmp_path, expected)


@pytest.mark.long
def test_torchrun_starts_workers_again(tmp_path: Path, expected: dict):
    """After one was killed they go on from the newest checkpoint, under the same agent."""
    with Launched(tmp_path, 2, *LONGER, torchrun=["--max-restarts=1"]) as run:
        run.reached("training", 12)
        run.send(signal.SIGKILL, to=[1])
        assert run.codes(300) == [errors.DONE], run.log()
    assert "continuing from step-00000010" in run.log()
    assert_equal(tmp_path / "tiny", expected)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["pid-1", "tiny", "tiny/stacks", "tiny/config.yaml"])
def test_a_signal_before_anything_was_trained(tmp_path: Path, expected: dict, moment: str):
    """While modules are imported, ranks meet or networks are built: nobody stays, and nothing is harmed."""
    with Launched(tmp_path, 2, *LONGER, torchrun=[]) as run:
        tiny_runs.wait_for(tmp_path / moment)
        run.send(signal.SIGTERM)
        assert run.codes(60) == [1], run.log()
        assert run.alive() == []
    if (tmp_path / "tiny" / "status.json").exists():
        assert (status(tmp_path)["state"], status(tmp_path)["reason"]) == ("saved", "stopped by SIGTERM")
        assert status(tmp_path)["step"] <= 3
    goes_on(tmp_path, expected)


@pytest.mark.long
@pytest.mark.parametrize(("victim", "phase"), [(0, "training"), (1, "training"), (1, "saving"), (1, "drawing")])
def test_a_rank_that_is_killed(tmp_path: Path, expected: dict, victim: int, phase: str):
    """All are gone in ten seconds, and the root cause is the first word of the log."""
    with Launched(tmp_path, 2, *LONGER, "loader.num_workers=1", LINGER="" if phase == "training" else phase) as run:
        run.reached(phase, 4 if phase == "training" else 1, by=[0] if phase == "drawing" else None)
        workers = run.workers()
        assert len(workers) == 2
        pid, began = run.pid(victim), time.monotonic()
        run.send(signal.SIGKILL, to=[victim])
        codes = run.codes(10)
        print(f"rank {victim} killed while {phase}: all gone after {time.monotonic() - began:.1f} s")
        assert codes == [-9 if rank == victim else errors.LOST for rank in range(2)], run.log()
        while any(runs(worker) for worker in workers):
            assert time.monotonic() < began + 12, "workers of the loader stayed"
            time.sleep(0.05)
    said = (tmp_path / f"log-{1 - victim}").read_text()
    first = next(line for line in said.splitlines() if line.startswith("daguerre:"))
    assert f"rank {victim} (" in first
    assert f"process {pid}) is gone" in first
    assert "Traceback" not in said
    assert status(tmp_path)["state"] == "failed"
    assert f"rank {victim} (" in status(tmp_path)["reason"]
    goes_on(tmp_path, expected)


QUICK = ("distributed.stuck_seconds=4", "distributed.silent_seconds=3")


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped(tmp_path: Path, expected: dict, victim: int):
    with Launched(tmp_path, 2, *LONGER, *QUICK) as run:
        run.reached("training", 4)
        run.send(signal.SIGSTOP, to=[victim])
        codes = run.codes(30)
        assert codes[1 - victim] == errors.LOST, run.log()
        assert run.alive() == []
    assert f"rank {victim} stopped by a signal (SIGSTOP)" in (tmp_path / f"log-{1 - victim}").read_text()
    assert stacks(tmp_path) == ["rank-00000.txt", "rank-00001.txt"]
    goes_on(tmp_path, expected)


@pytest.mark.long
def test_a_rank_that_hangs(tmp_path: Path, expected: dict):
    """The other waits for it in a sum; both say where they stand."""
    with Launched(tmp_path, 2, *LONGER, *QUICK, HANG="training 1 5") as run:
        assert run.codes(120) == [errors.STUCK] * 2, run.log()
    said = (tmp_path / "log-0").read_text()
    assert "s (stuck_seconds): rank 1 (" in said
    assert stacks(tmp_path) == ["rank-00000.txt", "rank-00001.txt"]
    assert "in marked" in (tmp_path / "tiny" / "stacks" / "rank-00001.txt").read_text()
    assert (status(tmp_path)["state"], status(tmp_path)["reason"][:5]) == ("failed", "stuck")
    goes_on(tmp_path, expected)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails(tmp_path: Path, expected: dict, victim: int):
    with Launched(tmp_path, 2, *LONGER, FAIL=f"training {victim} 5") as run:
        codes = run.codes(60)
        assert codes == [1 if rank == victim else errors.LOST for rank in range(2)], run.log()
    assert "ZeroDivisionError: of its own" in (tmp_path / f"log-{victim}").read_text()
    other = (tmp_path / f"log-{1 - victim}").read_text()
    assert f"rank {victim} (" in next(line for line in other.splitlines() if line.startswith("daguerre:"))
    assert "ZeroDivisionError: of its own" in status(tmp_path)["reason"]
    goes_on(tmp_path, expected)


def stacks(folder: Path) -> list[str]:
    """The files in which threads wrote where they stand."""
    return sorted(path.name for path in (folder / "tiny" / "stacks").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("to", [(0,), (0, 1)])
def test_a_signal_while_the_end_is_evaluated(tmp_path: Path, expected: dict, to: tuple[int, ...]):
    """All is saved: the others wait for the one that draws, and it stops at the next image."""
    with Launched(tmp_path, 2, *LONGER, LINGER="evaluating") as run:
        run.reached("evaluating", by=[0])
        run.send(signal.SIGUSR1, to)
        assert run.codes(60) == [errors.PREEMPTED] * 2, run.log()
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("saved", 20)
    assert not (tmp_path / "tiny" / "evaluation.json").exists()
    goes_on(tmp_path, expected)
