"""`daguerre launch slurm`: what the file says, what is refused before it is written, and handing it in."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_runs

from daguerre import credentials
from daguerre.cli import main
from daguerre.cli.launch import local as launch_local
from daguerre.cli.launch.slurm import Options
from daguerre.distributed.launch import local
from daguerre.distributed.settings import DistributedSettings, MeshSettings
from daguerre.settings import Settings

FAKE = Path(__file__).parents[1] / "distributed" / "fake_slurm.py"


def launch(*words: str) -> int:
    return main.run(["launch", "slurm", *words])


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words_of(file: Path) -> list[str]:
    """The command behind srun, as a shell reads it."""
    text = file.read_text()
    command = text[text.index("\nsrun") : text.index(" &\nrun=")]
    return shlex.split(command.replace("\\\n", " "))


def test_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = ["run_name=it's $HOME `x`", 'prompts=["a \\"b\\"", "c"]', "--learning-rate=1e-5"]
    assert launch("sdxl", "nodes=2", "--cpus-per-task", "3", "time=4-00", "chdir=/with a space", *given) == 0
    assert "it-s-HOME-x.sbatch: check and edit it, then submit it: sbatch it-s-HOME-x.sbatch" in (
        capsys.readouterr().out
    )
    text = (tmp_path / "it-s-HOME-x.sbatch").read_text()
    assert "#SBATCH --job-name=it-s-HOME-x\n" in text
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=2", "#SBATCH --cpus-per-task=3", '#SBATCH --chdir="/with a space"'} <= set(options)
    subprocess.run(["bash", "-n", "it-s-HOME-x.sbatch"], check=True)
    words = words_of(tmp_path / "it-s-HOME-x.sbatch")
    assert words[words.index("train") + 1 :] == [
        "sdxl", given[0], given[1], "learning-rate=1e-5", "loader.num_workers=$SLURM_CPUS_PER_TASK"
    ]  # fmt: skip


def test_the_same_file_may_be_written_again_but_no_edited_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert launch("sdxl", "out=run.sbatch") == launch("sdxl", "out=run.sbatch") == 0
    (tmp_path / "run.sbatch").write_text("edited")
    assert launch("sdxl", "out=run.sbatch") == 2
    assert "run.sbatch exists with other content" in capsys.readouterr().err
    assert (tmp_path / "run.sbatch").read_text() == "edited"


def test_a_recipe_that_is_a_file_is_named_by_its_whole_path(tmp_path: Path):
    (tmp_path / "my own.yaml").write_text("extends: sdxl\nrun_name: mine\n")
    assert launch("my own.yaml", "num_workers=2") == 0
    words = words_of(tmp_path / "mine.sbatch")
    assert words[words.index("train") + 1 :] == [str(tmp_path / "my own.yaml"), "num_workers=2"]


def test_workers_and_time_outs_go_to_the_run(tmp_path: Path):
    assert launch("sdxl", "system.workers=2", "timeout_seconds=1800", "stuck_seconds=60") == 0
    words = words_of(tmp_path / "sdxl.sbatch")
    assert words[-3:] == ["system.workers=2", "distributed.timeout_seconds=1800", "distributed.stuck_seconds=60"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["partiton=x"], "partiton: no such option: did you mean partition?"),
        (["nodes=0"], "nodes"),
        (["learning_rate=fast"], "optimizer.learning_rate"),
        (["snr_gama=5"], "snr_gama: no such option"),
        (["nodes=2", "mesh.dcn_data_parallelism=4"], "4"),
        (["timeout_seconds=100"], "must be above stuck_seconds=300"),
        (["training.device=cpu"], "set gpus_per_node=0"),
        (["gpus_per_node=0", "training.device=cuda"], "give gpus_per_node"),
        (["resume_from_checkpoint=never"], "requeue=false"),
        (["resume_from_checkpoint=step-00000100"], "instead of continuing"),
        (["requeue=false", "signal=USR2@60"], "USR1@180"),
        (["training.global_batch_size=16", "nodes=16"], "set training.global_batch_size=128"),
        (["training.duration=0 steps", "lr_scheduler.warmup=0 steps"], "nothing to train"),
        (["out=nowhere/run.sbatch"], "there is no folder nowhere"),
        (["nodes=2", "nodes=4"], "nodes is given twice"),
    ],
)
def test_what_would_only_fail_in_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], given, said):
    assert launch("sdxl", *given) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.sbatch"))


def test_a_pair_of_nodes_may_save_on_term_where_nothing_queues_again(tmp_path: Path):
    assert launch("sdxl", "requeue=false", "signal=TERM@60", "resume_from_checkpoint=never") == 0
    assert "scontrol requeue" not in (tmp_path / "sdxl.sbatch").read_text()


def test_handing_in(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch("sdxl", "--submit") == 2
    assert "there is no sbatch on this machine. sdxl.sbatch was written" in capfd.readouterr().err
    (tmp_path / "sbatch").write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    assert launch("sdxl", "--submit") == 0
    assert "Submitted batch job 4711" in capfd.readouterr().out
    assert os.listdir(tmp_path).count("sdxl.sbatch") == 1


def test_the_help_names_every_option():
    text = main.verbs("launch")["slurm"].help
    assert [name for name in Options.model_fields if name not in text] == []


def test_launch_local_starts_train_with_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    started: list[tuple[list[str], int]] = []
    monkeypatch.setattr(local, "run", lambda command, count: started.append((command, count)) or 143)
    given = ["run_name=a b", "training.device=cpu"]
    assert main.run(["launch", "local", "sdxl", "processes=2", *given]) == 143, "the code of the run passes through"
    assert started == [([sys.executable, "-m", "daguerre", "train", "sdxl", *given], 2)]
    monkeypatch.setattr(launch_local.torch.cuda, "device_count", lambda: 0)
    assert main.run(["launch", "local", "sdxl"]) == 2
    assert "torch sees no GPU on this machine: set the number of processes" in capsys.readouterr().err
    monkeypatch.setattr(launch_local.torch.cuda, "device_count", lambda: 4)
    assert main.run(["launch", "local", "sdxl", "processes=8"]) == 2
    assert "processes=8, but there are 4 GPUs" in capsys.readouterr().err
    assert main.run(["launch", "local", "sdxl"]) == 143
    assert started[1][1] == 4
    assert main.run(["launch", "local", "sdxl", "training.global_batch_size=3"]) == 2
    assert main.run(["launch", "local", "sdxl_lightning"]) == 2
    assert len(started) == 2
    assert not list(tmp_path.iterdir())


def test_launch_local_hands_secrets_on_in_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    address = "https://me:hidden-word@host/{000..009}.tar?sig=hidden-number"
    monkeypatch.setenv(credentials.VARIABLE, "")
    started: list[tuple[list[str], str]] = []
    monkeypatch.setattr(
        local, "run", lambda words, count: started.append((words, os.environ[credentials.VARIABLE])) or 0
    )
    given = ["run_name=mine", "training.device=cpu", "data.source=webdataset", f"data.path={address}"]
    assert main.run(["launch", "local", "sdxl", "processes=2", *given]) == 0
    ((words, handed_on),) = started
    assert "hidden" not in " ".join(words)
    assert "data.path=https://***@host/{000..009}.tar?***" in words
    assert address in handed_on.split()


@pytest.mark.long
def test_launch_local_trains_saves_at_a_signal_and_goes_on(tmp_path: Path):
    """Two processes of a tiny run; the exit code is that of the run."""
    words = [
        *tiny_runs.arguments(
            tmp_path, "training.duration=60 steps", "training.per_device_batch_size=1", "lr_scheduler.name=constant"
        )[1:]
    ]
    words = [sys.executable, "-m", "daguerre", "launch", "local", *words, "processes=2", "training.device=cpu"]
    with subprocess.Popen(words) as run:
        try:
            tiny_runs.wait_for(tmp_path / "tiny" / "checkpoints" / "step-00000003" / "manifest.json")
        finally:
            run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 143
    status = json.loads((tmp_path / "tiny" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("saved", "stopped by SIGTERM")
    again = subprocess.run([*words, f"training.duration={status['step'] + 1} steps"], check=False)
    assert again.returncode == 0
    assert json.loads((tmp_path / "tiny" / "status.json").read_text())["state"] == "finished"


def test_launch_alone(capsys: pytest.CaptureFixture[str]):
    assert main.run(["launch"]) == 0
    assert main.run(["launch", "kubernetes"]) == 2
    assert "there is no verb `launch kubernetes`; there are: local, slurm" in capsys.readouterr().err


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "launching.md", ROOT / "docs" / "coming-from.md"]


def test_what_the_documentation_shows(tmp_path: Path):
    """Its commands write files, the file is the one that is shown, and every option is in the table."""
    shown = [line.strip() for page in PAGES for line in page.read_text().splitlines() if "   daguerre launch" in line]
    assert len(shown) >= 3
    for number, line in enumerate(shown):
        verb, *words = ["sdxl" if word == "RECIPE" else word for word in shlex.split(line, comments=True)[2:]]
        if verb == "slurm":
            assert launch(*words, f"out={number}.sbatch") == 0
    page = PAGES[1].read_text()
    assert launch("sdxl", "nodes=16", "time=96:00:00", "output_dir=/shared/runs", "run_name=first") == 0
    text = (tmp_path / "first.sbatch").read_text().replace(shlex.quote(sys.executable), "/venv/bin/python")
    block = page[page.index("    #!/bin/bash") : page.index("\n\n| option |")]
    for part in block.split("    ...\n"):
        assert "\n".join(line.removeprefix("    ") for line in part.splitlines()) in text
    table = page[page.index("| option |") : page.index("**Time is up.**")]
    assert [name for name in Options.model_fields if f"`{name}`" not in table] == []


@pytest.mark.parametrize(("page", "settings"), [("config.md", MeshSettings), ("launching.md", DistributedSettings)])
def test_every_setting_of_several_devices_is_documented(page: str, settings: type[Settings]):
    text = (ROOT / "docs" / page).read_text()
    assert [name for name in settings.model_fields if f"`{name}`" not in text] == []
