"""The contract of every family with a pipeline, found by its file: on every mesh it trains as on one device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import forked_runs
import pytest
import several_devices
import tiny_families
import torch
from several_devices import zeros

from daguerre.checkpoint.store import Store
from daguerre.families.pretrained import catalogue

MESHES = {"fsdp": (2, 1, 2, 1), "tensor": (2, 1, 1, 2), "both": (4, 1, 2, 2)}
"""Processes, data, fsdp, tensor."""
SIDE_PX = 64
RECIPE = """
run_name: meshes
training: {duration: 3 steps, global_batch_size: 4}
# Gradients that are zero but for rounding must not be magnified to whole steps.
optimizer: {learning_rate: 1e-4, epsilon: 1e-6}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: null, export: false}
validation: {every: null}
"""


def write_recipe(name: str, folder: Path) -> Path:
    """Of the family with tiny networks; without dropout, which each device draws for itself."""
    family = tiny_families.load(name, folder)
    assert family.pretrained is not None
    scheduler = family.pretrained.scheduler()
    assert scheduler is not None
    model = tiny_families.settings(name, folder / "model")
    images = several_devices.images(folder / "images")
    for path in sorted(images.glob("*.png")) if family.references is not None and family.references.least else ():
        shutil.copyfile(path, path.with_suffix(".reference.png"))
    for path in folder.rglob("config.json"):
        numbers = json.loads(path.read_text())
        if "dropout" in numbers:
            numbers["dropout"] = [0.0] * len(numbers["dropout"]) if isinstance(numbers["dropout"], list) else 0.0
            path.write_text(json.dumps(numbers))
    sections = {
        "model": model,
        "objective": family.pretrained.settings.schedulers.objective_of(scheduler),
        "data": {"source": "folder", "path": str(images), "resolution": SIDE_PX},
        "sampling": {"num_images": 0, "prompts": ["a"], "height": SIDE_PX, "width": SIDE_PX},
    }
    path = folder / "recipe.yaml"
    path.write_text(RECIPE + "\n".join(f"{name}: {json.dumps(own)}" for name, own in sections.items()))
    return path


@pytest.mark.long
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("name", sorted({*catalogue.pipelines().values()}))
def test_every_mesh_trains_as_one_device(name, adapter, tmp_path):
    recipe = write_recipe(name, tmp_path)
    given = ["adapter.name=lora", "adapter.rank=2"] if adapter == "lora" else []
    runs, areas = {"one": (1, 1, 1, 1), **MESHES}, {name: SIDE_PX**2}
    plan = []
    for run, (size, *degrees) in runs.items():
        axes = [f"mesh.ici_{axis}_parallelism={n}" for axis, n in zip(("data", "fsdp", "tensor"), degrees, strict=True)]
        plan.append(forked_runs.run(tmp_path, run, size, *given, *axes, recipe=str(recipe), areas=areas))
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
