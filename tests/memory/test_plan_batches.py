"""Batches on a mesh: what gives way to the number of devices, what is refused, and that `plan`, `launch` and `train`
say the same before anything is built or written."""

from __future__ import annotations

import re
import shlex
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from quick_cases import chosen
from tiny_runs import TINY
from twins import left_to_users, tree

from daguerre import errors
from daguerre.assembly.batch_sizes import shared_out
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli import main, plan
from daguerre.cli.launch import local as launch_local
from daguerre.cli.options import plan_images
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.distributed.launch import local
from daguerre.errors import UserError
from daguerre.run import resume, storage
from daguerre.run.resume import StartPoint

DEVICES = (1, 2, 4, 8, 16, 64, 128)
LAUNCHED = (1, 8, 128)
"""Of these: the check is the same one."""
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def nodes(devices: int) -> int:
    return max(1, devices // 8)


def whole_or_none(name: str) -> str:
    """Why a recipe cannot be trained on several devices at all; "" for the others."""
    if tree(name)["training"]["duration"] == "0 steps":
        return f"daguerre generate {name}"
    return "train on one device" if tree(name)["objective"]["name"] == "contrastive" else ""


@pytest.fixture
def checked_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`plan` and `launch` without what takes their time: after the checks nothing is computed, and nothing started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "planned", lambda *_: errors.DONE)
    monkeypatch.setattr(plan.waiting, "found", lambda *_: (3, ""))
    monkeypatch.setattr(plan_images, "computed", lambda *_: errors.DONE)
    monkeypatch.setattr(local, "run", lambda command, count: errors.DONE)
    monkeypatch.setattr(launch_local.torch.cuda, "device_count", lambda: 8)
    return tmp_path


QUICK = {name: (4, 128)[number % 2] for number, name in enumerate(recipe.shipped())}
"""On how many devices `make test` plans each."""


@pytest.mark.parametrize(
    ("name", "devices"), chosen(product(recipe.shipped(), DEVICES), lambda name, devices: devices == QUICK[name])
)
def test_every_recipe_trains_on_every_size_or_is_refused_with_the_reason(name, devices, checked_only, capsys):
    """By `plan` and `launch` alike, and before anything is written."""
    why = whole_or_none(name) if devices > 1 or tree(name)["training"]["duration"] == "0 steps" else ""
    launched = ["launch", "slurm", name, f"nodes={nodes(devices)}", f"gpus_per_node={min(8, devices)}"]
    both = [["plan", name, f"devices={devices}", f"nodes={nodes(devices)}"]] + [launched] * (devices in LAUNCHED)
    for words in both:
        assert main.run([*words, *left_to_users(name)]) == (errors.REFUSED if why else errors.DONE), words
        assert why in capsys.readouterr().err
    assert bool(list(checked_only.glob("*.sbatch"))) is (devices in LAUNCHED and not why)
    if not why:
        loaded = configs.load(name, left_to_users(name))
        sizes = shared_out(loaded, loaded.config.mesh.resolved(devices, nodes(devices)))
        assert sizes.ranks * sizes.accumulation * sizes.micro == sizes.whole
        if devices == 1:
            assert sizes.notices == ()


def told(name: str, devices: int, *given: str, recorded: int | None = None):
    loaded = configs.load(name, given)
    sizes = shared_out(loaded, loaded.config.mesh.resolved(devices, nodes(devices)), recorded)
    return sizes, " ".join(sizes.notices)


@pytest.mark.parametrize(
    ("name", "devices", "whole", "micro", "said"),
    [
        ("sdxl", 1, 16, 2, ""),
        ("sdxl", 8, 16, 2, ""),
        ("sdxl", 16, 16, 1, "each device computes 1 of the 16 samples of the global batch, few for 16 "
         "devices; training.global_batch_size=32 would give each device more"),
        ("sdxl", 128, 128, 1, "the recipe's global batch of 16 samples cannot be split evenly over 128 devices: "
         "128 is used, with the same duration and learning rate; set training.global_batch_size=128"),
        ("sd15", 8, 16, 2, "micro-batches of 2 instead of the recipe's 4"),
        ("sd15", 3, 18, 3, "18 is used"),
        ("sd15_dreambooth", 8, 8, 1, "global batch of 2 samples"),
        ("quickstart", 16, 16, 1, ""),
        ("imagenet_scratch", 128, 1024, 8, "micro-batches of 8 instead of the recipe's 128"),
    ],
)  # fmt: skip
def test_what_a_recipe_says_gives_way_and_that_is_said(name, devices, whole, micro, said):
    sizes, notice = told(name, devices)
    assert (sizes.whole, sizes.micro) == (whole, micro)
    assert said in notice
    assert bool(notice) is bool(said)


@pytest.mark.parametrize(
    ("given", "devices", "said"),
    [
        (["training.global_batch_size=16"], 128, "set training.global_batch_size=128 or another multiple of 128"),
        (["global_batch_size=6"], 4, "set training.global_batch_size=8"),
        (["per_device_batch_size=2"], 16, "such as training.per_device_batch_size=1, or remove it"),
        (["gradient_accumulation_steps=8"], 2, None),
        (["gradient_accumulation_steps=8"], 16, "choose a training.gradient_accumulation_steps that divides 1, such"),
        (["global_batch_size=80", "gradient_accumulation_steps=4"], 8, "10 a device, cannot be accumulated in 4 equal"),
        (["global_batch_size=40", "gradient_accumulation_steps=2"], 8, "split into micro-batches of 2"),
    ],
)
def test_what_the_command_says_is_refused_with_what_to_say(given, devices, said):
    if said is None:
        assert told("sdxl", devices, *given)[0].micro == 1
        return
    with pytest.raises(UserError, match=re.escape(said)):
        told("sdxl", devices, *given)


def test_a_file_of_the_users_own_chooses_the_batch_and_not_the_micro_batch(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "extends: sdxl\ntraining:\n  global_batch_size: 16\n  per_device_batch_size: 4\n"
    )
    own = str(tmp_path / "own.yaml")
    assert told(own, 8)[0].micro == 2
    with pytest.raises(UserError, match="cannot be split evenly over 128 devices"):
        told(own, 128)


@pytest.mark.parametrize(("micro", "devices", "steps"), [("null", 8, 2), (4, 2, 2), (4, 1, 4), ("null", 1, 4)])
def test_a_files_own_accumulation_follows_and_that_is_said(tmp_path, micro, devices, steps):
    sizes = f"global_batch_size: 16, per_device_batch_size: {micro}, gradient_accumulation_steps: 4"
    (tmp_path / "own.yaml").write_text(f"extends: sdxl\ntraining: {{{sizes}}}\n")
    found, said = told(str(tmp_path / "own.yaml"), devices)
    assert found.accumulation == steps
    assert ("accumulated over 2 micro-batches instead of the recipe's 4" in said) is (steps == 2)
    (tmp_path / "other.yaml").write_text("extends: sdxl\nrun_name: other\n")
    assert told(str(tmp_path / "other.yaml"), 128)[0].whole == 128


def test_a_global_batch_that_is_given_takes_the_recipes_micro_batch_along():
    loaded = configs.load("sd15", ["training.global_batch_size=6"])
    assert loaded.config.training.per_device_batch_size == 3
    assert "in place of the recipe's 4, which does not divide the global batch of 6" in " ".join(loaded.notices)
    both = ["training.global_batch_size=6", "training.per_device_batch_size=4"]
    with pytest.raises(UserError, match="multiple of per_device_batch_size, which is 4: 3 would divide it"):
        configs.load("sd15", both)


def test_a_run_that_goes_on_keeps_its_batch():
    """Whatever the shipped recipe says, and on whatever number of devices."""
    sizes, notice = told("sdxl", 8, recorded=128)
    assert (sizes.whole, sizes.micro, sizes.accumulation) == (128, 2, 8)
    assert "the global batch stays at 128 samples, with which this run was started" in notice
    with pytest.raises(
        UserError, match=r"the run was started with it.*start a new run with training.global_batch_size=64"
    ):
        told("sdxl", 64, recorded=16)


def test_a_raised_batch_is_recorded_and_read_back(tmp_path, monkeypatch, capsys):
    """On 6 devices sd15 trains on 18 samples, which its micro-batch of 4 does not divide."""
    monkeypatch.chdir(tmp_path)
    loaded = configs.load("sd15", [f"output_dir={tmp_path}"])
    folder = RunFolder(tmp_path / "sd15")
    folder.path.mkdir()
    sizes, _ = told("sd15", 6)
    resume.record(loaded.config, folder, StartPoint(None, {}, None, []), sizes, {})
    recorded = configs.load(str(folder.path)).config.training
    assert (recorded.global_batch_size, recorded.per_device_batch_size) == (18, 3)

    leads = SimpleNamespace(world=SimpleNamespace(rank=0), agreement=SimpleNamespace(run_on_rank0=lambda act: act()))
    store = SimpleNamespace(recover=lambda: SimpleNamespace(path=None, notices=[]))
    assert resume.find_start(loaded, folder, store, leads).global_batch_size == 18
    typed = configs.load("sd15", [f"output_dir={tmp_path}", "training.global_batch_size=16"])
    with pytest.raises(UserError, match="the run has 18, this command has 16"):
        resume.find_start(typed, folder, store, leads)

    monkeypatch.setattr(local, "run", lambda command, count: errors.DONE)
    assert (
        main.run(["launch", "local", "sd15", f"output_dir={tmp_path}", "processes=4", "device=cpu"]) == errors.REFUSED
    )
    assert "the global batch of 18 samples cannot be split evenly over 4 devices" in capsys.readouterr().err


def commands() -> list[list[str]]:
    """`daguerre plan` and `daguerre launch`, as README and docs show them, of the recipes that are shipped."""
    found = []
    for page in PAGES:
        lines = [
            line
            for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S)
            for line in block.splitlines()
        ]
        lines += re.findall(r"^    (\S.*)$", page.read_text(), re.M)
        inline = re.findall(r"`(daguerre (?:plan|launch) [^`]+)`", page.read_text())
        for line in [*lines, *inline]:
            if re.match(r"daguerre (plan|launch) ", line):
                line = line.replace("RECIPE", "sdxl").replace("SIZE", "80GB")
                found.append(shlex.split(line, comments=True)[1:])
    return [words for words in found if len(words) > 2 and not {"VERB", "tiny.yaml", "my_dog.yaml"} & {*words}]


def test_every_plan_and_launch_command_of_the_docs_is_one_that_trains(checked_only):
    assert len(commands()) >= 10
    for words in commands():
        assert main.run(words) == errors.DONE, shlex.join(words)
        for file in checked_only.glob("*.sbatch"):
            file.unlink()


@pytest.mark.long
def test_every_plan_of_images_or_of_blocks_that_wait_of_the_docs_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    computed = [words for words in commands() if {"--generate", "training.swap_blocks=auto"} & {*words}]
    assert len(computed) > 1
    for words in computed:
        assert main.run(words) == errors.DONE, shlex.join(words)


def test_a_tiny_run_on_too_many_devices_writes_nothing(tmp_path, capsys):
    words = ["launch", "local", "quickstart", *TINY, f"output_dir={tmp_path}", "processes=3", "device=cpu"]
    assert main.run(words) == errors.REFUSED
    assert "the global batch of 2 samples cannot be split evenly over 3 devices" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_train_refuses_before_a_folder_is_made(tmp_path, monkeypatch, capsys):
    """The first process of a node says it, the second leaves with the same code."""
    told = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main.run(["train", "quickstart", *TINY, f"output_dir={tmp_path}", "device=cpu"]) == errors.REFUSED
        assert ("the global batch of 2 samples cannot be split evenly over 3" in capsys.readouterr().err) is (
            rank == "0"
        )
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_elsewhere_needs_not_the_numbers_of_its_first_start(tmp_path):
    """All three sizes were said for one device; on two the same command goes on."""
    sizes = ["global_batch_size=16", "per_device_batch_size=2", "gradient_accumulation_steps=8"]
    loaded = configs.load("sdxl", [f"output_dir={tmp_path}", *(f"training.{size}" for size in sizes)])
    home, mesh = storage.of(str(tmp_path), "sdxl"), loaded.config.mesh.resolved(2, 1)
    with pytest.raises(UserError, match="remove one of the three"):
        resume.foreseen_sizes(loaded, home, mesh)
    home.folder.path.mkdir()
    home.folder.config.write_text(configs.dump(loaded.config))
    assert resume.foreseen_sizes(loaded, home, mesh).accumulation == 4
    assert resume.foreseen_sizes(loaded, storage.of("s3://bucket/runs", "sdxl"), mesh) is None
    steps = configs.load("sdxl", [f"output_dir={tmp_path}", *(f"training.{size}" for size in (sizes[0], sizes[2]))])
    assert resume.foreseen_sizes(steps, home, loaded.config.mesh.resolved(16, 2)).accumulation == 1
