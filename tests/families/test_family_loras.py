"""The contract of every family to which a LoRA can be added, found by its file: what is written, in each layout, is
read back as the same addition, and facts name the layers that can be one product."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny_families
import torch
from quick_cases import quick_where
from torch import Tensor

from daguerre import plugins
from daguerre.adapters import lora
from daguerre.adapters.adapter import attach
from daguerre.families.pretrained import bases, catalogue
from daguerre.models.export.about import UNKNOWN
from daguerre.models.family import Family
from daguerre.models.lora_files.addition import DIFFUSERS_FILE, KOHYA_FILE, merged
from daguerre.models.lora_files.read import read
from daguerre.models.network import facts_of
from daguerre.models.weights import architectures
from daguerre.objectives import eps
from daguerre.samplers.settings import SamplingSettings

SIZE = (3, 64, 64)


def extensible(name: str) -> bool:
    settings: Any = plugins.find("families", name).Settings
    return any(spec.role == "denoiser" and spec.extensible for spec in settings.components.values())


NAMES = [name for name in catalogue.pretrained() if extensible(name)]


@torch.no_grad()
def prediction(family: Family, net: torch.nn.Module) -> Tensor:
    cond, _ = family.encode_prompts(tiny_families.asked(family, ["a red dog", "a"]), SIZE)
    x = torch.randn(2, *family.latent_shape(SIZE), generator=torch.Generator().manual_seed(2))
    y: Tensor = net.eval()(x, torch.tensor([0.3, 0.7]), {**cond, "guidance": torch.tensor([1.0, 3.5])})
    return y


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Family]:
    """Each family by its name, with tiny networks; tests take a copy of it."""
    return request.param, tiny_families.load(request.param, tmp_path_factory.mktemp(request.param))


def test_each_file_is_read_back_as_the_same_addition(loaded: tuple[str, Family], tmp_path: Path):
    name, family = loaded[0], copy.deepcopy(loaded[1])
    # peft cannot add to a convolution of several groups and merge
    grouped = any(getattr(layer, "groups", 1) > 1 for net in family.components.values() for layer in net.modules())
    settings = lora.Settings(rank=2, alpha=3.0, targets="attention" if grouped else "all")
    family = family.training(settings.reaches(family.trainable))
    parts = attach({"lora": settings}, family, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in parts.net.named_parameters():
            if "lora_B" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    (trainable,) = parts.trainables.values()
    assert isinstance(trainable, lora.LoRA)
    adapter = tmp_path / "adapter"
    lines = trainable.export(adapter, eps.build(eps.Settings()), SamplingSettings(), UNKNOWN)
    kind = getattr(diffusers, plugins.find("families", name).Settings.pipeline_class, None)
    loads = hasattr(kind, "load_lora_weights")
    assert ("pipe.load_lora_weights(" in (adapter / "README.md").read_text()) == loads
    assert any("reads no LoRA: `daguerre convert export RUN format=diffusers" in line for line in lines) != loads
    expected = prediction(family, parts.net)
    named = all(family.networks[component].facts.names is not None for component in trainable.networks)
    files = {DIFFUSERS_FILE, KOHYA_FILE} if named else {DIFFUSERS_FILE}
    assert {path.name for path in adapter.glob("*.safetensors")} == files
    plain = prediction(loaded[1], loaded[1].net)
    assert (plain - expected).abs().max() > 1e-2, "it changes something"
    for file in files:
        fresh = copy.deepcopy(loaded[1])
        with torch.no_grad():
            for component, additions in read(adapter / file, fresh.components).items():
                for each in additions:
                    weight = fresh.components[component].get_parameter(each.name)
                    weight.copy_(merged(weight, [(each, 1.0)], component))
        torch.testing.assert_close(prediction(fresh, fresh.net), expected, rtol=1e-3, atol=1e-4)


def test_facts_name_the_layers_that_read_one_input(loaded: tuple[str, Family]):
    """With a LoRA they are one product: layers of one module and one shape, in the order in which they are called."""
    family = copy.deepcopy(loaded[1])
    networks = [network for network in family.networks.values() if network.trainable]
    calls: dict[Any, Any] = {}  # the inputs are kept, so that no other tensor gets their place in memory

    def keep(layer: Any, inputs: Any) -> None:
        calls.setdefault(layer, (parents[layer], id(inputs[0]), layer.weight.shape, inputs))

    parents = {
        layer: parent
        for network in networks
        for parent in network.module.modules()
        for layer in parent.children()
        if isinstance(layer, torch.nn.Linear)
    }
    for layer in parents:
        layer.register_forward_pre_hook(keep)
    prediction(family, family.net)
    together: dict[Any, list[Any]] = {}
    for layer, (*alike, _) in calls.items():
        together.setdefault(tuple(alike), []).append(layer)
    called = [group for network in networks for group in network.readers if calls.keys() >= {*group}]
    declared = [group for group in called if len({layer.weight.shape for layer in group}) == 1]
    assert {tuple(group) for group in declared} == {tuple(group) for group in together.values() if len(group) > 1}


QUICK = {"sd1", "cascade_c", "flux1_dev", "anima"}
"""Small networks of every family have written files of LoRAs above."""


@pytest.mark.parametrize("name", quick_where(QUICK.__contains__, architectures.names()))
def test_files_of_loras_are_converted_for_every_published_model(name: str):
    """By its numbers alone: its denoiser is built without memory, and other programs have names for its layers."""
    found = bases.networks(architectures.FOLDER / name)
    denoisers = [network for component, network in found.items() if not component.startswith("text_encoder")]
    assert {facts_of(network).names is not None for network in denoisers} == {True}
