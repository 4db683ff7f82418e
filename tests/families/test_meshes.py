"""The contract of every family with a pipeline, found by its file: on every mesh it trains as on one device."""

from __future__ import annotations

import json
from pathlib import Path

import family_recipes
import forked_runs
import pytest
import torch
from several_devices import zeros

from daguerre import plugins
from daguerre.checkpoint.store import Store

MESHES = {"two": (2, 2, 1, 1), "four": (4, 4, 1, 1), "fsdp": (2, 1, 2, 1), "tensor": (2, 1, 1, 2)}
MESHES |= {"both": (4, 1, 2, 2)}
"""Processes, data, fsdp, tensor."""


def cases() -> list[tuple[str, int]]:
    """Families, without reference images where they can, and with one where they read some."""
    rules = {name: plugins.find("families", name).Settings.reference_rule for name in family_recipes.NAMES}
    return [(name, count) for name, rule in rules.items() for count in (0, 1)
            if (count >= rule.least if rule else not count)]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize(("name", "references"), cases())
def test_every_mesh_trains_as_one_device(name: str, references: int, adapter: str, tmp_path: Path) -> None:
    recipe = family_recipes.write(name, tmp_path, references=references)
    given = ["adapter.name=lora", "adapter.rank=2"] if adapter == "lora" else []
    runs = {"one": (1, 1, 1, 1), **MESHES}
    plan = []
    for run, (size, *degrees) in runs.items():
        axes = [f"mesh.ici_{axis}_parallelism={n}" for axis, n in zip(("data", "fsdp", "tensor"), degrees, strict=True)]
        plan.append(forked_runs.run(tmp_path, run, size, *given, *axes, recipe=str(recipe), areas=family_recipes.AREAS))
    codes = forked_runs.together(tmp_path, plan)
    assert zeros(codes), [(tmp_path / f"{run}.seen.log-0").read_text()[-2000:] for run in runs]
    losses, weights = {}, {}
    for run in runs:
        lines = map(json.loads, (tmp_path / run / "metrics" / "metrics.jsonl").read_text().splitlines())
        losses[run] = [line["learning/loss"] for line in lines if "learning/loss" in line]
        store = Store(tmp_path / run / "checkpoints")
        weights[run] = store.load(store.root / store.names()[-1], ["model"]).tensors["model"]
    for run in MESHES:
        assert losses[run] == pytest.approx(losses["one"], rel=1e-5), run
        assert weights[run].keys() == weights["one"].keys()
        for key, expected in weights["one"].items():
            torch.testing.assert_close(
                weights[run][key], expected, rtol=1e-3, atol=1e-6, msg=lambda t, k=key: f"{k}: {t}"
            )
