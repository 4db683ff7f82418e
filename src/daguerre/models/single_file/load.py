"""Checkpoints of one file in the original layout of Stable Diffusion 1.x, 2.x and SDXL, in diffusers' layout.

`.safetensors`, and on request `.ckpt`, which is read as tensors alone (models/weights/pickled.py). Each is converted
once and kept in the user's cache; the type of its numbers stays as it is. What is no such model is refused by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.safetensors import encode
from daguerre.errors import UserError
from daguerre.models.single_file import configs
from daguerre.models.single_file import layout as single_file_layout
from daguerre.models.single_file.configs import Numbers, squeezed
from daguerre.models.single_file.keys import Link, with_wrapper
from daguerre.models.single_file.layout import LAYOUTS
from daguerre.models.tokenizers import clip_vocabulary
from daguerre.models.weights import conversion_cache, pickled

PICKLED = (".ckpt", ".bin", ".pt", ".pth")
WEIGHTS = {
    "unet": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
    "text_encoder_2": "model.safetensors",
}


def folder(path: Path, pickled: bool) -> Path:
    """The same model in diffusers' layout, made once and kept in the user's cache.

    It holds the networks that the file holds; a UNet alone gives a folder with `unet`. UserError says why not.
    """
    _refuse_pickled(path, pickled)

    def make(fresh: Path) -> None:
        print(f"converting {path} to diffusers' layout in {conversion_cache.root()}, once", file=sys.stderr, flush=True)
        for notice in convert(path, fresh):
            print(f"{path.name}: {notice}", file=sys.stderr, flush=True)

    return conversion_cache.once([path], make)


def components(path: Path) -> tuple[str, ...]:
    """Which networks a .safetensors file holds in the original layout; () if it is one network in diffusers' names."""
    with _opened(path) as file:
        return single_file_layout.components(single_file_layout.tidy(dict.fromkeys(file.keys())))


def network_tensors(path: Path, component: str, names: Iterable[str], pickled: bool) -> dict[str, Tensor]:
    """One network's weights in `names`, its own, out of a file in the original layout or in the network's names.

    What is not there is left out; the type of numbers is the file's. UserError for what is no such network.
    """
    _refuse_pickled(path, pickled)
    tensors, _ = _read(path)
    names = list(names)
    if not (found := single_file_layout.components(tensors)):
        return _in_own_names(tensors, names)
    if component not in found:
        raise UserError(f"{path} holds no {component}; it holds: {', '.join(found)}")
    layout = single_file_layout.layout_of(tensors) or "sd1"
    place = LAYOUTS[layout][component]
    links = [link for link in place.links(names) if place.prefix + link.original in tensors]
    return {name: part for link in links for name, part in unpacked(link, tensors[place.prefix + link.original])}


def _in_own_names(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """With or without the wrapper that text encoders lost in transformers 5.6."""
    wrapped = {with_wrapper(name): tensor for name, tensor in tensors.items()}
    both = {**wrapped, **tensors}
    found = {name: both.get(name, both.get(with_wrapper(name))) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _refuse_pickled(path: Path, allowed: bool) -> None:
    if path.suffix not in (".safetensors", *PICKLED):
        raise UserError(f"{path}: a checkpoint of one file is a .safetensors, or an old {', '.join(PICKLED)}")
    if path.suffix in PICKLED and not allowed:
        raise UserError(
            f"{path} is pickled: set model.pickled_weights=true to have its tensors read (nothing in it is run), or "
            "take the model's .safetensors"
        )


def convert(path: Path, fresh: Path, weights: str = "raw", prediction_type: str | None = None) -> list[str]:
    """Fills the empty folder `fresh`; what a person must be told.

    `weights`: `ema` takes the averaged ones of a file that holds both. `prediction_type` goes into the scheduler's
    config in place of what the file says.
    """
    tensors, metadata = _read(path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if (what := single_file_layout.refused(shapes)) is not None:
        raise UserError(f"{path} is {what}: only Stable Diffusion 1.x, 2.x and SDXL base models are read from one file")
    if not single_file_layout.components(tensors):
        raise UserError(
            f"{path} is not in the original layout of Stable Diffusion; it has {len(tensors)} tensors such as "
            f"{', '.join(sorted(tensors)[:3])}. One network in diffusers' names is given as model.unet, model.vae ..."
        )
    tensors, notices = _chosen(tensors, weights, path)
    try:
        numbers, more = configs.of_file(tensors, metadata, prediction_type)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    used = _write_networks(path, fresh, tensors, numbers)
    if missing := [name for name in LAYOUTS[numbers.layout] if name not in numbers.configs]:
        more.append(f"it holds no {', '.join(missing)}: give it as model.unet or model.vae beside a whole base model")
    if rest := single_file_layout.unused(tensors, used):
        more.append(f"{len(rest)} tensors belong to none of its networks and are left out: {', '.join(rest[:3])} ...")
    return [*notices, *more, *_write_texts(fresh, numbers, tensors)]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tidy tensors, mapped from the file, and its metadata."""
    if path.suffix in PICKLED:
        return single_file_layout.tidy(pickled.tensors(path)), {}
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return single_file_layout.tidy(tensors), file.metadata() or {}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}. Copy it anew") from error


def _chosen(tensors: dict[str, Tensor], weights: str, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Plain or averaged weights of the UNet, where a file holds both."""
    averages = {
        name: tensors[averaged]
        for name in tensors
        if name.startswith(single_file_layout.UNET) and (averaged := single_file_layout.averaged_name(name)) in tensors
    }
    if weights == "ema":
        if not averages:
            raise UserError(f"weights=ema: {path} holds no averaged weights beside the plain ones; leave weights out")
        return tensors | averages, []
    if averages:
        return tensors, ["it holds averaged weights, too; the plain ones are taken (convert model: weights=ema)"]
    return tensors, []


def _write_networks(path: Path, fresh: Path, tensors: Mapping[str, Tensor], numbers: Numbers) -> set[str]:
    """Every network with its config; the names that were used."""
    used = set()
    for component, config in numbers.configs.items():
        place = LAYOUTS[numbers.layout][component]
        wanted = configs.shapes(component, config)
        links = place.links(wanted)
        found: dict[str, Tensor] = {}
        for link in links:
            name = place.prefix + link.original
            if name not in tensors:
                raise UserError(f"{path} lacks {name} of its {component}: it is incomplete, take another copy")
            used.add(name)
            for own, part in unpacked(link, tensors[name]):
                if squeezed(tuple(part.shape)) != squeezed(wanted[own]):
                    raise UserError(f"{path}: {name} gives a {own} of {list(part.shape)}, not {list(wanted[own])}")
                found[own] = part.reshape(wanted[own])
        if component.startswith("text_encoder"):  # as the hub's files name them, whatever transformers' version
            found = {with_wrapper(name): tensor for name, tensor in found.items()}
        (fresh / component).mkdir()
        _write_json(fresh / component / "config.json", config)
        write_durably(fresh / component / WEIGHTS[component], encode(found))
    return used


def unpacked(link: Link, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors that one of the original layout is made of, by their own names; nothing is copied."""
    if link.form == "fused":
        return list(zip(link.names, tensor.chunk(len(link.names)), strict=True))
    if link.form == "convolution":
        return [(link.names[0], tensor.reshape(squeezed(tuple(tensor.shape))))]
    return [(link.names[0], tensor.T if link.form == "transposed" else tensor)]


def _write_texts(fresh: Path, numbers: Numbers, tensors: Mapping[str, Tensor]) -> list[str]:
    """Tokenizers, scheduler and index; what is missing."""
    notices = []
    for component in [name for name in numbers.configs if name.startswith("text_encoder")]:
        name = component.replace("text_encoder", "tokenizer")
        tokens = numbers.configs[component]["vocab_size"]
        kept = numbers.tokenizers.get(name, {})
        if not kept or ("pad" in kept and tokens != clip_vocabulary.TOKENS):
            notices.append(f"it has no {name} for the {tokens} tokens of its {component}: give model.{name}=PLACE")
            continue
        (fresh / name).mkdir()
        for file, content in configs.tokenizer_files(kept).items():
            (fresh / name / file).write_bytes(content)
    (fresh / "scheduler").mkdir()
    _write_json(fresh / "scheduler" / "scheduler_config.json", numbers.scheduler)
    unused = {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    added = unused if numbers.layout != "sdxl" else {}
    _write_json(fresh / "model_index.json", {**added, **numbers.index, "_diffusers_version": version("diffusers")})
    return notices


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
