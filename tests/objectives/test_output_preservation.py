"""Output preservation against its formula (ai-toolkit's), and in runs: what it keeps, from a cache and after a stop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from several_devices import RECIPE, Runs
from torch import Tensor
from torch.nn.functional import mse_loss

from daguerre import errors
from daguerre.cli import main
from daguerre.objectives import output_preservation
from daguerre.objectives.objective import REFERENCE, Example, Nets

OWN = {"data": torch.tensor(0.0)}
CLASS = {"data": torch.tensor(1.0)}


def net(own: float) -> Any:
    """Its prediction depends on the caption, and on its one weight."""

    def called(x: Tensor, c_noise: Tensor, cond: Any) -> Tensor:
        return own * x.roll(1, 1) + cond["data"] * own**2 * x + 1e-3 * c_noise[:, None, None, None]

    return called


@pytest.mark.parametrize("name", ["eps", "v", "flow"])
@pytest.mark.parametrize("mask", [None, {"outside_weight": 0.1}])
def test_the_loss_is_that_of_the_data_and_the_distance_of_both_predictions(name: str, mask: Any) -> None:
    made = output_preservation.build(output_preservation.Settings(strength=0.7, diffusion={"name": name}, mask=mask))
    keys = np.stack([np.arange(5), np.zeros(5), np.zeros(5)], 1).astype(np.int64)
    draws, x0 = made.draws(3, keys, (3, 4, 4)), torch.randn(5, 3, 4, 4)
    if mask is not None:
        draws = made.drawn(**{**draws.tensors, "element_weight": torch.rand(5, 1, 4, 4)})
    example = Example({"image": x0}, {"image": OWN}, draws, null={"image": CLASS})
    found = made.loss(Nets(net(0.5), {REFERENCE: net(0.3)}), example)
    learnt = made.inner.loss(Nets(net(0.5)), example).loss_B
    a, s, c_in = (each.view(-1, 1, 1, 1) for each in (draws.a, draws.s, draws.c_in))
    seen = c_in * (a * x0 + s * draws.noise)
    student, before = (net(own)(seen, draws.c_noise, CLASS) for own in (0.5, 0.3))
    apart = torch.stack([mse_loss(one, other) for one, other in zip(student, before, strict=True)])
    torch.testing.assert_close(found.loss_B, learnt + 0.7 * apart, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.metrics["preserved_apart"], apart, rtol=1e-5, atol=1e-6)
    same = made.loss(Nets(net(0.3), {REFERENCE: net(0.3)}), example)
    assert torch.equal(same.loss_B, made.inner.loss(Nets(net(0.3)), example).loss_B)


@pytest.fixture
def run(tmp_path):
    """Runs of a LoRA on a tiny model; what it gives has `numbers` and `tensors` of each."""
    runs = Runs(tmp_path, "sd", steps=3)
    plain = RECIPE.replace(", weighting: {name: adaptive, adaptive_buckets: 12}", "")
    runs.recipe.write_text(plain.replace("{name: eps}", "{name: output_preservation, caption: a thing}"))
    runs.own.remove("model.train_text_encoder=true")
    own = ("adapter.name=lora", "optimizer.learning_rate=0.01", "ema.enabled=false", "checkpoint.every=1 steps")

    def trained(name: str, *more: str) -> Runs:
        assert main.run(runs.on(name, (1, 1, 1, 1), *own, *more)["arguments"]) == errors.DONE
        return runs

    return trained


def test_a_lora_is_held_to_what_the_base_predicts(run) -> None:
    apart = run("held", "training.duration=2 steps").numbers("held", "learning/preserved_apart")
    assert apart[0] == 0 < apart[-1], "nothing was learnt before the first update"


@pytest.mark.long
def test_a_lora_moves_the_class_less_with_it(run) -> None:
    run("weak", "objective.strength=1e-6")
    runs = run("strong", "objective.strength=30")
    weak, strong = (runs.numbers(name, "learning/preserved_apart") for name in ("weak", "strong"))
    assert weak[0] == strong[0] == 0, "nothing was learnt before the first update"
    assert 0 < strong[-1] < weak[-1]


@pytest.mark.long
def test_it_goes_on_equal_to_the_bit_and_learns_the_same_from_a_cache(run) -> None:
    run("whole")
    run("cached", "cache.path=auto")
    run("on", "training.duration=1 steps")
    runs = run("on")
    assert runs.numbers("cached") == pytest.approx(runs.numbers("whole"), rel=1e-4)
    one, other = runs.tensors("whole", "model"), runs.tensors("on", "model")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
