"""Settings of objectives: what each starts from, and every refusal with its reason and way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from daguerre import plugins


def settings(name: str, **values):
    return plugins.find("objectives", name).Settings.model_validate(values)


@pytest.mark.parametrize(
    ("name", "schedule", "times"),
    [
        ("eps", "scaled_linear", "uniform"),
        ("x0", "scaled_linear", "uniform"),
        ("v", "scaled_linear", "uniform"),
        ("flow", "linear_flow", "logit_normal"),
        ("edm", "edm", "log_normal"),
    ],
)
def test_defaults(name: str, schedule: str, times: str):
    made = settings(name)
    assert (made.schedule.name, made.times.name) == (schedule, times)
    assert (made.weighting.name, made.noise.offset) == ("none", 0)


def test_a_section_without_a_name_starts_from_the_objectives_defaults():
    times = settings("edm", times={"std": 1.6}).times
    assert (times.name, times.mean, times.std) == ("log_normal", -1.2, 1.6)
    assert settings("edm", times={"name": "log_normal", "mean": -0.4}).times.std == 1.2
    assert settings("flow", schedule={"shift": 3.0}).schedule.name == "linear_flow"


def test_only_what_acts_is_dumped():
    dumped = settings("v", weighting={"name": "p2"}).model_dump()
    assert dumped["weighting"] == {"name": "p2", "p2_k": 1.0, "p2_gamma": 1.0}
    assert dumped["times"] == {"name": "uniform"}
    assert "sigma_max" not in dumped["schedule"]


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("v", {"weighting": {"snr_gamma": 5.0}}, "snr_gamma.*: no effect with 'none': .*set name to min_snr"),
        ("v", {"weighting": {"name": "min_snr", "p2_k": 2.0}}, "p2_k.*: no effect with 'min_snr'"),
        ("eps", {"times": {"mean": 0.0}}, "mean.*: no effect with 'uniform': .*set name to log_normal or logit_normal"),
        ("v", {"schedule": {"name": "cosine", "beta_end": 0.02}}, "beta_end.*: no effect with 'cosine'"),
        ("flow", {"schedule": {"zero_terminal_snr": True}}, "zero_terminal_snr.*: no effect with 'linear_flow'"),
        ("v", {"schedule": {"rho": 5.0}}, "rho.*: no effect with 'scaled_linear': .*set name to edm"),
        ("edm", {"schedule": {"shift": 2.0}}, "shift.*: no effect with 'edm'.*add ln shift to times.mean"),
        ("eps", {"schedule": {"zero_terminal_snr": True}}, "use objective v"),
        ("v", {"schedule": {"name": "edm"}}, "'v' is not defined on 'edm': .*scaled_linear or cosine"),
        ("flow", {"schedule": {"name": "cosine"}}, "set schedule.name to linear_flow"),
        ("edm", {"schedule": {"name": "scaled_linear"}}, "set schedule.name to edm"),
        ("edm", {"times": {"name": "uniform"}}, "a share of the schedule.*set times.name to log_normal"),
        ("edm", {"times": {"name": "logit_normal"}}, "set times.name to log_normal"),
        ("v", {"times": {"name": "log_normal"}}, "sigma, from 0 to infinity.*uniform or logit_normal"),
        ("v", {"schedule": {"beta_start": 0.02}}, "beta_start must be the smaller one"),
        ("edm", {"schedule": {"sigma_min": 90.0}}, "sigma_min must be the smaller one"),
        (
            "v",
            {"timestep_bias": {"multiplier": 2}},
            "multiplier.*: no effect with 'none': .*set name to .*earlier or later or range",
        ),
        ("v", {"timestep_bias": {"name": "range", "portion": 0.2}}, "portion.*: no effect with 'range'"),
        ("v", {"timestep_bias": {"name": "later", "begin": 5, "end": 9}}, "begin.*: no effect"),
        ("v", {"timestep_bias": {"name": "later", "multiplier": 0}}, "multiplier\n.*greater than 0"),
        ("v", {"timestep_bias": {"name": "later", "multiplier": -1}}, "multiplier\n.*greater than 0"),
        ("v", {"timestep_bias": {"name": "range", "begin": -1}}, "begin\n.*greater than or equal to 0"),
        ("v", {"timestep_bias": {"name": "range", "end": 1001}}, "timestep_bias.end is 1001: .*at most 1000"),
        ("edm", {"timestep_bias": {"name": "range", "end": 1001}}, "timestep_bias.end is 1001: .*at most 1000"),
        ("v", {"timestep_bias": {"name": "range", "begin": 9, "end": 9}}, "begin must be below end"),
        ("v", {"timestep_bias": {"name": "later", "portion": 0.0009}}, "less than one of 1000 steps: raise it"),
        (
            "v",
            {"schedule": {"num_train_timesteps": 50}, "timestep_bias": {"name": "range", "end": 51}},
            "there are 50 steps",
        ),
        ("v", {"noise": {"offset_per": "sample"}}, "offset_per: no effect while offset is 0"),
        ("v", {"noise": {"pyramid_size": 8}}, "pyramid_size: no effect while pyramid is 0"),
        ("v", {"weighting": {"name": "debiased", "snr_gamma": 2.0}}, "set name to min_snr or soft_min_snr"),
        ("v", {"sigma_data": 0.5}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(name: str, values: dict, says: str):
    with pytest.raises(ValidationError, match=says):
        settings(name, **values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "v",
            {"schedule": {"zero_terminal_snr": True, "shift": 2.0}, "weighting": {"name": "min_snr", "snr_gamma": 3}},
        ),
        ("x0", {"schedule": {"zero_terminal_snr": True}, "times": {"name": "logit_normal", "mean": 0.5}}),
        ("eps", {"schedule": {"name": "cosine", "shift": 2.0}}),
        ("flow", {"times": {"name": "uniform"}, "weighting": {"name": "p2"}}),
        ("edm", {"sigma_data": 1.0, "schedule": {"sigma_max": 160.0}, "noise": {"offset": 0.05}}),
        ("edm", {"timestep_bias": {"name": "range", "multiplier": 2, "begin": 200, "end": 500}}),
        ("eps", {"timestep_bias": {"name": "earlier", "multiplier": 0.5, "portion": 0.1}}),
        ("flow", {"noise": {"pyramid": 0.75, "pyramid_size": 8, "offset": 0.1, "offset_per": "sample"}}),
        ("v", {"weighting": {"name": "soft_min_snr", "snr_gamma": 4}, "noise": {"input_perturbation": 0.1}}),
    ],
)
def test_what_can_be_is_accepted_and_reads_its_own_dump(name: str, values: dict):
    made = settings(name, **values)
    assert type(made).model_validate(made.model_dump()) == made


def test_the_sections_in_the_documentation_are_accepted():
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)]
    made = [settings(block["objective"].pop("name"), **block["objective"]) for block in blocks]
    assert [one.name for one in made] == ["v", "flow", "eps", "output_preservation", "eps", "edm", "dpo", "lcm"]
    (scaled,) = (block["model"] for block in blocks if "model" in block)
    model = plugins.find("families", scaled["family"]).Settings
    model.model_validate(scaled | {"pretrained_model_name_or_path": "quickstart"})
