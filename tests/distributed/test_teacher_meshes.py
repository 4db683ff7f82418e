"""A loss that compares with the model before training, with a teacher or with averages learns on every mesh what one
process learns."""

from __future__ import annotations

from pathlib import Path

import forked_runs
import numpy as np
import pytest
from adapter_runs import MESHES, Place, assert_equal
from PIL import Image

RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: dpo, beta: 0.5}
data: {source: folder, resolution: 16, held_out_fraction: 0.2}
training: {duration: 3 steps, global_batch_size: 4}
lr_scheduler: {warmup: 0 steps}
# Gradients that are zero but for rounding must not be magnified to whole steps.
optimizer: {learning_rate: 1e-3, epsilon: 1e-6}
ema: {decay: 0.5}
checkpoint: {every: null, export: false}
validation: {every: 3 steps, num_samples: 2, num_levels: 2}
sampling: {num_images: 0}
logging: {every: 1 steps, tensorboard: false}
"""


BOTH = "fsdp2-tensor2"
"""The mesh of four processes that splits parameters along two axes, on which a run is also stopped and continued."""


def given(kind: str, folder: Path) -> list[str]:
    lora = ["adapter.name=lora", "adapter.rank=2", "ema.enabled=false"]
    if kind.startswith("dpo"):
        # Its loss is a difference of two large sums: a whole network that moves fast magnifies their rounding.
        return lora if kind == "dpo-lora" else ["optimizer.learning_rate=1e-4", "optimizer.epsilon=1e-4"]
    if kind == "lcm-lora":
        return ["objective={name: lcm}", *lora]
    teacher = folder / "base"
    objective = f"objective={{name: lcm, target: average, teacher: {{path: {teacher}}}}}"
    return [objective, "model.guidance_embedding=32"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dpo-lora", "dpo-full", "lcm-lora", "lcm-full"])
def test_every_mesh_learns_what_one_process_learns(kind: str, tmp_path: Path) -> None:
    place = Place(tmp_path, "sd", RECIPE)
    for path in sorted((tmp_path / "images").glob("??.png")) if kind.startswith("dpo") else ():
        pixels = np.random.default_rng(int(path.stem) + 100).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path.with_suffix(".rejected.png"))
    meshes = {"one": (1, 1, 1, 1), **MESHES, "data4": (4, 4, 1, 1)}
    plan = [place.on(name, mesh, *given(kind, tmp_path)) for name, mesh in meshes.items()]
    stopped = [
        place.on("parts", meshes[BOTH], *given(kind, tmp_path), *more) for more in (["training.duration=2 steps"], [])
    ]
    codes = forked_runs.together(tmp_path, [*plan, *stopped])
    logs = {name: (tmp_path / f"{name}.seen.log-0").read_text()[-1500:] for name in meshes}
    assert all(code == 0 for run in codes for code in run), logs
    assert place.numbers("parts", "learning/loss") == place.numbers(BOTH, "learning/loss")
    assert_equal(place.tensors("parts", step=3), place.tensors(BOTH, step=3))
    losses = place.numbers("one", "learning/loss")
    assert len(losses) == 3
    assert losses[-1] != losses[0]
    weights = place.tensors("one", step=3)
    for name in [each for each in meshes if each != "one"]:
        assert place.numbers(name, "learning/loss") == pytest.approx(losses, rel=1e-5), name
        expected = place.numbers("one", "validation/loss")
        assert place.numbers(name, "validation/loss") == pytest.approx(expected, rel=1e-5), name
        for key, found in place.tensors(name, step=3).items():
            assert (found - weights[key]).norm() <= 1e-3 * weights[key].norm() + 1e-6, (name, key)
