"""Runs whose loss compares with the model before update 1: it is the same after every restart, or refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tiny_runs import lines, outcome
from twins import Twins

from daguerre import errors
from daguerre.cli import main
from daguerre.objectives import eps
from daguerre.objectives.objective import REFERENCE, Needs
from daguerre.objectives.wrapper import DiffusionWrapper
from daguerre.types import IMAGE


@dataclass(frozen=True, eq=False)
class Near(DiffusionWrapper):
    """The inner loss, and the squared distance from the reference."""

    needs = Needs(networks=(REFERENCE,))

    def loss(self, nets, example):
        draws, x0, cond = example.draws, example.clean[IMAGE], example.cond[IMAGE]
        first = self.inner.error(nets[REFERENCE], x0, cond, draws)
        apart_B = (self.inner.error(nets.student, x0, cond, draws) - first).square().mean((1, 2, 3))
        terms = self.inner.loss(nets, example)
        return replace(terms, loss_B=terms.loss_B + 10 * apart_B, metrics={"apart": apart_B.detach()})


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    build = eps.build
    monkeypatch.setattr(eps, "build", lambda settings: Near(build(settings)))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(tmp_path_factory.mktemp("twins"))


QUICK = [
    "sampling.num_images=0",
    "validation.every=2 steps",
    "validation.num_samples=2",
    "optimizer.learning_rate=1e-2",
]
FIRST = {"sd15": "first", "sd15_lora": "first/adapter/pytorch_lora_weights.safetensors"}
"""What a run of the recipe starts from: another run, or a file."""


def train(recipe: str, twins: Twins, place: Path, name: str, steps: int, *more: str) -> int:
    changed = {each.split("=")[0] for each in QUICK} | {"training.duration"}
    usual = [each for each in twins.overrides(recipe) if each.split("=")[0] not in changed]
    given = [f"output_dir={place}", f"run_name={name}", f"training.duration={steps} steps", *usual, *QUICK, *more]
    return main.run(["train", recipe, "optimizer.learning_rate=1e-2", *given])


@pytest.mark.long  # of the quick tests, test_dpo_runs.py goes on with a reference to the bit
@pytest.mark.parametrize("recipe", ["sd15_lora", "sd15"])
def test_a_run_that_goes_on_has_the_reference_to_the_bit(recipe: str, twins: Twins, tmp_path: Path, capsys) -> None:
    assert train(recipe, twins, tmp_path, "first", 2) == errors.DONE
    start = f"init_from={tmp_path / FIRST[recipe]}"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(recipe, twins, tmp_path, "whole", 4, start) == errors.DONE
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000004")  # as if it had stopped after the second update
    assert train(recipe, twins, tmp_path, "parts", 4, start) == errors.DONE
    assert "continuing from step-00000002" in capsys.readouterr().out
    expected, found = outcome(whole)["files"], outcome(parts)["files"]
    for file in [name for name in expected if name.endswith(("model.safetensors", "ema.safetensors"))]:
        assert found[file] == expected[file]
    apart = [[line["learning/apart"] for line in lines(run) if "learning/apart" in line] for run in (whole, parts)]
    assert apart[0] == apart[1]
    assert apart[0][0] == 0 < apart[0][-1]
    recorded = json.loads((parts / "checkpoints/step-00000004/base.json").read_text())
    assert recorded["reference"]["place"] == str(tmp_path / FIRST[recipe])
    shutil.rmtree(tmp_path / "first")
    assert train(recipe, twins, tmp_path, "first", 3) == errors.DONE
    assert train(recipe, twins, tmp_path, "parts", 5, start) == errors.REFUSED
    assert "compares with the model before the first update" in " ".join(capsys.readouterr().err.split())
