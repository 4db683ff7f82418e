"""A run without enough memory: an error in words, the checkpoint kept, and the micro-batch that fits."""

import json
import re

import pytest
import torch
from tiny_runs import train

from daguerre import errors
from daguerre.assembly.parts import Components
from daguerre.generation import generate
from daguerre.memory import advice as memory_advice
from daguerre.models.family import Family
from daguerre.run import preflight
from daguerre.samplers.settings import SamplingSettings
from daguerre.training.optimizers.optimizer import Optimizer

pytestmark = pytest.mark.usefixtures("few_objects")
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 GiB.\nSee documentation for Memory Management"


def no_room(patch, limit, after=0):
    """Room for `limit` samples of a micro-batch in all passes but the first `after`."""
    loss, calls = Components.loss, []

    def limited(self, net, batch):
        calls.append(1)
        if len(batch.names) > limit and len(calls) > after and torch.is_grad_enabled():
            raise torch.OutOfMemoryError(MESSAGE)
        return loss(self, net, batch)

    patch.setattr(Components, "loss", limited)


def status(run):
    return json.loads((run / "status.json").read_text())


BATCH = [
    "training.duration=4 steps",
    "training.global_batch_size=4",
    "training.per_device_batch_size=4",
    "sampling.num_images=0",
]
QUIET = ["validation.every=100 steps", "checkpoint.export=false"]


def test_in_an_update_the_largest_micro_batch_is_named_and_goes_on_from_the_checkpoint(tmp_path, capsys):
    given, run = [*BATCH, *QUIET, "data.checked_prompts=1"], tmp_path / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        no_room(patch, 3, after=preflight._PASSES + 3)  # these passes are measured first
        assert train(tmp_path, *given) == errors.FAILED
    said = capsys.readouterr().err
    assert said.startswith("daguerre: out of memory while training: CUDA out of memory. Tried to allocate 20.00 GiB.\n")
    assert "Traceback" not in said
    advice = "training.per_device_batch_size=2 training.gradient_accumulation_steps=2"
    assert f"The largest micro-batch that fits is 2 (it was 4): {advice}" in said
    assert "Other ways: training.gradient_checkpointing=true stores fewer activations" in said
    assert said.rstrip().endswith(
        "The last checkpoint is step-00000003.\ndocs/trouble.md#out-of-memory lists more ways."
    )
    assert status(run)["state"] == "failed"
    assert status(run)["reason"].startswith("OutOfMemory: out of memory while training")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    with pytest.MonkeyPatch.context() as patch:
        no_room(patch, 3)
        assert train(tmp_path, *given, *advice.split()) == errors.DONE
    assert status(run)["state"] == "finished"


def test_before_the_first_update_it_is_told_too(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        no_room(patch, 0)
        assert train(tmp_path, *BATCH, *QUIET) == errors.FAILED
    said = capsys.readouterr().err
    assert "Not even a micro-batch of one sample fits." in said
    assert "a smaller data.resolution" in said
    assert said.rstrip().endswith("No checkpoint was saved yet.\ndocs/trouble.md#out-of-memory lists more ways.")
    assert status(tmp_path / "tiny")["state"] == "failed"


@pytest.mark.long
def test_moments_without_room_count_before_there_are_any(tmp_path, capsys):
    def full(self, *given, **named):
        raise torch.OutOfMemoryError(MESSAGE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", full)
        assert train(tmp_path, *BATCH, *QUIET) == errors.FAILED
    assert "Not even a micro-batch of one sample fits." in capsys.readouterr().err


def test_other_errors_keep_their_traceback(tmp_path):
    def broken(self, net, batch):
        raise RuntimeError("shapes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Components, "loss", broken)
        with pytest.raises(RuntimeError, match="shapes"):
            train(tmp_path, *QUIET)


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (generate, "draw", "while generating images: CUDA .*\nGenerate fewer at once: sampling.batch_size is 16"),
        pytest.param(
            *(Family, "export", "while exporting: .*\nSwitch the export off .*export later"), marks=pytest.mark.long
        ),
    ],
)
def test_after_a_save_it_says_what_there_may_be_less_of(tmp_path, capsys, owner, name, said):
    given = ["validation.every=100 steps", "training.duration=3 steps", "data.checked_prompts=1"]

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError(MESSAGE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, full)
        assert train(tmp_path, *given) == errors.FAILED
    err = capsys.readouterr().err
    assert re.search(said, err), err
    assert status(tmp_path / "tiny")["state"] == "failed"
    assert (tmp_path / "tiny" / "checkpoints" / "step-00000003" / "manifest.json").exists()
    assert train(tmp_path, *given) == errors.DONE


def test_advice_for_one_image_at_a_time():
    assert "sampling.batch_size is 16" in memory_advice.of_generating(SamplingSettings())
    assert "Generate smaller images" in memory_advice.of_generating(SamplingSettings(batch_size=1))


@pytest.mark.long  # of the quick tests, it is told of updates and images
def test_in_validation_it_is_told(tmp_path, capsys):
    loss, seen = Components.loss, []

    def full(self, net, batch):
        if not torch.is_grad_enabled() and len(seen) > 0:
            raise torch.OutOfMemoryError(MESSAGE)
        seen.append(1)
        return loss(self, net, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Components, "loss", full)
        assert train(tmp_path, "sampling.num_images=0", "checkpoint.export=false") == errors.FAILED
    said = capsys.readouterr().err
    assert "out of memory while validating" in said
    assert "The last checkpoint is step-00000003." in said
