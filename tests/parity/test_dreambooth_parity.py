"""DreamBooth, recorded and replayed: an instance set beside a class set, its loss weighed by prior_loss_weight.

The plain loop is the formula of DreamBooth's trainers, mse(instance) + prior_loss_weight * mse(class), each the mean of
its own half of the batch. Here a loss is the mean over all samples of the batch, so it is half of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plain_loop
import pytest
import torch
from data_sets import folder as images
from plain_loop import Models
from recorded import LEARNING_RATE, train
from tiny_models import write_sd, write_sdxl
from torch import Tensor

INSTANCE, CLASS = "a photo of sks dog", "a photo of a dog"
WEIGHT = 0.7
WRITERS = {"sd": write_sd, "sdxl": write_sdxl}


def sources(place: Path) -> dict[str, Any]:
    """A mix of three images of a thing and five of its class, which weigh WEIGHT."""
    common = {"source": "folder", "caption_dropout": 0.0, "held_out_fraction": 0.0}
    members = {
        "instance": common | {"path": str(images(place / "instance", 3)), "captions": {"text": INSTANCE}},
        "class": common | {"path": str(images(place / "class", 5)), "captions": {"text": CLASS}},
    }
    members["class"]["loss_weight"] = WEIGHT
    return members


@pytest.mark.long  # of the quick tests, data/test_source_weights.py
@pytest.mark.parametrize("family", ["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def test_an_instance_set_beside_a_class_set_is_the_published_loss(family: str, tmp_path: Path) -> None:
    folder = WRITERS[family](tmp_path / "model")
    members = sources(tmp_path)
    recipe = {
        "model": {"family": family, "pretrained_model_name_or_path": str(folder)},
        "objective": {"name": "eps"},
        "data": {"source": "mix", "resolution": 16, "sources": members},
    }
    ours = train(tmp_path, recipe)
    models = Models(folder)

    def dreambooth(batch: Any, conditioning: Mapping[str, Any]) -> Tensor:
        losses_B = models.by_formula(batch, conditioning)
        of_class_B = torch.tensor([text == CLASS for text in batch.texts])
        assert int(of_class_B.sum()) == len(of_class_B) // 2, "half of each batch is of the class"
        loss = losses_B[torch.logical_not(of_class_B)].mean() + WEIGHT * losses_B[of_class_B].mean()
        return (loss / 2).expand(len(losses_B))  # the loop takes the mean over the batch

    rates = {"unet": LEARNING_RATE}
    reader = getattr(models, family)
    theirs = plain_loop.train(ours.updates, dreambooth, reader, {"unet": models.unet}, rates, fused=True)
    found = plain_loop.differences(ours, theirs, plain_loop.overall)
    assert max(found.values()) <= 1e-6, found
    assert {text for update in ours.updates for batch in update for text in batch.texts} == {INSTANCE, CLASS}
