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
    networks = parts.family.components
    sums: dict[tuple[str, str], Tensor] = {}
    with parts.attached.merged():
        for file, strength in files.items():
            counts = []
            for component, additions in read.read(file, networks).items():
                for each in additions:
                    weight = _weight(parts, component, each.layer)
                    own = {name: value.to(weight.device) for name, value in each.factors.items()}
                    change = replace(each, factors=own).weight(weight, strength) - weight.float()
                    place = component, each.layer
                    sums[place] = sums[place] + change if place in sums else change
                counts.append(f"{len(additions):,} layers of {component}")
            print(f"{file} x {strength:g}: {', '.join(counts)}")
        for (component, layer), change in sums.items():
            weight = _weight(parts, component, layer)
            weight.copy_(weight.float() + change)
    return parts


def _weight(parts: Components, component: str, layer: str) -> Tensor:
    weight = parts.family.components[component].get_submodule(layer).weight
    assert isinstance(weight, Tensor)
    return weight
