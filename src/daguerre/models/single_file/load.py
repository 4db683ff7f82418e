"""Reads checkpoints of one file in the original layout of Stable Diffusion 1.x, 2.x and SDXL.

`.safetensors`, and on request `.ckpt`, which is read as tensors alone (models/weights/pickled.py). Each is converted to
diffusers' layout once and kept in the user's cache, its dtype unchanged. Other models are refused by name.
"""

import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.safetensors import encode
from daguerre.errors import UserError
from daguerre.models import tokenizers
from daguerre.models.single_file import configs, layout
from daguerre.models.single_file.configs import PipelineConfigs, squeezed
from daguerre.models.single_file.keys import Link, with_wrapper
from daguerre.models.single_file.layout import LAYOUTS
from daguerre.models.weights import conversion_cache, pickled
from daguerre.models.weights.files import opened, write_json

PICKLED = (".ckpt", ".bin", ".pt", ".pth")


def folder(path: Path, pickled: bool) -> Path:
    """The same model in diffusers' layout, made once and kept in the user's cache.

    It holds the networks that the file holds; a UNet alone gives a folder with `unet`. UserError says why not.
    """
    _check_suffix(path, pickled)

    def make(fresh: Path) -> None:
        print(f"converting {path} to diffusers' layout in {conversion_cache.root()}, once", file=sys.stderr, flush=True)
        for notice in convert(path, fresh):
            print(f"{path.name}: {notice}", file=sys.stderr, flush=True)

    return conversion_cache.once([path], make)


def network_tensors(path: Path, component: str, names: Iterable[str], pickled: bool) -> dict[str, Tensor]:
    """One network's weights in its own `names`, from a file in the original layout or in those names.

    What is not there is left out; the dtype is the file's. UserError for a file without such a network.
    """
    _check_suffix(path, pickled)
    tensors, _ = _read(path)
    if not (found := layout.components(tensors)):
        # With or without the wrapper that text encoders lost in transformers 5.6.
        both = {with_wrapper(name): tensor for name, tensor in tensors.items()} | tensors
        own = {name: both.get(name, both.get(with_wrapper(name))) for name in names}
        return {name: tensor for name, tensor in own.items() if tensor is not None}
    if component not in found:
        raise UserError(
            f"{path} has no {component}; it has: {', '.join(found)}", code="missing", setting=f"model.{component}"
        )
    place = LAYOUTS[layout.layout_of(tensors) or "sd1"][component]
    links = [link for link in place.links(names) if place.prefix + link.original in tensors]
    return {name: part for link in links for name, part in _unpacked(link, tensors[place.prefix + link.original])}


def _check_suffix(path: Path, pickled_weights: bool) -> None:
    if path.suffix not in (".safetensors", *PICKLED):
        raise UserError(
            f"{path}: a single-file checkpoint ends with .safetensors or, if it is an old one, with "
            f"{', '.join(PICKLED)}",
            code="unsupported",
        )
    if path.suffix in PICKLED and not pickled_weights:
        raise UserError(
            f"{path} is pickled: set model.pickled_weights=true to read only its tensors (no code from it is run), "
            "or use the model's .safetensors",
            setting="model.pickled_weights",
        )


def convert(path: Path, fresh: Path, weights: str = "raw", prediction_type: str | None = None) -> list[str]:
    """Fills the empty folder `fresh`; returns messages for the user.

    `weights`: `ema` takes the averaged ones of a file that holds both. `prediction_type` goes into the scheduler's
    config, whatever the file says.
    """
    tensors, metadata = _read(path)
    if (other := layout.other_model({name: tuple(tensor.shape) for name, tensor in tensors.items()})) is not None:
        raise UserError(
            f"{path} is {other}: only Stable Diffusion 1.x, 2.x and SDXL base models can be read from a single file",
            code="unsupported",
        )
    if not layout.components(tensors):
        raise UserError(
            f"{path} is not in the original layout of Stable Diffusion; it has {len(tensors)} tensors such as "
            f"{', '.join(sorted(tensors)[:3])}. A single network with diffusers' names can be set as model.unet, "
            "model.vae ...",
            code="unsupported",
        )
    tensors, notices = _chosen(tensors, weights, path)
    try:
        pipeline, more = configs.of_file(tensors, metadata, prediction_type)
    except UserError as error:
        raise UserError(f"{path}: {error}", code=error.code, setting=error.setting) from None
    used = _write_networks(fresh, tensors, pipeline)
    if missing := [name for name in LAYOUTS[pipeline.layout] if name not in pipeline.configs]:
        more.append(
            f"it has no {', '.join(missing)}: set it as model.unet or model.vae together with a complete base model"
        )
    if rest := layout.unused(tensors, used):
        more.append(f"{len(rest)} tensors belong to none of its networks and are ignored: {', '.join(rest[:3])} ...")
    return [*notices, *more, *_write_texts(fresh, pipeline)]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by normalized names, mapped from the file, and its metadata."""
    if path.suffix in PICKLED:
        return layout.normalized(pickled.tensors(path)), {}
    with opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return layout.normalized(tensors), file.metadata() or {}


def _chosen(tensors: dict[str, Tensor], weights: str, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Plain or averaged weights of the UNet, where a file holds both."""
    averages = {
        name: tensors[averaged]
        for name in tensors
        if name.startswith(layout.UNET) and (averaged := layout.averaged_name(name)) in tensors
    }
    if weights == "ema" and not averages:
        raise UserError(
            f"weights=ema: {path} has no averaged weights; remove weights=ema",
            code="missing",
            setting="weights",
        )
    if averages and weights != "ema":
        return tensors, [
            "it also has averaged weights; the trained ones are used (for the averages: convert model, weights=ema)"
        ]
    return tensors | averages, []


def _write_networks(fresh: Path, tensors: Mapping[str, Tensor], pipeline: PipelineConfigs) -> set[str]:
    """Writes every network with its config; returns the names that were used."""
    used = set[str]()
    for component, config in pipeline.configs.items():
        place, shapes = LAYOUTS[pipeline.layout][component], configs.shapes(component, config)
        found: dict[str, Tensor] = {}
        for link in place.links(shapes):
            name = place.prefix + link.original
            used.add(name)
            found |= {own: part.reshape(shapes[own]) for own, part in _unpacked(link, tensors[name])}
        is_text = component.startswith("text_encoder")
        if is_text:  # as the hub's files name them, whatever transformers' version
            found = {with_wrapper(name): tensor for name, tensor in found.items()}
        (fresh / component).mkdir()
        write_json(fresh / component / "config.json", config)
        file = "model.safetensors" if is_text else "diffusion_pytorch_model.safetensors"
        write_durably(fresh / component / file, encode(found))
    return used


def _unpacked(link: Link, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors that one of the original layout is made of, by their own names; nothing is copied."""
    if link.form == "fused":
        return list(zip(link.names, tensor.chunk(len(link.names)), strict=True))
    if link.form == "convolution":
        return [(link.names[0], tensor.reshape(squeezed(tuple(tensor.shape))))]
    return [(link.names[0], tensor.T if link.form == "transposed" else tensor)]


def _write_texts(fresh: Path, pipeline: PipelineConfigs) -> list[str]:
    """Writes tokenizers, scheduler and index; returns what is missing."""
    notices = []
    for component in [name for name in pipeline.configs if name.startswith("text_encoder")]:
        name = component.replace("text_encoder", "tokenizer")
        tokens = pipeline.configs[component]["vocab_size"]
        kept = pipeline.tokenizers.get(name, {})
        if not kept or ("pad" in kept and tokens != tokenizers.CLIP_TOKENS):
            notices.append(f"it has no {name} for the {tokens} tokens of its {component}: set model.{name}=FOLDER")
            continue
        (fresh / name).mkdir()
        for file, content in configs.tokenizer_files(kept).items():
            (fresh / name / file).write_bytes(content)
    (fresh / "scheduler").mkdir()
    write_json(fresh / "scheduler" / "scheduler_config.json", pipeline.scheduler)
    unused = {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    index = pipeline.index if pipeline.layout == "sdxl" else {**unused, **pipeline.index}
    write_json(fresh / "model_index.json", {**index, "_diffusers_version": version("diffusers")})
    return notices
