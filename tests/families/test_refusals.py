"""The contract of every family with a transformer, found by its file: what does not belong to it is refused in words,
before anything is trained or generated. Each family's own ways to get it wrong stand with its tiny networks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import family_recipes
import pytest
import reference_pictures
from wrong import OTHERS, Others, Wrong

from daguerre import errors
from daguerre.cli import main

COMMON = {
    "float16": Wrong("training.mixed_precision=fp16", "exceed the range of float16"),
    "sides": Wrong("sampling.num_images=1 sampling.height=62", "sides that are multiples of"),
    "LoRA": Wrong("adapter.name=lora init_from={lora_of_sd}", "was made for another model"),
    "targets": Wrong("adapter.name=lora adapter.targets=conv", "no layer of the LoRA's targets (conv)"),
    "ControlNet": Wrong("adapter.name=controlnet adapter.condition=canny", "a ControlNet cannot be used here"),
    "file": Wrong("model.transformer={no_network}", "no_network.safetensors"),
    "captions": Wrong("model.max_sequence_length=0", "model.max_sequence_length"),
    "folder of references": Wrong("data.reference_dir=nowhere", "reads a stored reference image"),
    "dropped references": Wrong("data.reference_dropout=0.5", "reference image"),
    "images' float16": Wrong("generate mixed_precision=fp16", "float16"),
    "images' sides": Wrong("generate height=62", "multiples of"),
    "images' LoRA": Wrong("generate use={{{lora_of_sd}: 1}}", "another model"),
    "images' reference": Wrong("generate reference=nowhere.png", "nowhere.png cannot be read"),
}
"""Of every family, with a text encoder, autoencoder and transformer of another model, which its own table has; where a
family needs other words for one of these ways, its own table has these, too."""
OWN = {"text encoder", "autoencoder", "transformer"}
PRETRAINED = "pretrained_model_name_or_path"
EACH = 4
"""Every fourth way is a quick test, others with each family."""


def cases() -> list[object]:
    """Each family with its own ways and those that are common."""
    found: list[object] = []
    for place, name in enumerate(family_recipes.WITH_TRANSFORMER):
        own: dict[str, Wrong] = import_module(f"tiny_families.{name}").WRONG
        assert own.keys() >= OWN, f"{name} has no way of its own for {OWN - own.keys()}"
        for number, (way, wrong) in enumerate({**COMMON, **own}.items()):
            marks = () if (number + place) % EACH == 0 else pytest.mark.long
            found.append(pytest.param(name, wrong, id=f"{name}-{way}", marks=marks))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Others]]:
    """A family's recipe, and what belongs to other models; each is written once."""
    place, recipes = tmp_path_factory.mktemp("refused"), dict[str, tuple[Path, Others]]()
    others = Others(place, OTHERS)

    def find(name: str) -> tuple[Path, Others]:
        if name not in recipes:
            folder = place / name
            own = getattr(import_module(f"tiny_families.{name}"), "OTHERS", {})
            recipes[name] = family_recipes.write(name, folder), Others(folder, own, others)
        return recipes[name]

    return find


@pytest.mark.parametrize(("name", "wrong"), cases())
def test_it_is_refused_in_words(name, wrong, made, tmp_path, capsys, monkeypatch):
    reference_pictures.small_rule(monkeypatch, name, family_recipes.AREAS[name], family_recipes.AREAS[name])
    recipe, others = made(name)
    given = re.split(r" (?![^{]*})", wrong.words.format_map(others))  # not within {...}
    if given[0] == "generate":
        arguments = generating(json.loads(recipe.read_text())["model"], given[1:], tmp_path / "out")
    else:
        arguments = ["train", str(recipe), f"output_dir={tmp_path}", *given]
    assert main.run(arguments) == errors.REFUSED
    said = " ".join(capsys.readouterr().err.split())
    assert wrong.said in said
    assert "Traceback" not in said


def generating(model: dict[str, object], given: list[str], out: Path) -> list[str]:
    """The command that draws one image by a family's pipeline, read as the recipe says."""
    base = str(model[PRETRAINED])
    read = [
        f"model.{key}={value}" for key, value in model.items() if key not in ("family", "pretrained_model_name_or_path")
    ]
    sides = {"height", "width"} - {each.partition("=")[0] for each in given}
    size = [f"{side}={family_recipes.SIDE_PX}" for side in sides]
    return ["generate", base, "prompt=a fox", *size, "num_inference_steps=2", f"out={out}", *read, *given]
