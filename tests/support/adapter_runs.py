"""Runs of adapters from end to end, on a tiny base that is written first: a folder with runs of one recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bases
import forked_runs
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from daguerre.checkpoint.store import Store
from daguerre.cli import main
from daguerre.models.lora_files.addition import DIFFUSERS_FILE

MESHES = {"fsdp2": (2, 1, 2, 1), "data2": (2, 2, 1, 1), "tensor2": (2, 1, 1, 2), "fsdp2-tensor2": (4, 1, 2, 2)}
"""Processes, and degrees of the axes data, fsdp and tensor."""
IMAGES = 14


class Place:
    """A folder with a base, images and runs of one recipe. `KIND` in the recipe is the family."""

    still: tuple[str, ...] = ()
    """Parts of names of weights that a checkpoint holds and nothing moves."""

    def __init__(self, folder: Path, kind: str, recipe: str, *, captions: bool = True, controls: bool = False) -> None:
        self.folder, self.kind, self.denoiser = folder, kind, bases.DENOISERS[kind]
        self.networks = (self.denoiser, "text_encoder")
        self.base = bases.write(kind, folder / "base")
        (folder / "images").mkdir()
        noise = np.random.default_rng(0)
        for number in range(IMAGES):
            for name in (f"{number:02}.png", f"{number:02}.control.png")[: 1 + controls]:
                pixels = noise.integers(0, 256, (20 if controls else 16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / name)
            if captions:
                (folder / "images" / f"{number:02}.txt").write_text(f"image {number}")
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(recipe.replace("KIND", kind))

    def given(self, *more: str) -> list[str]:
        """The command's settings."""
        return [*self.base, f"data.path={self.folder / 'images'}", *more]

    def command(self, name: str, *more: str) -> list[str]:
        """The command of a run of this name."""
        return ["train", str(self.recipe), f"output_dir={self.folder}", f"run_name={name}", *self.given(*more)]

    def train(self, name: str, *more: str) -> int:
        """In this process."""
        return main.run(self.command(name, *more))

    def start(self, name: str, *more: str) -> subprocess.Popen[str]:
        """In a process of its own."""
        command = [sys.executable, "-m", "daguerre", *self.command(name, *more)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, **pipes)

    def on(self, name: str, mesh: tuple[int, int, int, int], *more: str) -> dict:
        """A run on a mesh, for `forked_runs.together`."""
        size, *degrees = mesh
        axes = [f"mesh.ici_{axis}_parallelism={n}" for axis, n in zip(("data", "fsdp", "tensor"), degrees, strict=True)]
        return forked_runs.run(self.folder, name, size, *self.given(*axes, *more), recipe=str(self.recipe))

    def tensors(self, name: str, group: str = "model", step: int = 4) -> dict[str, torch.Tensor]:
        """Of a checkpoint."""
        store = Store(self.folder / name / "checkpoints")
        return store.load(store.root / f"step-{step:08d}", [group]).tensors[group]

    def numbers(self, name: str, key: str) -> list[float]:
        """A number of each line of metrics that has it."""
        lines = map(json.loads, (self.folder / name / "metrics" / "metrics.jsonl").read_text().splitlines())
        return [line[key] for line in lines if key in line]

    def exported(self, name: str) -> dict[str, torch.Tensor]:
        """The file of a LoRA that diffusers would read."""
        return load_file(self.folder / name / "adapter" / DIFFUSERS_FILE)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """To the bit."""
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
