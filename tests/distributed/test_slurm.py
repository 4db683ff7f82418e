"""sbatch files: what they say, and what they do under a stand-in for srun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from daguerre.distributed.launch.environment import read
from daguerre.distributed.launch.slurm import SlurmSettings, batch_file, check_options, submit_command
from daguerre.errors import UserError

FAKE = Path(__file__).parent / "fake_slurm.py"

SEED = SlurmSettings(
    nodes=16, gpus_per_node=8, cpus_per_task=6, partition="Partition_Name", account="laion", time="96:00:00",
    chdir="/path/to/sd-training", output="/stdout/path", error="/stderr/path", cpu_bind="v", accel_bind="gn",
    python="/venv/bin/python", timeout_seconds=1800,
)  # fmt: skip


def test_the_file_of_a_large_run():
    text = batch_file(SEED, "path/to/run.yaml", ["output_dir=/runs", "run_name=a b"], "run.sbatch")
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=run", "--partition=Partition_Name", "--account=laion", "--nodes=16", "--ntasks-per-node=8",
        "--gpus-per-node=8", "--cpus-per-task=6", "--mem=0", "--time=96:00:00", "--chdir=/path/to/sd-training",
        "--output=/stdout/path", "--error=/stderr/path", "--signal=B:USR1@180", "--open-mode=append", "--exclusive",
        "--requeue",
    ]  # fmt: skip
    assert (
        "# Trains path/to/run.yaml with 128 processes: 16 nodes x 8. Read it, change it, then: sbatch run.sbatch"
        in text
    )
    assert "--cpu-bind=v --accel-bind=gn \\\n    /venv/bin/python -u -m daguerre train path/to/run.yaml" in text
    assert "'run_name=a b' \\\n    loader.num_workers=\"$SLURM_CPUS_PER_TASK\" \\\n" in text
    assert "distributed.timeout_seconds=1800 &" in text
    assert submit_command("my run.sbatch") == "sbatch 'my run.sbatch'"


@pytest.mark.parametrize(
    "own",
    [
        SlurmSettings(),
        SEED,
        SlurmSettings(gpus_per_node=0, tasks_per_node=2, requeue=False, signal="TERM@60", cpu_bind=None),
        SlurmSettings(setup="module load cuda && source '/my env/bin/activate'", chdir="/with a space"),
    ],
)
def test_bash_can_read_it(own: SlurmSettings):
    text = batch_file(own, "it's a recipe.yaml", ['sampling.prompts=[\'a "b" $c `d`\', "e"]'])
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert max(map(len, text.splitlines())) < 200


def test_workers_that_the_command_names():
    assert 'loader.num_workers="$SLURM_CPUS_PER_TASK"' in batch_file(SEED, "sdxl", [])
    assert "loader.num_workers" not in batch_file(SEED, "sdxl", ["workers=2"], own_workers=False)


def test_a_job_that_evaluates_a_run():
    own = SlurmSettings(verb="evaluate", gpus_per_node=1)
    text = batch_file(own, "/runs/first", ["follow=all", "metrics=[fid]"])
    assert "# Evaluates /runs/first with 1 process" in text
    assert "-m daguerre evaluate /runs/first" in text
    assert "'metrics=[fid]'" in text
    assert "num_workers" not in text
    with pytest.raises(ValueError, match="do not wait for one another"):
        SlurmSettings(verb="evaluate", timeout_seconds=5)


def test_a_signal_that_the_tasks_get_from_slurm_itself():
    text = batch_file(SlurmSettings(signal="TERM@60", requeue=False), "sdxl", [])
    assert "#SBATCH --signal=TERM@60\n" in text


class Job:
    """The file at work under the stand-in."""

    def __init__(
        self, folder: Path, own: SlurmSettings, python: str = f"#!{sys.executable}\n{FAKE.read_text()}"
    ) -> None:
        self.folder = folder
        fake = f"#!{sys.executable}\n{FAKE.read_text()}"
        for name, text in {"srun": fake, "scontrol": fake, "scancel": fake, "python of tasks": python}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "work").mkdir()
        tasks = {"python": str(folder / "python of tasks")}
        script = folder / "run.sbatch"
        script.write_text(batch_file(own.model_copy(update=tasks), "sdxl", ["run_name=it's $HOME"]))
        environ = {
            "PATH": f"{folder}:{os.environ['PATH']}", "FAKE_FOLDER": str(folder / "work"), "SLURM_JOB_ID": "4711",
            "SLURM_NNODES": str(own.nodes), "SLURM_NTASKS_PER_NODE": str(own.tasks), "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NTASKS": str(own.nodes * own.tasks), "SLURM_CPUS_PER_TASK": str(own.cpus_per_task),
        }  # fmt: skip
        self.process = subprocess.Popen(["bash", str(script)], env=environ)
        self.wait_for("task-*.json" if python == fake else "pid-*", own.nodes * own.tasks)

    def wait_for(self, pattern: str, count: int) -> None:
        deadline = time.monotonic() + 120
        while len(list((self.folder / "work").glob(pattern))) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def tasks(self) -> list[dict]:
        found = [json.loads(path.read_text()) for path in (self.folder / "work").glob("task-*.json")]
        return sorted(found, key=lambda task: int(task["environ"]["SLURM_PROCID"]))

    def requeued(self) -> str:
        path = self.folder / "work" / "scontrol"
        return path.read_text() if path.exists() else ""


def test_time_is_up(tmp_path: Path):
    """Every task hears of it, all exit 138, and the job queues again."""
    own = SlurmSettings(nodes=2, gpus_per_node=2, cpus_per_task=3)
    job = Job(tmp_path, own)
    tasks = job.tasks()
    worlds = [read(task["environ"]) for task in tasks]
    assert [(w.rank, w.local_rank, w.node_rank) for w in worlds] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert {(w.size, w.nodes, w.address, w.port, w.launcher) for w in worlds} == {
        (4, 2, "127.0.0.1", 12000 + 4711, "slurm")
    }
    assert tasks[3]["environ"]["OMP_NUM_THREADS"] == "1"
    words = ["-u", "-m", "daguerre", "train", "sdxl", "run_name=it's $HOME", "loader.num_workers=3"]
    assert tasks[0]["words"] == words
    said = (tmp_path / "work" / "srun").read_text()
    assert said == "--kill-on-bad-exit=0 --wait=60 --cpus-per-task=3 --cpu-bind=verbose"
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(20) == 138
    assert job.requeued() == "requeue 4711"


def test_a_job_that_is_cancelled_or_fails_does_not_queue_again(tmp_path: Path):
    """Of a shell that is told to end, the tasks hear by SLURM: srun would kill them."""
    for number, (name, code) in enumerate({"cancelled": 143, "failed": 4}.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = Job(folder, SlurmSettings(gpus_per_node=0, tasks_per_node=1))
        if name == "cancelled":
            job.process.send_signal(signal.SIGTERM)
        else:
            (folder / "work" / "finish").write_text(str(code))
        assert (job.process.wait(20), job.requeued()) == (code, "")
        assert job.tasks()[0]["environ"]["OMP_NUM_THREADS"] == "6"


def test_a_job_that_may_not_queue_again(tmp_path: Path):
    job = Job(tmp_path, SlurmSettings(gpus_per_node=0, requeue=False))
    job.process.send_signal(signal.SIGUSR1)
    assert (job.process.wait(20), job.requeued()) == (138, "")


@pytest.mark.long
def test_a_group_under_srun(tmp_path: Path):
    """Real processes find one another by SLURM's variables, save together when time is up, and the job queues again."""
    group = Path(__file__).parent / "group.py"
    python = f'#!/bin/sh\nexec "{sys.executable}" "{group}" "$FAKE_FOLDER"\n'
    job = Job(tmp_path, SlurmSettings(nodes=2, gpus_per_node=0, tasks_per_node=2, cpus_per_task=1), python)
    job.process.send_signal(signal.SIGUSR1)
    assert (job.process.wait(60), job.requeued()) == (138, "requeue 4711")
    saved = [json.loads(path.read_text()) for path in (tmp_path / "work").glob("saved-*.json")]
    assert len(saved) == 4
    assert len({(one["step"], one["signal"]) for one in saved}) == 1


@pytest.mark.parametrize("time", ["30", "30:00", "96:00:00", "4-0", "4-00:30", "1-02:03:04"])
def test_times(time: str):
    assert SlurmSettings(time=time).time == time


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"time": "4 days"}, "such as 96:00:00"),
        ({"time": "1:99"}, "such as 96:00:00"),
        ({"signal": "USR2@60"}, "USR1@180"),
        ({"signal": "USR1@99999"}, "at most 65535"),
        ({"signal": "TERM@60"}, "would be queued again"),
        ({"partition": "a b"}, "letters, digits"),
        ({"job_name": "x\n#SBATCH --evil"}, "letters, digits"),
        ({"output": "a\nb"}, "must be a single line"),
        ({"accel_bind": "gq"}, "pattern"),
        ({"gpus_per_node": 8, "tasks_per_node": 4}, "each process drives one GPU"),
        ({"gpus_per_node": 0, "accel_bind": "g"}, "no GPUs to bind to"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"node": 2}, "Extra inputs"),
    ],
)
def test_options_that_cannot_be(given: dict, said: str):
    with pytest.raises(ValueError, match=said):
        SlurmSettings(**given)


def test_misspelt_options():
    known = ["output_dir", "training.learning_rate"]
    check_options(["nodes", "output_dir", "learning_rate", "model.unet.extra"], known)
    with pytest.raises(UserError, match=r"partiton: no such option: did you mean partition\?"):
        check_options(["partiton"], known)
    with pytest.raises(UserError, match="zzz: no such option: there are nodes, gpus_per_node"):
        check_options(["zzz"], known)
