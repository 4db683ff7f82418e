"""Runs of adapters from end to end, on a tiny base that is written first: a folder with runs of one recipe."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bases
import forked_runs
import numpy as np
import tiny_runs
import torch
from PIL import Image
from safetensors.torch import load_file

from daguerre import errors
from daguerre.assembly.parts import Components, begin, build
from daguerre.bench.inputs import image_shape, random_batch
from daguerre.checkpoint.store import Store
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.models.lora_files.addition import DIFFUSERS_FILE
from daguerre.training import device, step
from daguerre.training.state import TrainState

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
        self.is_cascade = kind.startswith("cascade")
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

    def config(self, *more: str) -> configs.Config:
        """Of updates that a test makes itself, on the CPU."""
        return configs.load(str(self.recipe), self.given("training.device=cpu", *more)).config

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

    def finish(self, name: str, *more: str) -> None:
        """In a process of its own, to the end."""
        process = self.start(name, *more)
        said, _ = process.communicate()
        assert process.returncode == errors.DONE, said

    def kill_at_random_moments(self, name: str, seconds: float, *more: str) -> None:
        """Trains with six SIGKILLs and goes on after each. `seconds` is what the run takes alone."""
        moments, killed = random.Random(0), 0
        while killed < 6:
            process = self.start(name, *more)
            try:
                process.communicate(timeout=moments.uniform(0.4, 1.0) * seconds)
                if killed:
                    break
                shutil.rmtree(self.folder / name)  # the machine was busier when it was measured
                seconds /= 2
            except subprocess.TimeoutExpired:
                tiny_runs.kill(process)
                killed += 1
        assert killed
        self.finish(name, *more)

    def assert_a_saved_state_goes_on(self, *more: str) -> None:
        """Two updates, what files hold of their state, and two more in networks that are new: equal to the bit to four
        updates. Files know no strides."""
        given = self.config(*more)

        def new() -> Components:
            return build(given, torch.device("cpu"), trains=True)

        through, _ = updated(given, new(), 4)
        before, _ = updated(given, new(), 2)
        kept = {
            group: {name: t.clone(memory_format=torch.contiguous_format) for name, t in own.items()}
            for group, own in before.tensors().items()
        }
        parts = new()
        state = begin(given, parts)
        state.load(kept, json.loads(json.dumps(before.document())))
        state, _ = updated(given, parts, 2, state=state)
        for group, tensors in through.tensors().items():
            assert_equal(state.tensors()[group], tensors)

    def assert_kills_change_nothing(self, *more: str) -> None:
        """Trains twelve updates, a save every three, undisturbed and killed at random moments: checkpoints, samples,
        metrics and the tensors of exported files are equal to the bit."""
        given = (*more, "training.duration=12 steps", "checkpoint.every=3 steps", "logging.every=1 steps")
        run = self.folder / "hurt"
        shutil.rmtree(run, ignore_errors=True)
        began = time.monotonic()
        self.finish("hurt", *given)
        seconds, expected = time.monotonic() - began, tiny_runs.outcome(run)
        files = tensors_of_files(run / "adapter")
        assert files or (run / "pipeline").is_dir()
        shutil.rmtree(run)
        self.kill_at_random_moments("hurt", seconds, *given)
        tiny_runs.assert_equal(run, expected)
        assert_equal(tensors_of_files(run / "adapter"), files)
        shutil.rmtree(run)

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


def updated(
    given: configs.Config,
    parts: Components,
    updates: int,
    *,
    samples: int = 4,
    micro_batches: int = 1,
    max_grad_norm: float | None = 1.0,
    state: TrainState | None = None,
) -> tuple[TrainState, list[float]]:
    """The state, by default a new one, after so many updates on one random batch, at the recipe's learning rate, and
    their losses."""
    state = state or begin(given, parts)
    state.net.train()
    some = [device.on(parts.device, random_batch(parts, samples, image_shape(given)))] * micro_batches
    losses = []
    for _ in range(updates):
        step.update(
            state, some, parts.loss, learning_rate=given.optimizer.learning_rate, max_grad_norm=max_grad_norm,
            autocast=parts.autocast,
        )  # fmt: skip
        losses.append(state.meter.read()["learning/loss"])
    return state, losses


def tensors_of_files(folder: Path) -> dict[str, torch.Tensor]:
    """Of all files in a folder and in those below. Their headers have the time of writing."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.relative_to(folder)}: {name}": t for file in files for name, t in load_file(file).items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """To the bit."""
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
