"""An adapter that adds to the conditioning: in training and where images are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import tiny_drawings
import torch
from torch import Tensor, nn

from daguerre import keys
from daguerre.adapters.adapter import Attached, Trainable
from daguerre.assembly.parts import Components
from daguerre.generation import generate
from daguerre.generation.generate import ImageRequest
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import IMAGE, AdapterInputs, Batch, Cond, Prompt

SIZE = (32, 32)


@dataclass(frozen=True, eq=False)
class Louder(Trainable):
    """Adds a random number of each sample to the text features."""

    net: nn.Module
    names: frozenset[str]
    seen: list[AdapterInputs] = field(default_factory=list)

    def condition(self, inputs: AdapterInputs, cond: Cond) -> Cond:
        self.seen.append(inputs)
        return {**cond, "text": cond["text"] + inputs.draws["louder"][:, None, None]}

    def random_inputs(self, seed: int, keys_B3: np.ndarray, shape: tuple[int, ...]) -> dict[str, Tensor]:
        numbers = [keys.uniforms(seed, "louder", *map(int, key), count=1)[0] for key in keys_B3]
        return {"louder": torch.tensor(numbers, dtype=torch.float32)}

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        return []


@pytest.fixture
def built(tiny_sd: Path, tmp_path: Path) -> Components:
    made = tiny_drawings.build(tmp_path, tiny_sd)
    louder = Louder(made.net, made.attached.names)
    return replace(made, attached=Attached(made.net, {"louder": louder}))


def images(built: Components, requests: Sequence[ImageRequest], batch_size: int) -> np.ndarray:
    sampling = SamplingSettings(num_inference_steps=2, batch_size=batch_size)
    found = generate.generate(built, sampling, requests)
    return np.stack([one.pixels_HWC for one in sorted(found, key=lambda one: one.request.number)]).astype(int)


@pytest.mark.long
def test_it_is_applied_in_training_and_on_both_sides_of_guidance(built):
    (louder,) = built.attached.trainables.values()
    pixels = torch.zeros((1, 3, *SIZE), dtype=torch.uint8)
    sizes = np.array([[32, 32, 0, 0, 32, 32]], dtype=np.int32)
    batch = Batch(np.array([[5, 0, 0]]), {IMAGE: pixels}, ["a cat"], torch.ones(1), ["one"], sizes)
    built.loss(built.net, replace(batch, draws=built.draws(batch)))
    assert [each.texts for each in louder.seen] == [["a cat"]]
    louder.seen.clear()

    requests = [ImageRequest(i, Prompt(f"a cat {i}", "blur"), 7 + i, SIZE, 3.0) for i in range(3)]
    found = images(built, requests, 4)
    assert [each.texts for each in louder.seen] == [["a cat 0", "a cat 1", "a cat 2"], ["blur"] * 3]
    for each in louder.seen:
        drawn = louder.random_inputs(built.seed, np.array([[7, 0, 0], [8, 0, 0], [9, 0, 0]]), (4, 16, 16))
        assert each.draws["louder"].tolist() == drawn["louder"].tolist(), "of the seeds, as keys (seed, 0, 0)"
    assert np.abs(found - images(built, requests, 1)).max() <= 1, "an image depends on its own seed alone"
    plain = replace(built, attached=Attached(built.net, {}))
    assert (found != images(plain, requests, 4)).any(axis=(1, 2, 3)).all()


def test_without_guidance_there_is_one_side(built):
    (louder,) = built.attached.trainables.values()
    images(built, [ImageRequest(0, Prompt("a cat"), 7, SIZE, 1.0)], 4)
    assert [each.texts for each in louder.seen] == [["a cat"]]
