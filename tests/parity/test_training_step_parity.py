"""Record and replay: six updates of `daguerre train` beside a plain loop with diffusers' and transformers' own parts.

The run is recorded (batches, noise, timesteps, posterior draws) and replayed in plain_loop.py. By the published
formulas, with coefficients in float64 rounded once, every gradient and weight is the same to the bit as far as it was
measured; 1e-6 is asked. diffusers' own calls round otherwise: its products of alphas in float32 are off by 3e-6 and
its 1 - alphas_cumprod by 7e-5 at t = 0, hence the second test's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plain_loop
import pytest
from plain_loop import Models
from recorded import LEARNING_RATE, Recorded, train
from tiny_models import write_sd
from torch import Tensor

Measure = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]


@dataclass(frozen=True)
class Case:
    """A run and how a plain loop sees it."""

    write: Callable[[Path], Path]
    model: Mapping[str, Any]
    objective: Mapping[str, Any]
    prediction_type: str
    snr_gamma: float | None = None
    given: tuple[str, ...] = ()
    text_rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of the text encoders that are trained."""


MIN_SNR = {"name": "min_snr", "snr_gamma": 5.0}
CASES = {
    "SD 1.x, eps": Case(write_sd, {"family": "sd"}, {"name": "eps"}, "epsilon"),
    "SD 2.x, v, min-SNR, accumulation": Case(
        lambda folder: write_sd(folder, version=2),
        {"family": "sd"},
        {"name": "v", "weighting": MIN_SNR},
        "v_prediction",
        5.0,
        ("gradient_accumulation_steps=2",),
    ),
    "SD 1.x, eps, min-SNR, offset noise, bias": Case(
        write_sd,
        {"family": "sd"},
        {
            "name": "eps",
            "weighting": MIN_SNR,
            "noise": {"offset": 0.1},
            "timestep_bias": {"name": "range", "multiplier": 20.0, "begin": 0, "end": 150},
        },
        "epsilon",
        5.0,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path, Recorded]:
    case = CASES[request.param]
    place = tmp_path_factory.mktemp("recorded")
    folder = case.write(place / "model")
    model = dict(case.model) | {"pretrained_model_name_or_path": str(folder)}
    return case, folder, train(place, {"model": model, "objective": dict(case.objective)}, *case.given)


def replayed(case: Case, folder: Path, recorded: Recorded, *, by_formula: bool) -> plain_loop.Outcome:
    models = Models(folder, case.prediction_type, case.snr_gamma)
    encoders = dict(zip(("text_encoder", "text_encoder_2"), models.texts, strict=False))
    for name, encoder in encoders.items():
        encoder.requires_grad_(name in case.text_rates).train(name in case.text_rates)
    return plain_loop.train(
        recorded.updates,
        models.by_formula if by_formula else models.by_scheduler,
        getattr(models, case.model["family"]),
        {"unet": models.unet} | {name: encoders[name] for name in case.text_rates},
        {"unet": LEARNING_RATE} | dict(case.text_rates),
        fused=by_formula,
    )


def largest(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of a tensor over the largest number of its tensor, of the worst tensor."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours)


def overall(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The norm of all differences over the norm of all numbers."""
    assert ours.keys() == theirs.keys()
    squares = [
        (float((ours[n] - t).double().square().sum()), float(t.double().square().sum())) for n, t in theirs.items()
    ]
    return float((sum(difference for difference, _ in squares) / sum(norm for _, norm in squares)) ** 0.5)


def differences(ours: Recorded, theirs: plain_loop.Outcome, measure: Measure) -> dict[str, float]:
    """Of losses, gradients, weights and averages, relative, the worst of all updates."""
    losses = [abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=True)]
    gradients = [measure(a, b) for a, b in zip(ours.gradients, theirs.gradients, strict=True)]
    found = {"loss": max(losses), "gradient": max(gradients)}
    found |= {"weights": measure(ours.weights, theirs.weights), "ema": measure(ours.ema, theirs.ema)}
    print(found)
    return found


def test_equal_to_the_published_formulas(recorded):
    case, folder, ours = recorded
    found = differences(ours, replayed(case, folder, ours, by_formula=True), largest)
    assert max(found.values()) <= 1e-6, found


def test_equal_to_diffusers_own_calls(recorded):
    case, folder, ours = recorded
    found = differences(ours, replayed(case, folder, ours, by_formula=False), overall)
    assert found["loss"] <= (1e-5 if case.snr_gamma else 1e-6), found
    assert found["gradient"] <= 1e-5, found
    assert max(found["weights"], found["ema"]) <= 1e-6, found


def test_the_runs_say_something(recorded):
    """Weights move, dropped captions and accumulation occur, noise levels differ."""
    case, folder, ours = recorded
    start = {f"unet.{name}": p for name, p in Models(folder, case.prediction_type).unet.state_dict().items()}
    moved = {name: ours.weights[name] - p for name, p in start.items()}
    assert all(float(move.abs().max()) > 0 for move in moved.values())
    assert overall(ours.weights | {}, ours.weights | start) > 1e-4
    batches = [batch for update in ours.updates for batch in update]
    assert len(batches) == len(ours.updates) * (2 if case.given else 1)
    assert 0 < sum(text == "" for batch in batches for text in batch.texts) < 24
    assert len({float(t) for batch in batches for t in batch.draws["c_noise"]}) > 12
