"""Runs of one recipe on several meshes, which must learn what one process learns."""

from __future__ import annotations

import json
from pathlib import Path

import bases
import forked_runs
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from daguerre.checkpoint.store import Store

MESHES = {
    # name: processes, data, fsdp, tensor
    "one": (1, 1, 1, 1),
    "two": (2, 2, 1, 1),
    "data4": (4, 4, 1, 1),
    "data2-fsdp2": (4, 2, 2, 1),
    "fsdp4": (4, 1, 4, 1),
    "fsdp2-tensor2": (4, 1, 2, 2),
    "data2-tensor2": (4, 2, 1, 2),
}
GLOBAL_BATCH = 12
"""Shared by 1, 2, 3 and 4 processes alike."""


def images(folder: Path) -> Path:
    """24 small images with captions."""
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(24):
        Image.fromarray(noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"image {number}")
    return folder


def settings(folder: Path, kind: str, steps: int, batch: int) -> list[str]:
    """Of a run that trains UNet and text encoder of a tiny model."""
    return [
        *bases.write(kind, folder / "base"),
        "model.train_text_encoder=true",
        f"data.path={images(folder / 'images')}",
        f"training.duration={steps} steps",
        f"training.global_batch_size={batch}",
    ]


RECIPE = """
run_name: several
model: {family: sd}
objective: {name: eps, weighting: {name: adaptive, adaptive_buckets: 12}}
data: {source: folder, resolution: 16}
training: {}
# Gradients that are zero but for rounding (of attention's key biases) must not be magnified to whole steps.
optimizer: {learning_rate: 1e-4, epsilon: 1e-6}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: null, export: false}
sampling: {num_images: 0, num_inference_steps: 2, prompts: [a, b, c]}
validation: {every: null}
"""


class Runs:
    """Runs of one recipe on several meshes."""

    def __init__(self, folder: Path, kind: str, steps: int, batch: int = GLOBAL_BATCH) -> None:
        self.folder, self.own = folder, settings(folder, kind, steps, batch)
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE)

    def on(self, name: str, mesh: tuple[int, int, int, int], *overrides: str) -> dict:
        """A run on a mesh, for `forked_runs.together`."""
        size, *degrees = mesh
        axes = [f"mesh.ici_{axis}_parallelism={n}" for axis, n in zip(("data", "fsdp", "tensor"), degrees, strict=True)]
        return forked_runs.run(self.folder, name, size, *self.own, *axes, *overrides, recipe=str(self.recipe))

    def numbers(self, name: str, key: str = "learning/loss") -> list[float]:
        """A number of each line of metrics that has it."""
        lines = map(json.loads, (self.folder / name / "metrics" / "metrics.jsonl").read_text().splitlines())
        return [line[key] for line in lines if key in line]

    def tensors(self, name: str, group: str = "ema") -> dict[str, torch.Tensor]:
        """Of the newest checkpoint."""
        store = Store(self.folder / name / "checkpoints")
        return store.load(store.root / store.names()[-1], [group]).tensors[group]

    def samples(self, name: str, size: int) -> list[list[str]]:
        """Of each update."""
        return forked_runs.samples(self.folder, name, size)

    def log(self, name: str) -> str:
        """What the first process said."""
        return (self.folder / f"{name}.seen.log-0").read_text()

    def assert_equal(self, name: str, other: str, losses: float = 1e-5, averages: float = 1e-4) -> None:
        """Losses and averages agree, each tensor relative to its norm."""
        assert self.numbers(name) == pytest.approx(self.numbers(other), rel=losses), name
        expected, table = self.tensors(other), self.tensors(other, "objective")["adaptive_loss"]
        assert not torch.equal(table, torch.ones_like(table)), "the losses of each noise level were not learnt"
        torch.testing.assert_close(self.tensors(name, "objective")["adaptive_loss"], table, rtol=1e-6, atol=0)
        for key, value in self.tensors(name).items():
            if not key.endswith("k_proj.bias"):  # its gradient is zero but for rounding, and so it starts at zero
                assert (value - expected[key]).norm() <= averages * expected[key].norm(), (name, key)

    def assert_same_export(self, name: str, other: str) -> None:
        """The weights that others read agree."""
        of_other = self.folder / other
        files = sorted(path.relative_to(of_other) for path in (of_other / "pipeline").rglob("*.safetensors"))
        assert len(files) > 2
        for file in files:
            expected, found = load_file(of_other / file), load_file(self.folder / name / file)
            assert expected.keys() == found.keys()
            assert all((found[key] - expected[key]).abs().max() < 2e-6 for key in expected), (name, file)


def zeros(codes: list[list[int]]) -> bool:
    """Whether all processes of all runs ended well."""
    return all(code == 0 for run in codes for code in run)
