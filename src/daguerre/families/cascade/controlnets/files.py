"""Files of ControlNets of Stage C, in the names that Stability publishes: read and written, equal to the bit both ways.

A file does not say before which blocks its residuals are added: that is in the header of ours, and in Stability's
configs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from daguerre import documents
from daguerre.errors import UserError
from daguerre.families.cascade import keys, sizes
from daguerre.families.cascade.controlnets.stage_c import StageCControlNet
from daguerre.models.controlnets import places
from daguerre.models.controlnets.controlled import Reads, Wanted
from daguerre.models.export.about import UNKNOWN, About
from daguerre.models.lora_files import header
from daguerre.models.weights import beside, resolve, seals
from daguerre.models.weights import load as weights_load
from daguerre.models.weights.files import read_file, read_json, write_compared
from daguerre.models.weights.opening import opened

_BLOCKS, _FACTOR = "daguerre.blocks", "daguerre.latent_factor"
_ARCHITECTURE = "stable-cascade-v1-stage-c/controlnet"
_AT_EACH_END = 4
"""Blocks with a residual at either end of Stage C, as Stability has it; from one to the next is a 16th of all."""


def usual_blocks(count: int) -> tuple[int, ...]:
    """The controlled blocks of a Stage C with so many residual blocks, as in Stability's ControlNets for 64."""
    step = max(1, count // 16)
    first = {step * i for i in range(_AT_EACH_END) if step * i < count}
    return tuple(sorted(first | {count - 1 - number for number in first}))


def read(
    place: str, wanted: Wanted, widths: Sequence[int], known: Mapping[int, Reads], ignored: Sequence[str] = ()
) -> Any:
    """The ControlNet of a place, for a Stage C whose residual blocks have these widths. `known` are channels of
    pictures, `ignored` patterns of tensors that are left out. UserError for another file, or one that does not fit."""
    path = places.find(place)
    if path.is_dir():
        what = read_json(path / "config.json").get("_class_name") or "no network"
        raise UserError(f"{path} is a {what}, not a ControlNet for Stage C of Stable Cascade", code="unsupported")
    with opened(path) as file:
        _check_kind(path, file.keys())
        names, _ = beside.without(dict.fromkeys(file.keys()), ignored)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        metadata = file.metadata() or {}
    numbers = told(shapes)
    if numbers["channels"] not in known:
        able = ", ".join(f"{count} ({reads})" for count, reads in known.items())
        raise UserError(
            f"{path} reads pictures of {numbers['channels']} channels, and there are: {able}", code="unsupported"
        )
    blocks = chosen_blocks(wanted, len(widths)) or _named(path, metadata, len(numbers["widths"]), len(widths))
    fitting = [widths[number] for number in blocks]
    if fitting != numbers["widths"]:
        raise UserError(
            f"{path} is a ControlNet for another Stage C: it adds {len(numbers['widths'])} residuals of "
            f"{_listed(numbers['widths'])} channels, and the {len(fitting)} blocks here have {_listed(fitting)} "
            "(adapter.blocks says which)",
            code="unsupported",
        )
    reads: Reads = known[numbers["channels"]]
    factor = wanted.latent_factor or float(metadata.get(_FACTOR, 0)) or None
    found: Any = weights_load.seeded(
        lambda: StageCControlNet(**numbers, blocks=blocks, reads=reads, latent_factor=factor or 2.0), 0, "adapter"
    )
    if not resolve.without_weights():
        seals.check(path)
        tensors, _ = beside.without(read_file(path), ignored)
        weights_load.fill(found, tensors, path)
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise UserError(f"{place}: {name} has NaN or infinity in it", code="damaged")
    return found


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, dict.fromkeys(numbers)))


def _check_kind(path: Path, names: Sequence[str]) -> None:
    if any(name.startswith("projections.") for name in names):
        return
    found = keys.kind(names)
    of_unet = ("control_model.", "input_hint_block.", "controlnet_cond_embedding.")
    what = f"the weights of {keys.STAGES[found]}" if found in keys.STAGES else found
    if any(name.startswith(of_unet) for name in names):
        what = "a ControlNet of Stable Diffusion"
    raise UserError(
        f"{path} holds {what or f'tensors such as {sorted(names)[0]}'}, not a ControlNet for Stage C of Stable Cascade",
        code="unsupported",
    )


def _named(path: Path, metadata: Mapping[str, str], count: int, every: int) -> tuple[int, ...]:
    """The blocks of so many residuals: by the header, or by what is usual."""
    try:
        found = documents.parse(metadata.get(_BLOCKS, "null"))
    except ValueError:
        found = None
    if isinstance(found, list) and all(isinstance(number, int) for number in found):
        return tuple(found)
    for blocks in (usual_blocks(every), tuple(range(every))):
        if len(blocks) == count:
            return blocks
    raise UserError(
        f"{path} has {count} residuals and does not say before which of the {every} blocks they are added: set "
        "adapter.blocks, as controlnet_blocks of its config has it; `daguerre generate` takes that config as a recipe",
        code="missing",
        setting="adapter.blocks",
    )


def chosen_blocks(wanted: Wanted, count: int) -> tuple[int, ...] | None:
    """The blocks that are asked for, of so many; None where none are. UserError for blocks that are not there, or
    twice."""
    if wanted.blocks is None or wanted.blocks == "all":
        return tuple(range(count)) if wanted.blocks else None
    blocks = wanted.blocks
    if odd := [number for number in blocks if number >= count]:
        raise UserError(
            f"adapter.blocks: this Stage C has {count} residual blocks, 0 to {count - 1}, and no number {odd[0]}",
            setting="adapter.blocks",
        )
    if len({*blocks}) < len(blocks):
        raise UserError("adapter.blocks: a block is there twice", setting="adapter.blocks")
    return blocks


def told(shapes: sizes.Shapes) -> dict[str, Any]:
    """Numbers of a ControlNet with weights of these shapes, but its blocks."""
    count = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("projections."))
    found: dict[str, Any] = {"widths": [shapes[f"projections.{i}.2.weight"][0] for i in range(count)]}
    if "backbone.0.0.weight" in shapes:
        of_backbone = {name: shape for name, shape in shapes.items() if name.startswith("backbone.")}
        found |= {"bottleneck": "effnet", **sizes.backbone_told(of_backbone)}
        return found | {"channels": shapes["backbone.0.0.weight"][1]}
    wide, channels = shapes["backbone.0.weight"][:2]
    hidden = [name for name in shapes if name.startswith("backbone.") and name.endswith(".blocks.0.weight")]
    if not hidden:
        return found | {"bottleneck": "simple", "channels": channels}
    last = shapes[f"backbone.{3 + len(hidden)}.weight"]
    found |= {"bottleneck": "large", "channels": channels, "wide_channels": wide, "depth": len(hidden)}
    return found | {"hidden_channels": last[1], "feature_channels": last[0]}


def write(folder: Path, network: Any, about: About = UNKNOWN) -> None:
    """Fills an empty folder with the file, which is read back and compared with the weights, to the bit; OSError where
    they differ. `about` goes into the header."""
    metadata = header.modelspec({"controlnet": network}, about, "controlnet")
    metadata |= {
        "modelspec.architecture": _ARCHITECTURE,
        "modelspec.implementation": "https://github.com/Stability-AI/StableCascade",
        _BLOCKS: json.dumps(list(network.config.blocks)),
    }
    if network.config.reads == "latent":
        metadata[_FACTOR] = str(network.config.latent_factor)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_compared(folder / places.SINGLE_FILE, own, metadata)
