"""What `daguerre plan` forecasts of memory of the host, disk and hours, against closed forms and against a run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_runs import TINY
from twins import Twins

from daguerre import errors
from daguerre.cli import main, plan
from daguerre.cli.options.plan_options import Options
from daguerre.memory import estimate, static
from daguerre.memory.peak import Peak

WIDER = ["model.unet.block_out_channels=[192,256,384]", "training.duration=4 steps", "lr_scheduler.warmup=1 steps"]
MEASURED = (
    "import resource, sys\n"
    "from daguerre.cli import main\n"
    "code = main.run(sys.argv[1:])\n"
    "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    "sys.exit(code)"
)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins(tmp_path_factory.mktemp("twins"))


def planned(recipe, given, **options):
    target = plan.prepared(recipe, given, Options(**options))[1]
    parts = target.parts()
    count = static.count(target.config, parts, target.mesh)
    return estimate.step(target, parts, count), count


def test_a_tiny_run_by_closed_forms():
    given = [*TINY, "training.device=cpu", "training.duration=1k steps", "checkpoint.every=100 steps"]
    step, count = planned("quickstart", [*given, "checkpoint.keep=4", "checkpoint.backup_every=500 steps"])
    host, state = step.host, sum(map(count.bytes_of, ("weights", "moments", "averages")))
    assert host.training["the copy of a save"] == state
    assert host.disk["7 checkpoints"] == 7 * state, "four, one that is being written, two for good"
    assert host.hours == pytest.approx(1000 * host.seconds / 3600)
    assert host.training["tensors"] == step.peak.whole
    work = step.peak.pass_work * step.target.sizes.accumulation + step.peak.update_work
    assert host.seconds == work.seconds(host.rates) > 0
    assert step.fits
    assert host.fits(host.memory)
    assert not host.fits(host.memory - 1)


def test_on_a_gpu_tensors_are_not_in_the_host():
    given = [*TINY, "training.global_batch_size=4", "training.duration=2 epochs up to 64 samples"]
    step, count = planned("quickstart", given, card="8GB", devices=2)
    numbers = {name: sum(each.all_numbers for each in held) for name, held in count.components()}
    assert step.host.training["tensors"] == 0
    made = sum(numbers.values()) - numbers["text_encoder"]
    assert step.host.reading["networks in float32"] == 2 * 4 * made, "made of numbers, and the autoencoder"
    assert step.host.reading["networks in their types"] == 0, "the text encoder goes straight to the GPU"
    saved = sum(each.saved_bytes for each in count.trained)
    assert step.host.training["the copy of a save"] == saved, "both hold it all, each copies what it writes: a half"
    assert step.host.updates == -(-64 // step.target.sizes.whole)
    assert "RTX 4060" in str(step.host.rates)
    assert step.host.lines(None)[0].startswith("memory of the host, 2 ranks "), "each has networks of its own"


@pytest.fixture
def uncomputed(monkeypatch):
    """Steps that take nothing, at once."""
    nothing = Peak(1, held=0, passes=0, update=0, gathered=0)
    steps = SimpleNamespace(peak=lambda micro: replace(nothing, micro=micro))
    monkeypatch.setattr(estimate, "simulated_step", lambda *given: steps)


@pytest.mark.usefixtures("uncomputed")  # what a GPU computes takes nothing of the host's memory
def test_a_frozen_base_is_in_the_host_as_far_as_it_waits_there_or_makes_room(twins):
    given = [*twins.overrides("z_image_lora"), "run_name=x", "cache.path=auto"]
    step, count = planned("z_image_lora", given, card="24GB")
    host, base = step.host, count.bytes_of("weights") - sum(4 * each.numbers for each in count.trained)
    assert host.reading["networks in their types"] == 0
    assert host.drawing["the denoiser, which makes room"] == base
    assert sum(host.drawing.values()) == sum(host.training.values()) + base
    swapped, less = planned("z_image_lora", [*given, "training.swap_blocks=3"], card="24GB")
    assert swapped.host.reading["networks in their types"] == less.on_host > 0
    assert swapped.host.drawing["the denoiser, which makes room"] == base - less.on_host
    dora = planned("z_image_lora", [*given, "adapter.kind=dora"], card="24GB")[0]
    assert dora.host.reading["networks in float32"] >= 2 * base, "lengths of rows are those of float32"
    assert not planned("z_image_lora", [*given, "sampling.num_images=0"], card="24GB")[0].host.drawing


@pytest.mark.usefixtures("uncomputed")  # the programs alone take more
def test_a_page_says_what_has_no_room_in_the_host(capsys):
    given = ["training.device=cpu", "checkpoint.background=false", "loader.num_workers=0", "card=1GB", "ram=10MB"]
    assert main.run(["plan", "quickstart", *TINY, *given, "ema.enabled=false"]) == errors.REFUSED
    said = " ".join(capsys.readouterr().out.split())
    assert "host 10.00 MB DOES NOT FIT" in said
    assert "no combination of settings that was tried fits" in said


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["training.gradient_checkpointing=true", "training.global_batch_size=32"]])
def test_a_run_takes_what_was_forecast(tmp_path: Path, more):
    """Within 10 % of the peak of a process that trains, saves and exports."""
    given = [*WIDER, *more, "sampling.num_images=0", f"output_dir={tmp_path}", "run_name=x", "training.device=cpu"]
    given.append("checkpoint.every=2 steps")
    host = planned("quickstart", given)[0].host
    command = [sys.executable, "-c", MEASURED, "train", "quickstart", *given]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = int(run.stdout.rpartition("peak ")[2])
    assert host.memory == pytest.approx(peak, rel=0.1)
    sizes = {folder.name: _size(folder) for folder in (tmp_path / "x").iterdir()}
    state = host.training["the copy of a save"]
    assert sizes["checkpoints"] == pytest.approx(2 * state, rel=0.1)
    assert sizes["pipeline"] == pytest.approx(host.disk["export"], rel=0.1)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
