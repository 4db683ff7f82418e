"""A loss around diffusion trains, validates, samples, exports and measures as its inner objective does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import assert_equal, outcome, train

from daguerre import errors
from daguerre.objectives import contrastive, eps, v
from daguerre.objectives.wrapper import DiffusionWrapper


@dataclass(frozen=True, eq=False)
class Around(DiffusionWrapper):
    """The inner loss."""

    def loss(self, nets, example):
        return self.inner.loss(nets, example)


@pytest.mark.long  # of the quick tests, the one below compares what a run is made of
def test_a_run_is_that_of_the_inner_objective_to_the_bit(tmp_path: Path, monkeypatch) -> None:
    given = ["objective.weighting.name=adaptive", "model.noise_conditioning=flow_time"]
    given += ["training.duration=4 steps", "checkpoint.every=4 steps"]
    assert train(tmp_path / "inner", *given) == errors.DONE
    build = v.build
    monkeypatch.setattr(v, "build", lambda settings: Around(build(settings)))
    assert train(tmp_path / "around", *given) == errors.DONE
    found = tmp_path / "around" / "tiny"
    assert (found / "pipeline" / "scheduler").is_dir()
    assert (found / "evaluation.json").is_file()
    assert_equal(found, outcome(tmp_path / "inner" / "tiny"))


def test_learnt_weights_elements_and_draws_are_those_of_the_inner_objective() -> None:
    values = {"weighting": {"name": "adaptive"}, "mask": {}}
    around = Around(eps.build(eps.Settings.model_validate(values)))
    moved = around.with_diffusion(around.diffusion.with_noise_conditioning("flow_time", 1000.0))
    keys, shape = np.array([[5, 0, 0], [6, 1, 0]]), (4, 3, 5)
    for each in (around, moved):
        assert each.learnt is each.inner.learnt
        assert each.elements is each.inner.elements
        drawn, expected = each.draws(7, keys, shape).tensors, each.inner.draws(7, keys, shape).tensors
        assert drawn.keys() == expected.keys()
        assert all(torch.equal(drawn[name], expected[name]) for name in drawn)
    assert moved.diffusion.noise_conditioning.name == "flow_time"


def test_training_that_is_not_diffusion_has_none() -> None:
    assert contrastive.build(contrastive.Settings()).diffusion is None
