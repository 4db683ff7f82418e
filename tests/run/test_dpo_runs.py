"""Runs that learn preferences: from ln 2, to the bit after a restart, sampled and exported as their inner objective."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import measured_losses
import pairs
import pytest
from tiny_runs import lines, outcome
from twins import Twins

from daguerre import errors
from daguerre.cli import main


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(tmp_path_factory.mktemp("twins"))


def train(recipe: str, twins: Twins, place: Path, name: str, steps: int, *more: str) -> int:
    own = {
        "data.source": "folder",
        "data.path": str(place / "pairs"),
        "objective": "{name: dpo, beta: 0.5}",
        "training.duration": f"{steps} steps",
        "validation.every": "2 steps",
        "validation.num_samples": "2",
        "data.held_out_fraction": "0.3",
        "optimizer.learning_rate": "1e-3",
        "checkpoint.every": "2 steps",
    }
    if not (place / "pairs").exists():
        pairs.files(place / "pairs")
    usual = dict(each.split("=", 1) for each in twins.overrides(recipe) if not each.startswith("data.name"))
    given = [f"{key}={value}" for key, value in {**usual, **own}.items()]
    return main.run(["train", recipe, f"output_dir={place}", f"run_name={name}", *given, *more])


@pytest.mark.long  # of the quick tests, assembly/test_roles.py has the reference, test_lora_runs.py a kill
@pytest.mark.parametrize("recipe", ["sd15_lora", "sd15", "sdxl"])
def test_a_run_starts_at_ln_2_goes_on_to_the_bit_and_draws(recipe: str, twins: Twins, tmp_path: Path, capsys) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    often = ["checkpoint.every=1 steps", "validation.every=1 steps", "lr_scheduler.warmup=0 steps"]
    assert train(recipe, twins, tmp_path, "whole", 2, *often) == errors.DONE
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000002")  # as if it had stopped after the first update
    assert train(recipe, twins, tmp_path, "parts", 2, *often) == errors.DONE
    assert "continuing from step-00000001" in capsys.readouterr().out
    expected, found = outcome(whole), outcome(parts)
    for file, content in expected["files"].items():
        if file.endswith((".safetensors", ".png")):
            assert found["files"][file] == content, file
    losses = [[line["learning/loss"] for line in lines(run) if "learning/loss" in line] for run in (whole, parts)]
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(math.log(2), abs=1e-7)
    assert losses[0][-1] != losses[0][0]
    assert any("validation/preferred_more" in line for line in lines(whole))
    assert main.run(["generate", str(parts), "prompt=a circle", f"out={tmp_path / 'drawn'}"]) == errors.DONE
    validated = [line["validation/loss"] for line in lines(whole) if "validation/loss" in line]
    assert measured_losses.mean(whole, tmp_path / "measured") == pytest.approx(validated[-1], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "averages"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_evaluate_has_the_reference_of_a_run_that_began_from_another(
    dtype: str, averages: bool, twins, tmp_path, capsys
) -> None:
    given = [f"training.weights_dtype={dtype}", f"ema.enabled={averages}"]
    assert train("sd15", twins, tmp_path, "first", 2, *given) == errors.DONE
    given += [f"init_from={tmp_path / 'first'}", "optimizer.learning_rate=1e-2"]
    assert train("sd15", twins, tmp_path, "next", 4, *given) == errors.DONE
    run = tmp_path / "next"
    validated = [line["validation/loss"] for line in lines(run) if "validation/loss" in line]
    assert validated[-1] != pytest.approx(math.log(2), abs=1e-5)
    assert measured_losses.mean(run, tmp_path / "measured") == pytest.approx(validated[-1], rel=1e-6)
    shutil.rmtree(tmp_path / "first/checkpoints/step-00000002")
    assert train("sd15", twins, tmp_path, "first", 3, *given[:2]) == errors.DONE
    assert main.run(["evaluate", str(run), "metrics=[validation_loss]"]) == errors.REFUSED
    assert "its loss compares with the model before the first update" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("sd15_textual_inversion", "with words that only the student has learnt: remove adapters.tokens"),
        ("sd15_controlnet", "which has not learnt what the network of this adapter reads: remove adapters.controlnet"),
    ],
)
def test_adapters_that_the_reference_knows_nothing_of_are_refused(
    recipe: str, why: str, twins: Twins, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(recipe, twins, tmp_path, "refused", 2) == errors.REFUSED
    said = " ".join(capsys.readouterr().err.split())
    assert "objective.name=dpo compares the student with another network (reference)" in said
    assert why in said
