"""Stability's single files of Stable Cascade's networks: read and written, equal to the bit both ways."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre.errors import UserError
from daguerre.families.cascade import keys, sizes
from daguerre.models.weights import beside, original_files
from daguerre.models.weights import files as weights_files
from daguerre.models.weights.opening import opened


def read(path: Path, component: str, ignored: Sequence[str] = ()) -> dict[str, Tensor]:
    """The weights of a component in diffusers' names; the dtype is the file's. `ignored` are patterns of tensors that
    are left out. UserError for a file of another."""
    with opened(path) as file:
        spelt = keys.unpacked(_names(path, file, ignored), component)
        check(path, component, [*spelt])
        own = keys.own_names(spelt)
        found: dict[str, Tensor] = {}
        for original, names in own.items():
            tensor = file.get_tensor(spelt[original])
            found |= zip(names, tensor.chunk(len(names)) if len(names) > 1 else (tensor,), strict=True)
        return found


def _names(path: Path, file: Any, ignored: Sequence[str]) -> list[str]:
    """The names in a file, but for those that are left out. UserError for one of quantised weights."""
    kept, _ = beside.without(dict.fromkeys(file.keys()), ignored)
    beside.check_names(path, kept)
    return [*kept]


def shapes(path: Path, component: str, ignored: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a component in diffusers' names, by the header alone."""
    with opened(path) as file:
        spelt = keys.unpacked(_names(path, file, ignored), component)
        check(path, component, [*spelt])
        found: dict[str, tuple[int, ...]] = {}
        for original, names in keys.own_names(spelt).items():
            shape = tuple(file.get_slice(spelt[original]).get_shape())
            found |= dict.fromkeys(names, (shape[0] // len(names), *shape[1:]) if len(names) > 1 else shape)
        return found


def component(path: Path) -> str | None:
    """The component whose weights a file of Stability's holds; None for any other file."""
    with opened(path) as file:
        found = keys.kind(keys.unpacked(file.keys(), "prior"))
    return found if found in keys.STAGES else None


def check(path: Path, component: str, names: list[str]) -> None:
    """UserError for a file of other weights than the component's."""
    if (found := keys.kind(names)) == component:
        return
    wanted = keys.STAGES[component]
    if found in keys.STAGES:
        raise UserError(
            f"{path} holds the weights of {keys.STAGES[found]}, and model.{component} must be {wanted}: give it as "
            f"model.{found} of the family that has it",
            code="conflict",
            setting=f"model.{component}",
        )
    what = f"holds {found}" if found else f"has {len(names)} tensors such as {', '.join(sorted(names)[:3])}"
    raise UserError(
        f"{path} {what}, and model.{component} must be {wanted} of Stable Cascade: give one of its files, or a folder "
        "in diffusers' layout",
        code="unsupported",
        setting=f"model.{component}",
    )


def write(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Writes a network's weights as Stability's file. `dtype` None keeps every dtype; UserError for float16, which
    overflows in these networks."""
    if dtype is torch.float16:
        raise UserError(
            "Stable Cascade's activations exceed the range of float16: choose dtype=bfloat16 or float32",
            code="unsupported",
            setting="dtype",
        )
    original_files.write(path, tensors, keys.links, dtype)


def chosen(folder: Path, component: str | None) -> str | None:
    """The network of Stable Cascade in `folder` that a file is to hold: the one that is asked for, or else the first of
    its usual ones; None for a folder of other models. UserError for a network that is not there."""
    index = folder / "model_index.json"
    named = weights_files.read_json(index).get("_class_name") if index.is_file() else None
    there = [name for name in keys.STAGES if (folder / name / "config.json").is_file()]
    pipelines = (None, "StableCascadePriorPipeline", "StableCascadeDecoderPipeline")
    of_cascade = bool(there) and named in pipelines
    if component is not None and (not of_cascade or component not in there):
        known = ", ".join(there) if of_cascade else "none: it is no model of Stable Cascade"
        raise UserError(
            f"component={component}: {folder.name} has no such network that a file of its own can hold; it has {known}",
            code="unknown",
            setting="component",
        )
    order = [name for name in ("prior", "decoder", "vqgan", "previewer", "effnet") if name in there]
    return component or (order[0] if of_cascade else None)


def scale_notice(folder: Path) -> list[str]:
    """A line where a Stage A has another scale than programs take for granted that read its file, which has none."""
    scale = weights_files.read_json(folder / "config.json").get("scale_factor")
    if scale == sizes.STAGE_A["scale_factor"]:
        return []
    return [
        f"this Stage A has the scale_factor {scale}, which a file cannot say: programs that read it take "
        f"{sizes.STAGE_A['scale_factor']:g}"
    ]
