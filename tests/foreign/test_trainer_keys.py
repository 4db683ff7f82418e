"""Every key that another trainer's code reads stands by its name in a table, and is told as the table has it.

The lists in tests/support/trainer_keys were recorded by tools/trainer_keys.py, each with its usual value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from daguerre.errors import UserError
from daguerre.foreign import converters, peers, trainers
from daguerre.foreign.reader import Line, Reading, generic

RECORDED = Path(__file__).parents[1] / "support" / "trainer_keys"
TRAINERS = {
    "simpletuner": "SimpleTuner",
    "onetrainer": "OneTrainer",
    "ai_toolkit": "ai-toolkit",
    "kohya": "kohya's sd-scripts",
    "musubi": "musubi-tuner",
}
PROCESS = "config.process.0"
PLAIN: dict[str, dict[str, dict[str, Any]]] = {
    "simpletuner": {
        "full": {"model_family": "sdxl", "data_backends.0.id": "a", "data_backends.0.instance_data_dir": "images"},
        "lora": {"model_family": "sd1x", "model_type": "lora", "data_backends.0.id": "a"},
        "controlnet": {"model_family": "sd1x", "controlnet": True, "data_backends.0.id": "a"},
    },
    "onetrainer": {
        "full": {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "concepts.0.path": "images"},
        "sd": {"model_type": "STABLE_DIFFUSION_15", "concepts.0.path": "a", "concepts.1.path": "b"},
        "lora": {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15", "concepts.0.path": "images"},
        "embedding": {"training_method": "EMBEDDING", "model_type": "STABLE_DIFFUSION_15"},
    },
    "kohya": {
        "full": {"datasets.0.subsets.0.image_dir": "a", "datasets.0.resolution": 512},
        "plain": {"pretrained_model_name_or_path": "xl", "resolution": "512,512", "train_data_dir": "a"},
        "lora": {"network_module": "networks.lora", "datasets.0.subsets.0.image_dir": "a"},
        "token": {"token_string": "x", "datasets.0.subsets.0.image_dir": "a"},
    },
    "musubi": {
        "full": {"model_version": "original", "datasets.0.image_directory": "a"},
        "lora": {"network_module": "networks.lora_flux_2", "datasets.0.image_directory": "a"},
        "table": {"network_module": "networks.lora_zimage", "datasets.0.image_jsonl_file": "a"},
    },
    "ai_toolkit": {
        "full": {"job": "extension", f"{PROCESS}.model.is_xl": True, f"{PROCESS}.datasets.0.folder_path": "a"},
        "several": {f"{PROCESS}.datasets.0.folder_path": "a", f"{PROCESS}.datasets.1.folder_path": "b"},
        "lora": {f"{PROCESS}.network.linear": 8, f"{PROCESS}.datasets.0.folder_path": "a"},
        "controlnet": {f"{PROCESS}.adapter.type": "control_net", f"{PROCESS}.adapter.train": True},
        "embedding": {f"{PROCESS}.embedding.tokens": 2, f"{PROCESS}.datasets.0.folder_path": "a"},
    },
}
"""The least that a config of each kind says."""
BESIDE: dict[str, dict[str, Any]] = {
    "ema_update_interval": {"use_ema": True},
    "ema_warmup_steps": {"use_ema": True},
    "lr_scale_sqrt": {"lr_scale": True},
    "adaptive_noise_scale": {"noise_offset": 0.1},
    "noise_offset_random_strength": {"noise_offset": 0.1},
    "ip_noise_gamma_random_strength": {"ip_noise_gamma": 0.1},
    "multires_noise_discount": {"multires_noise_iterations": 6},
    "sample_definition_file_name": {"samples.0.prompt": "a red dog"},
    "lr_scheduler_timescale": {"lr_scheduler": "inverse_sqrt"},
    **{f"huber_{part}": {"loss_type": "huber"} for part in ("c", "schedule", "scale")},
}
"""What a key needs beside it, without which it says nothing."""
WHOLE = {
    "simpletuner": {"max_grad_norm"},  # numbers are clipped one by one there
    "onetrainer": set(),
    "ai_toolkit": set(),
    "kohya": set(),
    "musubi": set(),
}
"""What is lost of a config that says every key, each with its usual value."""


def recorded(name: str) -> dict[str, Any]:
    keys = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))["keys"]
    return {key.removeprefix("others."): value for key, value in keys.items() if not key.startswith("variables.")}


def placed(key: str) -> str:
    return key.replace("*", "0")


def other(usual: Any) -> Any:
    """A value that asks for something else."""
    if isinstance(usual, bool):
        return not usual
    if isinstance(usual, int | float):
        return usual * 2 + 1
    if isinstance(usual, list):
        return ["something"]
    return {"some": "thing"} if isinstance(usual, dict) else "something"


def told(name: str, kind: str, given: dict[str, Any]) -> dict[str, Line]:
    """What becomes of each key; empty where such a config makes no recipe."""
    reading = Reading(PLAIN[name][kind] | given)
    try:
        converters.CONVERT[TRAINERS[name]](reading)
    except UserError:
        return {}
    reading.finish()
    return {line.key: line for line in reading.lines}


ALL = [
    pytest.param(name, key, id=f"{name}-{key}", marks=[] if number % 5 == 0 else [pytest.mark.long])
    for name in TRAINERS
    for number, key in enumerate(recorded(name))
]


def is_group(name: str, key: str) -> bool:
    """True for what holds other keys, and is no value itself unless it is empty."""
    return any(each.startswith(f"{key}.") for each in recorded(name))


@pytest.mark.parametrize("name", TRAINERS)
def test_a_key_stands_in_one_table_alone_with_its_usual_value(name):
    keys, usual = peers.Keys.of(name), recorded(name)
    assert keys.names
    assert not set(keys.idle) & set(keys.lost)
    rows = yaml.safe_load((Path(trainers.__file__).parent / f"{name}_keys.yaml").read_text(encoding="utf-8"))
    listed = [each for table in rows["idle"].values() for row in table for each in peers.spread(row)]
    listed += [each for table in rows["lost"].values() for row in table for each in peers.spread(row)]
    assert sorted(listed) == sorted(set(listed))
    assert keys.version.split()[-1] in json.loads((RECORDED / f"{name}.json").read_text())["source"]
    for key, (values, _) in keys.lost.items():
        if usual.get(key) is not None:
            assert peers.is_usual(usual[key], values), key


def names_in(table: Any) -> Iterator[str]:
    """The keys of a document, several in one text by themselves."""
    for key, inner in table.items() if isinstance(table, dict) else ():
        yield from (each for name in str(key).split(", ") for each in peers.spread(name))
        yield from names_in(inner)
    for inner in table if isinstance(table, list) else ():
        yield from names_in({inner: None} if isinstance(inner, str) else inner)


@pytest.mark.parametrize("name", TRAINERS)
def test_no_pattern_stands_for_names(name):
    """A star is a number in a list, and nothing else."""
    folder = Path(trainers.__file__).parent
    for file in (f"{name}.yaml", f"{name}_keys.yaml"):
        document = yaml.safe_load((folder / file).read_text(encoding="utf-8"))
        starred = [key for key in names_in(document) if "*" in key]
        assert [key for key in starred if not re.fullmatch(r"(\w[\w.]*\.\*\.)+\w[\w.]*", key)] == []


@pytest.mark.parametrize(("name", "key"), ALL)
def test_a_recorded_key_is_told_by_its_name(name, key):
    keys, usual = peers.Keys.of(name), recorded(name)[key]
    for value in (usual, *(() if is_group(name, key) else (other(usual),))):
        lines = [told(name, kind, BESIDE.get(key, {}) | {placed(key): value}).get(placed(key)) for kind in PLAIN[name]]
        found = [(line.kind, line.text) for line in lines if line is not None]
        assert not [text for _, text in found if "reads no such key" in text], value
        if ("notice", "secrets stay in the environment") in found:
            continue
        if key in keys.idle and value is not None:
            assert ("notice", keys.idle[key]) in found
        if key in keys.lost:
            values, why = keys.lost[key]
            assert peers.is_usual(value, values) != (("refused", why) in found), value


@pytest.mark.parametrize("name", TRAINERS)
def test_usual_values_are_no_losses(name):
    usual = {placed(key): value for key, value in recorded(name).items() if not is_group(name, key)}
    usual = {key: value for key, value in usual.items() if value is not None}
    lost = {
        generic(line.key) for line in told(name, "full", usual | PLAIN[name]["full"]).values() if line.kind == "refused"
    }
    assert lost == WHOLE[name]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_key_that_nobody_reads_is_named_as_unknown_whatever_it_says(name):
    for value in (0, False, "", [], "x"):
        line = told(name, "full", {"no_such_key": value})["no_such_key"]
        assert line.kind == ("notice" if value == [] else "refused")
        assert "reads no such key" in line.text or value == []


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINERS)
def test_no_key_is_called_unknown_or_crashes_for_asking_for_nothing(name):
    for key in recorded(name):
        for kind in PLAIN[name] if not is_group(name, key) else ():
            for value in (0, False, "", []):
                line = told(name, kind, {placed(key): value}).get(placed(key))
                assert line is None or "reads no such key" not in line.text, (key, kind, value)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "refused"),
        ({"__version": 3}, "refused"),
        ({"timestep_distribution": "UNIFORM"}, "notice"),
        ({"__version": 4}, "notice"),
    ],
)
def test_a_weight_of_onetrainers_times_counts_in_files_of_its_versions(given, kind):
    """As its migrations have it: before version 4 there was one distribution, which this weight switched on."""
    lines = told("onetrainer", "full", {"noising_weight": 5.0, "noising_bias": 0.3, **given})
    assert lines["noising_weight"].kind == lines["noising_bias"].kind == kind


def test_flat_names_of_onetrainers_optimizer_are_those_of_an_earlier_version():
    lines = told("onetrainer", "full", {"optimizer": "ADAFACTOR", "optimizer_weight_decay": 0.5})
    for key in ("optimizer", "optimizer_weight_decay"):
        assert lines[key].kind == "refused"
        assert "earlier version" in lines[key].text
