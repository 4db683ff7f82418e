"""Runs whose loss leads away from the empty caption learn the same on a cache as without, and load no encoder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from adapter_runs import Place, assert_equal

from daguerre.models import components
from daguerre.objectives import eps
from daguerre.objectives.objective import Needs
from daguerre.objectives.wrapper import DiffusionWrapper
from daguerre.types import IMAGE

RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: eps}
data: {source: folder, resolution: 16, held_out_fraction: 0.2}
training: {duration: 3 steps, global_batch_size: 2, per_device_batch_size: 1}
lr_scheduler: {warmup: 0 steps}
optimizer: {learning_rate: 1e-3}
checkpoint: {every: 3 steps, export: false}
validation: {every: 3 steps, num_samples: 2, num_levels: 2}
sampling: {num_images: 0}
logging: {every: 1 steps, tensorboard: false}
"""


@dataclass(frozen=True, eq=False)
class Guided(DiffusionWrapper):
    """The loss of a guided prediction."""

    needs = Needs(null=True)

    def loss(self, nets, example):
        draws, x0 = example.draws, example.clean[IMAGE]
        cond, null = (self.inner.error(nets.student, x0, own[IMAGE], draws) for own in (example.cond, example.null))
        terms = self.inner.loss(nets, example)
        return replace(terms, loss_B=(null + 2 * (cond - null)).square().mean((1, 2, 3)))


@pytest.mark.long  # of the quick tests, test_cached_pictures.py has a row of the empty caption
@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_a_cached_run_equals_an_uncached_one_and_reads_the_row(kind, tmp_path, monkeypatch):
    build = eps.build
    monkeypatch.setattr(eps, "build", lambda settings: Guided(build(settings)))
    place = Place(tmp_path, kind, RECIPE)
    cache = [f"cache.path={tmp_path / 'cache'}", "cache.dtype=float32"]
    assert place.train("plain") == 0
    assert place.train("filling", *cache) == 0
    load = components.load.load

    def only_the_unet(kind, folder, *rest):
        if torch.get_default_device().type != "meta":
            assert folder.name == "unet", folder
        return load(kind, folder, *rest)

    monkeypatch.setattr(components.load, "load", only_the_unet)
    assert place.train("cached", *cache) == 0
    for name in ("filling", "cached"):
        for key in ("learning/loss", "validation/loss"):
            assert place.numbers(name, key) == place.numbers("plain", key)
        assert_equal(place.tensors(name, step=3), place.tensors("plain", step=3))
