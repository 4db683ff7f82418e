"""LoRAs that `generate` adds to a model: `use='{style.safetensors: 0.8, runs/dog: -0.5}'`, each with its strength.

Each one's difference is computed in float32 from the model's own weights, and their sum is added to these: the order
does not matter, and negative strengths take away.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from daguerre.assembly import base_digests
from daguerre.assembly.parts import Components
from daguerre.errors import UserError
from daguerre.generation.load import Loading
from daguerre.models.lora_files import contents, header, read
from daguerre.models.lora_files.addition import Addition, merged
from daguerre.models.weights import index
from daguerre.remote import local_copy


def added(loading: Loading, use: Mapping[str, float]) -> Loading:
    """The same weights with LoRAs: files, or folders of runs, by strength. UserError if one cannot be used."""
    if not use:
        return loading
    for place, strength in use.items():
        check_strength("use", place, strength)
    folders = {place: located(place) for place in use}
    files = {place: contents.find(folder) for place, folder in folders.items()}
    _check_apart(files)
    notices = [
        f"{place}: its LoRA alone is added, and not the networks that it has trained as a whole (pipeline/)"
        for place, folder in folders.items()
        if index.find(folder / "pipeline") is not None
    ]
    notices += _own(loading, files, use)
    digests = {place: _digest(file) for place, file in files.items()}
    described = " and ".join(f"{place} x {use[place]:g}" for place in use)
    provenance: dict[str, Any] = {"use": {place: [use[place], digests[place]] for place in use}}
    return replace(
        loading,
        description=f"{loading.description}, with {described}",
        provenance={**loading.provenance, **provenance},
        parts=lambda: _merged(loading.parts(), {files[place]: strength for place, strength in use.items()}, notices),
    )


def _check_apart(files: Mapping[str, Path]) -> None:
    """UserError for two places that are one file."""
    first: dict[Path, str] = {}
    for place, file in files.items():
        if (other := first.setdefault(file.resolve(), place)) != place:
            raise UserError(
                f"use: {other} and {place} are the same file, {file}: give it once, with the sum of both strengths",
                code="conflict",
                setting="use",
            )


def _own(loading: Loading, files: Mapping[str, Path], use: Mapping[str, float]) -> Iterator[str]:
    """A notice for each LoRA that the model has in it already, as the run that trained it."""
    run = loading.provenance.get("run")
    for place, file in files.items():
        if run is not None and file.resolve().is_relative_to(local_copy.located(run).resolve()):
            yield (
                f"{place}: {run} has this LoRA in it at strength 1, so with {use[place]:g} more it acts at "
                f"{1 + use[place]:g}; for another strength alone give the base in place of {run}: "
                f"daguerre generate BASE use='{{{place}: {use[place]:g}}}'"
            )


def check_strength(setting: str, place: str, strength: float, least: float = -math.inf) -> None:
    """UserError for NaN, infinity and what is below `least`, of the option that gives a strength for a place."""
    if not (math.isfinite(strength) and strength >= least):
        of_least = "" if least == -math.inf else f" from {least:g} on"
        raise UserError(
            f"{setting}: the strength of {place} is {strength:g}: give a number{of_least}, such as 0.8", setting=setting
        )


def located(place: str) -> Path:
    """The file or folder; of a run in an object store a copy of its adapter/."""
    folder = local_copy.located(place)
    if local_copy.origin(folder) is not None:
        local_copy.fetch_export(folder, "adapter")
    return folder


def _digest(file: Path) -> str:
    found = hashlib.sha256()
    for each in contents.files_of(file):
        found.update(each.read_bytes())
    return found.hexdigest()


@torch.no_grad()
def _merged(parts: Components, files: Mapping[Path, float], told: Iterable[str]) -> Components:
    """Adds to the weights of the networks, with a LoRA of the run itself already in them, and prints these lines."""
    asked: dict[tuple[str, str], list[tuple[Addition, float]]] = {}
    digests = {name: cache(partial(base_digests.of_network, own)) for name, own in parts.family.components.items()}
    notices = {  # of the base before anything is merged into it
        file: [*contents.notices(file), *_other_base(file, digests)] for file in files
    }
    for line in told:
        print(line)
    with parts.attached.merged():
        for file, strength in files.items():
            found = read.read(file, parts.family.components, tokens_apart=True)
            for component, additions in found.items():
                for each in additions:
                    asked.setdefault((component, each.name), []).append((each, strength))
            for notice in notices[file]:
                print(notice)
            print(f"{file} x {strength:g}: {', '.join(starmap(_described, found.items()))}")
        for (component, name), own in asked.items():
            weight = parts.family.components[component].get_parameter(name)
            weight.copy_(merged(weight, own, component))
    return parts


def _described(component: str, additions: Sequence[Addition]) -> str:
    """The layers of a component that a LoRA adds to, and their ranks."""
    ranks = sorted({each.rank for each in additions if each.rank is not None})
    of_ranks = f" of rank {' to '.join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))}" if ranks else ""
    return f"{len(additions):,} layers of {component}{of_ranks}"


def _other_base(file: Path, digests: Mapping[str, Callable[[], str]]) -> Iterator[str]:
    """A notice for each component that a LoRA was trained on with other weights: usual for fine-tunes of one model."""
    for component, base in header.base(contents.contents_of(file).metadata).items():
        if component in digests and base.get("digest") != digests[component]():
            yield (
                f"{file} was trained on another {component}, that of {base.get('place')}: it is applied in full, and "
                "its effect may differ"
            )
