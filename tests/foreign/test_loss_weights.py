"""Loss weights of other trainers: carried where their numbers are ours, else told as lost, with the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from daguerre.cli import main
from daguerre.foreign import loss_weights
from daguerre.foreign.loss_weights import LAW
from daguerre.foreign.reader import Reading
from daguerre.foreign.trainers import ai_toolkit, kohya, onetrainer
from daguerre.objectives import weights
from daguerre.objectives.levels import schedules
from daguerre.objectives.settings import ScheduleSettings, WeightingSettings

NAMED = {"pretrained_model_name_or_path": "a/b", "output_name": "x"}
KOHYA = {"pretrained_model_name_or_path": "a/b", "resolution": 512}
ONETRAINER = {"model_type": "STABLE_DIFFUSION_21", "base_model_name": "a/b", "training_method": "FINE_TUNE"}
V = {"v_parameterization": True}
ZERO = {"zero_terminal_snr": True}
TOOLKIT = {"name_or_path": "a/b", "is_v2": True}


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", ["min_snr", "debiased", "p2"])
@pytest.mark.parametrize("v", [False, True])
def test_our_weights_are_those_of_the_objectives(name, v, fixed):
    schedule = ScheduleSettings(zero_terminal_snr=True) if fixed else ScheduleSettings()
    a, s = schedules.build(schedule).path(torch.arange(1000, dtype=torch.float64))
    signs = WeightingSettings(name=name, **({"p2_gamma": 2.0} if name == "p2" else {}))
    # the determinant of (a, s) with the direction of v is 1, with that of eps a
    expected = weights.weight(signs, a, s, torch.ones_like(a) if v else a)
    own = loss_weights.of({f"{LAW}.name": name, f"{LAW}.snr_gamma": 5.0, f"{LAW}.p2_gamma": 2.0}, v)
    snrs = loss_weights.snrs(fixed)
    torch.testing.assert_close(torch.tensor(snrs, dtype=torch.float64), (a / s) ** 2, rtol=1e-9, atol=1e-15)
    last = 999 if fixed and not v else 1000  # eps has no weight where nothing of the image is left: refused
    found = torch.tensor([own(snr) for snr in snrs[:last]], dtype=torch.float64)
    torch.testing.assert_close(found, expected[:last], rtol=1e-9, atol=1e-12)


def kohyas(snr: torch.Tensor, v: bool, gamma: float) -> torch.Tensor:
    """kohya's weights, restated: its debiased one without a gamma."""
    if gamma:
        return torch.minimum(snr, torch.tensor(gamma)) / (snr + v)
    snr = snr.clamp(max=1000)
    return 1 / (snr + 1) if v else snr.rsqrt()


@pytest.mark.parametrize(
    ("given", "told", "values"),
    [
        ({"debiased_estimation_loss": True}, None, {"name": "debiased"}),
        ({"debiased_estimation_loss": True, **V}, "36.2%", {"name": "debiased"}),
        ({"debiased_estimation_loss": True, **V, **ZERO}, "41.6%", {"name": "debiased"}),
        ({"min_snr_gamma": 5}, None, {"name": "min_snr", "snr_gamma": 5}),
        ({"min_snr_gamma": 5, **V}, None, {"name": "min_snr", "snr_gamma": 5}),
        ({"min_snr_gamma": 5, **V, **ZERO}, "3.8%", {"name": "min_snr", "snr_gamma": 5}),
        ({"min_snr_gamma": 1, **V, **ZERO}, "5.8%", {"name": "min_snr", "snr_gamma": 1}),
        ({"min_snr_gamma": 0, **V, **ZERO}, None, {"name": None}),
    ],
)
def test_kohyas_weights(given, told, values):
    reading = Reading(KOHYA | given)
    kohya.convert(reading)
    reading.finish()
    assert {name: reading.values.get(f"{LAW}.{name}") for name in values} == values or values["name"] is None
    lost = {line.key: line.text for line in reading.lines if line.kind == "refused"}
    if told is None:
        assert not lost
        return
    (text,) = lost.values()
    assert told in text
    fixed, v = "zero_terminal_snr" in given, "v_parameterization" in given
    before = (torch.tensor(loss_weights.snrs(False)), torch.tensor(loss_weights.snrs(fixed)))
    theirs = kohyas(before[0], v, given.get("min_snr_gamma", 0.0))
    assert f"at the last one it is {theirs[-1].item():.3g} there" in text
    assert f"on average {theirs.mean().item():.3g} and" in text
    assert ("before zero_terminal_snr" in text) == fixed


@pytest.mark.parametrize(
    ("law", "v", "told"),
    [
        ("MIN_SNR_GAMMA", False, None),
        ("MIN_SNR_GAMMA", True, None),
        ("P2", False, None),
        ("P2", True, "(SNR + 2)"),
        ("DEBIASED_ESTIMATION", False, None),
        ("DEBIASED_ESTIMATION", True, "1 / sqrt(SNR + 1)"),
        ("CONSTANT", True, None),
    ],
)
def test_onetrainers_weights(law, v, told):
    kind = "STABLE_DIFFUSION_21" if v else "STABLE_DIFFUSION_21_BASE"
    reading = Reading(ONETRAINER | {"model_type": kind, "loss_weight_fn": law, "loss_weight_strength": 5.0})
    onetrainer.convert(reading)
    assert (reading.values["objective.name"] == "v") == v
    (line,) = [line for line in reading.lines if line.key == "loss_weight_fn"]
    assert (line.kind, told or "") == ("refused" if told else "carried", told or "")
    assert (told or "") in line.text


@pytest.mark.parametrize(
    ("given", "v", "kind"),
    [
        ({"min_snr_gamma": 5.0}, False, "carried"),
        ({"min_snr_gamma": 5.0}, True, "refused"),
        ({"snr_gamma": 5.0}, False, "refused"),
        ({"min_snr_gamma": None}, False, "notice"),
    ],
)
def test_ai_toolkits_weights(given, v, kind):
    root = ai_toolkit.ROOT
    keys = {f"{root}model.{key}": value for key, value in (TOOLKIT | {"is_v_pred": v}).items()}
    keys |= {f"{root}train.{key}": value for key, value in given.items()}
    reading = Reading(keys | {f"{root}type": "sd_trainer", "config.name": "x"})
    ai_toolkit.convert(reading)
    (key,) = given
    (line,) = [line for line in reading.lines if line.key == f"{root}train.{key}"]
    assert line.kind == kind, line


@pytest.mark.parametrize("given", [
    NAMED | ZERO | {"min_snr_gamma": 5}, NAMED | ZERO | {"debiased_estimation_loss": True},
    ONETRAINER | {"rescale_noise_scheduler_to_zero_terminal_snr": True, "loss_weight_fn": "MIN_SNR_GAMMA",
                  "model_type": "STABLE_DIFFUSION_15"}])  # fmt: skip
def test_eps_with_zero_terminal_snr_is_refused_by_that_name(tmp_path, monkeypatch, capsys, given):
    """Its weights have no number there: it is no fault of ours that is shown."""
    monkeypatch.chdir(tmp_path)
    name = "theirs.json" if "model_type" in given else "theirs.toml"
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    Path(name).write_text(json.dumps(given) if name == "theirs.json" else lines)
    assert main.run(["convert", "config", name]) == 2
    assert "zero_terminal_snr is on" in capsys.readouterr().err
