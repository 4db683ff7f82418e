"""Whole runs with other types, kernels and recomputation: they stop, go on, export and draw as any run does."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import assert_equal, lines, outcome, train

from daguerre import errors
from daguerre.cli import main

SHORT = ["training.duration=2 steps", "checkpoint.every=1 step", "logging.every=1 step", "validation.every=4 steps"]
SHORT += ["data.checked_prompts=1", "sampling.num_images=1"]


def newest(run):
    return sorted((run / "checkpoints").glob("step-*"))[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (["training.weights_dtype=bfloat16"], torch.bfloat16),
        pytest.param(["training.weights_dtype=float16"], torch.float16, marks=pytest.mark.long),
        pytest.param(["training.mixed_precision=fp16"], torch.float32, marks=pytest.mark.long),
    ],
)
def test_taken_back_and_trained_again_they_end_equal_to_the_bit(tmp_path, given, stored):
    assert train(tmp_path, *SHORT, "sampling.num_images=0", *given) == errors.DONE
    run = tmp_path / "tiny"
    expected = outcome(run)
    assert train(tmp_path, *SHORT, "sampling.num_images=0", *given, "resume_from_checkpoint=step-00000001") == 0
    assert_equal(run, expected)
    types = {
        file: {t.dtype for t in load_file(newest(run) / f"{file}.safetensors").values()} for file in ("model", "ema")
    }
    assert types == {"model": {stored}, "ema": {torch.float32}}


@pytest.mark.long  # of the quick tests, training/test_speed.py says where they encode so
def test_frozen_networks_in_bf16_move_losses_a_little_and_no_weight_of_theirs(tmp_path):
    short = [*SHORT, "training.duration=1 step", "lr_scheduler.warmup=0 steps", 'sampling.prompts=["a red star"]']
    assert train(tmp_path / "wide", *short) == errors.DONE
    assert train(tmp_path / "narrow", *short, "training.frozen_precision=bf16") == errors.DONE
    wide, narrow = (tmp_path / name / "tiny" for name in ("wide", "narrow"))
    wanted, found = (lines(run)[0]["learning/loss"] for run in (wide, narrow))
    assert found != wanted
    assert found == pytest.approx(wanted, rel=1e-2)
    for part in ("vae", "text_encoder"):
        (file,) = (wide / "pipeline" / part).glob("*.safetensors")
        assert file.read_bytes() == (narrow / "pipeline" / part / file.name).read_bytes()
    assert main.run(["generate", str(narrow), "prompt=a red star", f"out={tmp_path / 'images'}"]) == errors.DONE
    (sample,) = (narrow / "samples" / "step-00000001").glob("*.png")
    (drawn,) = (tmp_path / "images").glob("*.png")
    assert drawn.read_bytes() == sample.read_bytes()


@pytest.mark.long  # of the quick tests, the one above draws again
def test_what_a_run_of_16_bit_weights_drew_is_drawn_again_by_generate(tmp_path):
    given = ["training.weights_dtype=bfloat16", "ema.enabled=false", 'sampling.prompts=["a red star"]']
    assert train(tmp_path, *SHORT, "training.duration=1 step", "lr_scheduler.warmup=0 steps", *given) == errors.DONE
    run = tmp_path / "tiny"
    assert main.run(["generate", str(run), "prompt=a red star", f"out={tmp_path / 'images'}"]) == errors.DONE
    (sample,) = (run / "samples" / "step-00000001").glob("*.png")
    (drawn,) = (tmp_path / "images").glob("*.png")
    assert drawn.read_bytes() == sample.read_bytes()


@pytest.mark.long  # of the quick tests, training/test_recompute.py
def test_recomputation_and_a_named_kernel_change_no_number(tmp_path, capsys):
    """The kernel is the one that torch takes on a CPU."""
    short = [*SHORT, "checkpoint.every=2 steps"]
    assert train(tmp_path / "plain", *short) == errors.DONE
    assert train(tmp_path / "again", *short, "training.gradient_checkpointing=true", "attention=flash") == errors.DONE
    assert "fp32, attention: flash" in capsys.readouterr().out
    expected, found = (outcome(tmp_path / run / "tiny") for run in ("plain", "again"))
    assert found["lines"] == expected["lines"]
    for name, content in expected["files"].items():
        if not name.endswith("samples.json"):  # it names the kernel
            assert found["files"][name] == content, name


@pytest.mark.long
def test_learning_rates_by_name_are_logged(tmp_path):
    rates = '{"unet.conv_in.*": 1e-5, "*.bias": 3e-5}'
    code = train(tmp_path, *SHORT, f"optimizer.learning_rates={rates}")
    assert code == errors.REFUSED, "unet.conv_in.bias matches both"
    rates = '{"unet.conv_in.*": 1e-5, "unet.conv_out.*": 3e-5}'
    assert train(tmp_path, *SHORT, f"optimizer.learning_rates={rates}") == errors.DONE
    line = lines(tmp_path / "tiny")[0]
    assert {name for name in line if name.startswith("learning/current_learning_rate")} == {
        "learning/current_learning_rate",
        "learning/current_learning_rate/unet.conv_in.*",
        "learning/current_learning_rate/unet.conv_out.*",
    }
    assert (tmp_path / "tiny" / "report.html").exists()


def test_what_a_cpu_cannot_is_refused_before_anything_is_written(tmp_path, capsys):
    for given, said in [
        ("training.attention=cudnn", "there is no such kernel for fp32 on a CPU"),
        ("training.max_device_memory=59GB", "has no effect on a CPU"),
    ]:
        assert train(tmp_path, given) == errors.REFUSED
        assert said in capsys.readouterr().err
    assert not (tmp_path / "tiny" / "config.yaml").exists()
