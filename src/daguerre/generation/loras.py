"""LoRAs that `generate` adds to a model: `use='{style.safetensors: 0.8, runs/dog: -0.5}'`, each with its strength.

Each one's difference is computed in float32 from the model's own weights, and their sum is added to these: the order
does not matter, and negative strengths take away.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre.build.parts import Components
from daguerre.errors import UserError
from daguerre.generation.load import Loading
from daguerre.models.lora_files import read
from daguerre.models.lora_files.addition import Addition


def added(loading: Loading, use: Mapping[str, float]) -> Loading:
    """The same weights with LoRAs: files, or folders of runs, by strength. UserError if one cannot be used."""
    if not use:
        return loading
    for place, strength in use.items():
        if not math.isfinite(strength):
            raise UserError(f"use: the strength of {place} is {strength}: give a number, such as 0.8", setting="use")
    files = {place: read.find(Path(place).expanduser()) for place in use}
    digests = {place: hashlib.sha256(file.read_bytes()).hexdigest() for place, file in files.items()}
    described = " and ".join(f"{place} x {use[place]:g}" for place in use)
    provenance: dict[str, Any] = {"use": {place: [use[place], digests[place]] for place in use}}
    return replace(
        loading,
        description=f"{loading.description}, with {described}",
        provenance={**loading.provenance, **provenance},
        parts=lambda: _merged(loading.parts(), {files[place]: strength for place, strength in use.items()}),
    )


@torch.no_grad()
def _merged(parts: Components, files: Mapping[Path, float]) -> Components:
    """Adds to the weights of the networks, with a LoRA of the run itself already in them."""
    asked: dict[tuple[str, str], list[tuple[Addition, float]]] = {}
    with parts.attached.merged():
        for file, strength in files.items():
            found = read.read(file, parts.family.components)
            for component, additions in found.items():
                for each in additions:
                    asked.setdefault((component, each.layer), []).append((each, strength))
            counts = ", ".join(f"{len(additions):,} layers of {component}" for component, additions in found.items())
            print(f"{file} x {strength:g}: {counts}")
        for (component, layer), own in asked.items():
            weight = _weight(parts, component, layer)
            before = weight.float()
            changes = [each.to(weight.device).weight(before, strength) - before for each, strength in own]
            weight.copy_(before + sum(changes[1:], changes[0]))
    return parts


def _weight(parts: Components, component: str, layer: str) -> Tensor:
    weight = parts.family.components[component].get_submodule(layer).weight
    assert isinstance(weight, Tensor)
    return weight
