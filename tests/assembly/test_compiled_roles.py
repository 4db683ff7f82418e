"""With training.compile=blocks the passes without gradient that come in every update are compiled, too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_sd
from torch import nn

from daguerre.assembly import parts
from daguerre.assembly.roles import in_training
from daguerre.bench import inputs
from daguerre.config import config as configs
from daguerre.kernels import blocks
from daguerre.objectives.networks.teacher import TEACHER

LCM = "objective={name: lcm, target: average, teacher: {path: PLACE}}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sd(tmp_path_factory.mktemp("compiled") / "sd")


@pytest.mark.parametrize(
    ("recipe", "objective"), [("sd15_lora", "objective={name: dpo}"), ("sd15", LCM),
                              pytest.param("sd15_lora", "objective={name: lcm}", marks=pytest.mark.long)]
)  # fmt: skip
def test_the_networks_of_a_loss_run_as_compiled_code(
    recipe: str, objective: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: Counter[tuple[bool, nn.Module]] = Counter()

    def compiled(function: Any, **options: Any) -> Any:
        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            called[torch.is_grad_enabled(), block] += 1
            return function(block, *args, **kwargs)

        return forward

    monkeypatch.setattr(blocks.torch, "compile", compiled)
    monkeypatch.setattr(blocks, "_keep_what_is_compiled", lambda folder: None)
    given = [f"pretrained_model_name_or_path={place}", "data.source=folder", f"data.path={place}", "data.resolution=16"]
    given += ["training.device=cpu", "training.compile=blocks", "training.gradient_checkpointing=false"]
    given += ["training.weights_dtype=float32", objective.replace("PLACE", str(place))]
    config = configs.load(recipe, given).config
    made = parts.build(config, trains=True)
    made = in_training(made, parts.begin(config, made))
    batch = inputs.random_batch(made, 2, inputs.image_shape(config))
    with torch.no_grad():
        made.loss(made.net.eval(), batch)
    assert not called, "validation computes uncompiled"
    made.loss(made.net.train(), batch).loss_B.sum().backward()
    student = {block for with_gradient, block in called if with_gradient}
    without = {block for with_gradient, block in called if not with_gradient}
    assert student
    assert student <= without
    teacher = made.family.components.get(TEACHER)
    assert len(without - student) == (0 if teacher is None else len(student))
    assert teacher is None or without - student <= {*teacher.modules()}
