"""Reads checkpoints of one file in the original layout of Stable Diffusion 1.x, 2.x and SDXL.

`.safetensors`, and on request `.ckpt`, which is read as tensors alone (models/weights/pickled.py). Each is converted to
diffusers' layout once and kept in the user's cache, its dtype unchanged. Other models are refused by name.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import (
    compatibility,
    configs,
    layout,
    levels,
    text_names,
    yaml_beside,
)
from daguerre.families.stable_diffusion.single_file.configs import PipelineConfigs
from daguerre.families.stable_diffusion.single_file.layout import LAYOUTS, Place
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.names import with_wrapper
from daguerre.models.settings import GGUF, SAFETENSORS
from daguerre.models.weights import beside, conversion_cache, pickled, seals
from daguerre.models.weights.files import write_json
from daguerre.models.weights.opening import opened
from daguerre.models.weights.original_names import unpacked
from daguerre.regular import check_regular

PICKLED = (".ckpt", ".bin", ".pt", ".pth")


def folder(path: Path, pickled: bool, ignored: Sequence[str] = ()) -> Path:
    """The same model in diffusers' layout, made once and kept in the user's cache.

    It holds the networks that the file holds; a UNet alone gives a folder with `unet`. `ignored` are patterns of
    tensors that are left out. UserError says why not.
    """
    _check_suffix(path, pickled)

    def make(fresh: Path) -> None:
        print(f"converting {path} to diffusers' layout in {conversion_cache.root()}, once", file=sys.stderr, flush=True)
        for notice in convert(path, fresh, ignored=ignored):
            print(f"{path.name}: {notice}", file=sys.stderr, flush=True)

    # What the .yaml says is in the scheduler's config: another one makes another folder.
    beside_it = [yaml_beside.told(path), yaml_beside.scale(path)]
    told = any(beside_it)
    return conversion_cache.once([path], make, json.dumps([[*ignored], *beside_it]) if ignored or told else "")


def network_tensors(
    path: Path, component: str, names: Iterable[str], pickled: bool, ignored: Sequence[str] = ()
) -> dict[str, Tensor]:
    """One network's weights in its own `names`, from a file in the original layout or in those names.

    What is not there is left out; the dtype is the file's. UserError for a file without such a network, or with tensors
    that change what its weights mean.
    """
    _check_suffix(path, pickled)
    tensors, _, _ = _read(path, ignored)
    if not (found := layout.components(tensors)):
        # With or without the wrapper that text encoders lost in transformers 5.6.
        spelt = {with_wrapper(name): name for name in tensors} | {name: name for name in tensors}
        own = {name: of for name in names if (of := spelt.get(name, spelt.get(with_wrapper(name)))) is not None}
        beside.check(path, tensors, {*own.values()}, layout.unused(tensors, {*own.values()}))
        return {name: tensors[of] for name, of in own.items()}
    if component not in found:
        raise UserError(
            f"{path} has no {component}; it has: {', '.join(found)}", code="missing", setting=f"model.{component}"
        )
    place = LAYOUTS[layout.layout_of(tensors) or "sd1"][component]
    links = [link for link in place.links(names) if place.prefix + link.original in tensors]
    used = {place.prefix + link.original for link in links}
    others = tuple(own.prefix for name, own in LAYOUTS[layout.layout_of(tensors) or "sd1"].items() if name != component)
    # Playground's marks are also statistics of the latents, which only its whole file tells.
    marks = [name for name in configs.edm_marks(tensors) if component != "vae" or name not in layout.PLAYGROUND]
    rest = [name for name in layout.unused(tensors, {*used, *marks}) if not name.startswith(others)]
    beside.check(path, tensors, used, rest, [place.prefix])
    return {
        name: part for link in links for name, part in unpacked(link, tensors[place.prefix + link.original]).items()
    }


def scheduler(path: Path) -> dict[str, Any]:
    """The prediction and noise levels that a file tells of its UNet, as a scheduler's config has them; {} for one that
    tells nothing."""
    beside_it = yaml_beside.told(path)
    if path.suffix in PICKLED:
        return beside_it
    with opened(path) as file:
        names, metadata = file.keys(), file.metadata() or {}
        marks = {name: file.get_tensor(name) for name in configs.mark_names(names)}
    return beside_it | configs.told(names, marks, metadata)


def unused(names: Iterable[str], used: set[str]) -> list[str]:
    """Names that are neither `used` nor known to belong to a file."""
    return layout.unused(names, used)


def _check_suffix(path: Path, pickled_weights: bool) -> None:
    check_regular(path)
    if path.suffix == GGUF:
        raise UserError(
            f"{path}: GGUF holds weights of few bits in a form that is not read here: take the model's .safetensors, "
            "of which training.base_precision=int8 or nf4 keeps few bits, too",
            code="unsupported",
        )
    if path.suffix not in (*SAFETENSORS, *PICKLED):
        raise UserError(
            f"{path}: a single-file checkpoint ends with {' or '.join(SAFETENSORS)} or, if it is an old one, with "
            f"{', '.join(PICKLED)}",
            code="unsupported",
        )
    if path.suffix in PICKLED and not pickled_weights:
        raise UserError(
            f"{path} is pickled: set model.pickled_weights=true to read only its tensors (no code from it is run), "
            "or use the model's .safetensors",
            setting="model.pickled_weights",
        )


def convert(
    path: Path,
    fresh: Path,
    weights: str = "raw",
    prediction_type: str | None = None,
    ignored: Sequence[str] = (),
) -> list[str]:
    """Fills the empty folder `fresh`; returns messages for the user.

    `weights`: `ema` takes the averaged ones of a file that holds both. `prediction_type` goes into the scheduler's
    config, whatever the file says. `ignored` are patterns of tensors that are left out.
    """
    tensors, metadata, left_out = _read(path, ignored)
    if (other := layout.other_model({name: tuple(tensor.shape) for name, tensor in tensors.items()})) is not None:
        raise UserError(
            f"{path} is {other}: only Stable Diffusion 1.x, 2.x and SDXL base models can be read from a single file",
            code="unsupported",
        )
    if not layout.components(tensors):
        raise UserError(
            f"{path} is not in the original layout of Stable Diffusion; it has {len(tensors)} tensors such as "
            f"{', '.join(sorted(tensors)[:3])}. A file of one network goes with a base, as model.transformer, "
            "model.unet, model.vae ...",
            code="unsupported",
        )
    tensors, notices = _chosen(tensors, weights, path)
    try:
        pipeline, more = configs.of_file(tensors, metadata, prediction_type, yaml_beside.told(path))
        more += _scale_latents(path, tensors, pipeline)
    except UserError as error:
        raise UserError(f"{path}: {error}", code=error.code, setting=error.setting) from None
    used = _used(pipeline)
    rest = layout.unused(tensors, {*used, *configs.edm_marks(tensors)})
    beside.check(path, tensors, used, rest, [place.prefix for place in _places(pipeline).values()])
    _write_networks(fresh, tensors, pipeline)
    if missing := [name for name in LAYOUTS[pipeline.layout] if name not in pipeline.configs]:
        pipeline = configs.whole(pipeline)
        for name in missing:
            if name in pipeline.configs:
                (fresh / name).mkdir()
                write_json(fresh / name / "config.json", pipeline.configs[name])
        more.append(
            f"it has no {', '.join(missing)}: set it as model.unet or model.vae together with a complete base model"
        )
    if rest:
        dots = " ..." if len(rest) > 3 else ""
        more.append(f"{len(rest)} tensors belong to none of its networks and are ignored: {', '.join(rest[:3])}{dots}")
    return [*left_out, *notices, *more, *_write_texts(fresh, pipeline)]


def _read(path: Path, ignored: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Tensors by normalized names, mapped from the file but for those that a scale is multiplied into; its metadata;
    and messages of tensors that are left out."""
    if path.suffix in PICKLED:
        found, metadata = pickled.tensors(path), dict[str, str]()
    else:
        seals.check(path, large=True)
        with opened(path) as file:
            found, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    kept, left_out = beside.without(found, ignored)
    return text_names.original(layout.normalized(beside.multiplied(kept, metadata))), metadata, left_out


def _places(pipeline: PipelineConfigs) -> dict[str, Place]:
    """The places of the networks that a file holds."""
    return {component: LAYOUTS[pipeline.layout][component] for component in pipeline.configs}


def _used(pipeline: PipelineConfigs) -> set[str]:
    """The names of all tensors that the networks are made of."""
    return {
        place.prefix + link.original
        for component, place in _places(pipeline).items()
        for link in place.links(configs.shapes(component, pipeline.configs[component]))
    }


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


def _scale_latents(path: Path, tensors: Mapping[str, Tensor], pipeline: PipelineConfigs) -> list[str]:
    """Gives the autoencoder the scale that the file, or the .yaml next to it, tells. Returns a message where that is
    not the usual one."""
    told = levels.scale(tensors) or yaml_beside.scale(path)
    usual = compatibility.SCALING_FACTORS[pipeline.layout]
    own = pipeline.configs.get("vae", {}).get("scaling_factor", usual)
    if told is None or math.isclose(told, own, rel_tol=0.005):  # some were rounded to 16 bits
        return []
    if "vae" not in pipeline.configs:
        return [f"latents were multiplied by {told:g} for it, and not by {usual:g}: give it an autoencoder with that"]
    pipeline.configs["vae"]["scaling_factor"] = told
    return [f"latents are multiplied by {told:g} for it, and not by {own:g}"]


def _write_networks(fresh: Path, tensors: Mapping[str, Tensor], pipeline: PipelineConfigs) -> None:
    """Writes every network with its config."""
    for component, place in _places(pipeline).items():
        config = pipeline.configs[component]
        shapes = configs.shapes(component, config)
        found: dict[str, Tensor] = {}
        for link in place.links(shapes):
            parts = unpacked(link, tensors[place.prefix + link.original], shapes)
            found |= {own: part.reshape(shapes[own]) for own, part in parts.items()}
        is_text = component.startswith("text_encoder")
        if is_text:  # as the hub's files name them, whatever transformers' version
            found = {with_wrapper(name): tensor for name, tensor in found.items()}
        (fresh / component).mkdir()
        write_json(fresh / component / "config.json", config)
        file = "model.safetensors" if is_text else "diffusion_pytorch_model.safetensors"
        seals.write(fresh / component / file, found)


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
