"""training.weights_dtype: a net has its types before a device must have room for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_families
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_sd
from torch import nn

from daguerre import errors
from daguerre.assembly import parts
from daguerre.bench import variants
from daguerre.bench.options import Options
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.training.precision.quantized import QuantizedLinear


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a LoRA beside a base in bfloat16."""
    folder = tmp_path_factory.mktemp("base")
    base = f"pretrained_model_name_or_path={write_sd(folder / 'sd')}"
    data = ["data.source=folder", f"data.path={folder}", "data.resolution=16"]
    return ["sd15_lora", base, *data, "training.device=cpu", f"output_dir={folder}/runs"]


class Reached(errors.UserError):
    """The networks would be moved now."""


def train(recipe: list[str], place: Path) -> None:
    assert main.run(["train", *recipe, "run_name=stopped"]) == errors.REFUSED


def bench(recipe: list[str], place: Path) -> None:
    with pytest.raises(Reached):
        variants.Update(configs.load(recipe[0], recipe[1:]).config, Options(), place)


@pytest.mark.parametrize("verb", [train, bench])
def test_weights_have_their_types_before_they_are_moved(recipe, verb, monkeypatch, tmp_path):
    """A card of 12 GB has no room for SDXL's UNet in float32."""
    found: list[dict[str, torch.dtype]] = []

    def moved(network: nn.Module, device: torch.device) -> None:
        found.append({name: p.dtype for name, p in network.named_parameters()})
        raise Reached("that is enough", code="failed")

    monkeypatch.setattr(parts.encoders, "moved", moved)
    verb(recipe, tmp_path)
    (types,) = found
    added = {name for name in types if "lora_" in name}
    assert added
    assert {types[name] for name in added} == {torch.float32}
    assert {types[name] for name in types.keys() - added} == {torch.bfloat16}


@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.long), ["training.base_precision=int8"]])
def test_the_state_is_the_same_to_the_bit(recipe, more):
    """As of weights that are narrowed on their device; codes of few bits are made from the weights as they are."""
    config = configs.load(recipe[0], [*recipe[1:], *more]).config
    states = [parts.begin(config, parts.build(config, trains=trains)) for trains in (True, False)]
    one, other = (state.net.state_dict() for state in states)
    assert [(name, t.dtype) for name, t in one.items()] == [(name, t.dtype) for name, t in other.items()]
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(isinstance(module, QuantizedLinear) for module in states[0].net.modules()) == bool(more)


def test_a_denoiser_that_is_frozen_beside_new_tokens_is_stored_as_the_net_is(recipe):
    """On a card of 12 GB as in the plan; its encoders stay float32."""
    words = ["weights_dtype=bfloat16", "initializer_token=null"]
    given = [each for each in recipe[1:] if not each.startswith("data.source")]
    config = configs.load("sd15_textual_inversion", [*given, *words]).config
    for built in (parts.build(config, trains=True), parts.outline(config)):
        networks = built.family.components
        assert {p.dtype for p in networks["unet"].parameters()} == {torch.bfloat16}
        assert {p.dtype for p in networks["vae"].parameters()} == {torch.float32}
    drawn = parts.build(config).family.components
    assert {p.dtype for p in drawn["unet"].parameters()} == {torch.bfloat16}, "images are generated beside the same"
    assert {p.dtype for p in drawn["vae"].parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_language_model_is_stored_in_the_type_in_which_it_encodes(precision, tmp_path):
    """So `plan` counts it; and so it is built of files in bfloat16, while weights with more digits stay float32."""
    model = tiny_families.settings("z_image", tmp_path)
    given = [f"model.{name}={value}" for name, value in model.items() if name != "family"]
    given += ["data.source=folder", f"data.path={tmp_path}", "data.resolution=64", "training.device=cpu"]
    config = configs.load("z_image_lora", [*given, f"training.frozen_precision={precision}", "cache.path=null"]).config

    def types(made: parts.Components) -> set[torch.dtype]:
        layers = [m for m in made.family.components["text_encoder"].modules() if isinstance(m, nn.Linear)]
        return {layer.weight.dtype for layer in layers}

    narrow = {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert types(parts.outline(config)) == narrow
    assert types(parts.build(config, trains=True)) == {torch.float32}
    (file,) = (Path(model["pretrained_model_name_or_path"]) / "text_encoder").glob("*.safetensors")
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, {"format": "pt"})
    assert types(parts.build(config, trains=True)) == narrow
