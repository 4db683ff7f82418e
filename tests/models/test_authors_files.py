"""`convert export format=single_file` of every family whose authors publish their transformer as one file."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
from quick_cases import quick_where
from safetensors.torch import load_file, save_file

from daguerre import plugins
from daguerre.cli import main
from daguerre.errors import DONE, REFUSED
from daguerre.families.pretrained import catalogue
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.weights.original_names import NameTable


def published(name: str) -> bool:
    """Whether its facts have the names of its authors' file."""
    facts = getattr(plugins.find("families", name), "FACTS", {})
    return any(isinstance(each.names, NameTable) for each in facts.values())


NAMES = [
    name for name, own in catalogue.pretrained().items() if issubclass(own, TransformerSettings) and published(name)
]


@pytest.mark.parametrize(
    ("name", "prefix"),
    quick_where(
        lambda case: (case[1] is None) == (case[0] != "flux"), product(NAMES, [None, "model.diffusion_model."])
    ),
)
def test_the_file_of_a_pipeline_is_opened_as_the_same_networks(name, prefix, tmp_path, capsys):
    model = tiny_families.settings(name, tmp_path / "model")
    base, path = Path(model["pretrained_model_name_or_path"]), tmp_path / "own.safetensors"
    given = [] if prefix is None else [f"prefix={prefix}"]
    assert main.run(["convert", "export", str(base), "format=single_file", f"out={path}", *given]) == DONE
    assert "under the names that the model's authors gave them" in capsys.readouterr().out
    assert all(key.startswith(prefix or "") for key in load_file(path))
    (base / "transformer" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "weights.safetensors")
    module: Any = plugins.find("families", name)
    family = module.load(module.Settings.model_validate({**model, "transformer": str(path)}), 1)
    weights, found = load_file(tmp_path / "weights.safetensors"), family.components["transformer"].state_dict()
    assert family.pretrained.unread == []
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], value) for key, value in weights.items())


def test_a_tensor_in_a_part_that_is_read_is_named_and_parts_of_others_are_not(tmp_path):
    """What helped FLUX.3's authors to train it is no part of the network."""
    model = tiny_families.settings("flux3", tmp_path / "model")
    base, path = Path(model["pretrained_model_name_or_path"]), tmp_path / "own.safetensors"
    assert main.run(["convert", "export", str(base), "format=single_file", f"out={path}"]) == DONE
    more = {name: torch.zeros(2) for name in ("single_blocks.0.gate.weight", "repa_projectors.0.weight")}
    save_file(load_file(path) | more, path)
    module: Any = plugins.find("families", "flux3")
    (line,) = module.load(module.Settings.model_validate({**model, "transformer": str(path)}), 1).pretrained.unread
    assert f"{path} has single_blocks.0.gate.weight in a network that has no place for them here" in line


def test_animas_file_has_both_networks_behind_net(tmp_path):
    model = tiny_families.settings("anima", tmp_path / "model")
    base, path = Path(model["pretrained_model_name_or_path"]), tmp_path / "own.safetensors"
    assert main.run(["convert", "export", str(base), "format=single_file", f"out={path}", "dtype=bfloat16"]) == DONE
    found = load_file(path)
    assert {name.partition(".")[0] for name in found} == {"net"}
    assert found["net.llm_adapter.norm.weight"].dtype == torch.bfloat16
    files = [base / part / "diffusion_pytorch_model.safetensors" for part in ("transformer", "text_conditioner")]
    assert len(found) == sum(len(load_file(each)) for each in files)


def test_a_pipeline_of_an_unknown_class_is_refused(tmp_path, capsys):
    folder, out = tmp_path / "other", tmp_path / "own.safetensors"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    (folder / "transformer" / "config.json").write_text('{"_class_name": "SanaTransformer2DModel"}')
    assert main.run(["convert", "export", str(folder), "format=single_file", f"out={out}"]) == REFUSED
    assert "SanaPipeline" in capsys.readouterr().err
    given = ["convert", "export", str(folder), "format=single_file", f"out={out}", "prefix=model.diffusion_model."]
    assert main.run(given) == REFUSED
    assert "prefix=model.diffusion_model." in capsys.readouterr().err
