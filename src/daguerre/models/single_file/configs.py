"""What the tensors of a single-file checkpoint do not say: configs, the scheduler's numbers, tokenizers.

They come from the file itself where Daguerre wrote it (`Numbers` as JSON in its metadata), else from the architecture
that ships with the package and has the same names and shapes. Nothing else is guessed, but whether an SD 2.x file
without any mark predicts v.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from huggingface_hub.errors import StrictDataclassError
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from daguerre.errors import UserError
from daguerre.models.single_file.layout import (
    LAYOUTS,
    PLAYGROUND,
    UNET,
    V_PREDICTION,
    ZERO_TERMINAL_SNR,
    components,
    layout_of,
)
from daguerre.models.tokenizers import bpe, clip_vocabulary
from daguerre.models.weights import architectures

METADATA = "daguerre.model"
KINDS: dict[str, Any] = {
    "unet": UNet2DConditionModel,
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
}
Shapes = Mapping[str, tuple[int, ...]]
_TOKENIZER_FILE = re.compile(r"\w[\w-]*\.(json|txt|model)")
_CLASSES = {
    (None, None),
    *(("transformers", name) for name in ("CLIPTokenizer", "CLIPTokenizerFast")),
    *((kind.__module__.split(".")[0], kind.__name__) for kind in KINDS.values()),
    *(("diffusers", name) for name in ("StableDiffusionPipeline", "StableDiffusionXLPipeline")),
}
"""What a pipeline's index may name, beside schedulers."""
_IMPOSSIBLE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ZeroDivisionError, AssertionError),
    StrictDataclassError,
)
"""What libraries raise when they build a network of numbers that make none."""
_V_NORM = f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"


@dataclass(frozen=True)
class Numbers:
    """All that a folder in diffusers' layout says beside the weights."""

    layout: str
    """`sd1`, `sd2` or `sdxl`."""
    configs: dict[str, dict[str, Any]]
    """config.json by component."""
    scheduler: dict[str, Any]
    """scheduler_config.json."""
    index: dict[str, Any]
    """model_index.json."""
    tokenizers: dict[str, dict[str, str]] = field(default_factory=dict)
    """Files by tokenizer folder and name, or {"pad": TOKEN} for CLIP's own words."""

    def to_metadata(self) -> str:
        """One text for the header of a safetensors file."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True, allow_nan=False)


def of_file(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], said: str | None = None
) -> tuple[Numbers, list[str]]:
    """The numbers for tidy tensors, and what a person must be told. UserError says what was found instead.

    `said`: what the UNet predicts, in place of what the file tells.
    """
    if METADATA in metadata:
        numbers = _own(metadata[METADATA])
        if said is not None:
            numbers.scheduler["prediction_type"] = said
        return numbers, []
    prediction, notices = (said, []) if said is not None else _prediction(tensors, metadata)
    name = _architecture({key: tuple(tensor.shape) for key, tensor in tensors.items()}, prediction)
    numbers = of_architecture(name, components(tensors))
    if prediction == "edm":
        numbers = _as_playground(numbers, tensors)
    else:
        numbers.scheduler["prediction_type"] = prediction
        if ZERO_TERMINAL_SNR in tensors:
            numbers.scheduler.update(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    return numbers, notices


def _own(text: str) -> Numbers:
    """What Daguerre wrote, or somebody who says so: it may name no file and no class but those that are expected."""
    try:
        numbers = TypeAdapter(Numbers).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"its metadata {METADATA!r} cannot be read: {first['msg']}. Write the file anew") from error
    if strange := [*_strange_names(numbers), *_strange_classes(numbers.index)]:
        raise UserError(
            f"its metadata {METADATA!r} names {strange[0]}, which Daguerre never wrote: the file is not used"
        )
    for component, config in numbers.configs.items():
        try:
            shapes(component, config)
        except _IMPOSSIBLE as error:
            raise UserError(f"its metadata has numbers of which no {component} can be built: {error}") from error
    return numbers


def _strange_names(numbers: Numbers) -> list[str]:
    places = LAYOUTS.get(numbers.layout, {})
    known = {name.replace("text_encoder", "tokenizer") for name in places if name.startswith("text_encoder")}
    files = [name for kept in numbers.tokenizers.values() for name in kept if "pad" not in kept]
    return [
        *(repr(name) for name in [numbers.layout] if name not in LAYOUTS),
        *(repr(name) for name in numbers.configs if name not in places),
        *(repr(name) for name in numbers.tokenizers if name not in known),
        *(repr(name) for name in files if not _TOKENIZER_FILE.fullmatch(name)),
        *(repr(name) for config in numbers.configs.values() for name in config if "attn_impl" in name),  # runs code
    ]


def _strange_classes(index: Mapping[str, Any]) -> list[str]:
    """Entries of a pipeline's index by which a library would load something else."""
    named = [value for name, value in index.items() if isinstance(value, list) or name == "_class_name"]
    classes = [tuple(value) if isinstance(value, list) else ("diffusers", value) for value in named]
    return [repr(of) for of in classes if of not in _CLASSES and not _is_scheduler(of)]


def _is_scheduler(of: tuple[Any, ...]) -> bool:
    return len(of) == 2 and of[0] == "diffusers" and bool(re.fullmatch(r"\w+Scheduler", str(of[1])))


def of_architecture(name: str, wanted: tuple[str, ...]) -> Numbers:
    """The shipped numbers of an architecture for some of its networks, with CLIP's own words."""
    folder = architectures.FOLDER / name
    layout = {"sdxl": "sdxl", "sd1": "sd1"}.get(name, "sd2")
    own = {part: _read(folder / part / "config.json") for part in LAYOUTS[layout] if part in wanted}
    pads = {"text_encoder": "!" if layout == "sd2" else bpe.END, "text_encoder_2": "!"}
    tokenizers = {part.replace("text_encoder", "tokenizer"): {"pad": pads[part]} for part in own if part in pads}
    scheduler = _read(folder / "scheduler" / "scheduler_config.json")
    return Numbers(layout, own, scheduler, _read(folder / "model_index.json"), tokenizers)


def _read(path: Any) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def shapes(component: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a network's weights by its config; no memory is used."""
    return _shapes(component, json.dumps(config, sort_keys=True))


@lru_cache(maxsize=64)
def _shapes(component: str, config: str) -> dict[str, tuple[int, ...]]:
    kind, numbers = KINDS[component], json.loads(config)
    with torch.device("meta"):
        if kind.__module__.startswith("diffusers"):
            network = kind.from_config(numbers)
        else:
            network = kind(kind.config_class(**numbers))
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def _architecture(found: Shapes, prediction: str) -> str:
    """The shipped architecture whose networks have these tidy names and shapes. UserError names where they differ."""
    layout, parts = layout_of(found), components(found)
    if parts == ("vae",):
        raise UserError(
            "it holds an autoencoder alone, which does not say its scaling factor (SD's .18215, SDXL's .13025): give "
            "it as model.vae beside a base model, whose config it then takes"
        )
    differs = {}
    for name in architectures.names():
        numbers = of_architecture(name, parts)
        if layout not in (None, numbers.layout) or len(numbers.configs) < len(parts):
            continue
        if (difference := _difference(found, numbers)) is None:
            if numbers.layout == "sd2":
                return "sd21" if prediction == "v_prediction" else "sd2_base"
            return name
        differs[name] = difference
    listed = "; ".join(f"{name}: {difference}" for name, difference in differs.items())
    raise UserError(
        f"its {', '.join(parts)} are laid out as in Stable Diffusion, but have the shapes of none that is known "
        f"({listed}). Known are {', '.join(architectures.names())}, and any file that `daguerre convert export` wrote"
    )


def _difference(found: Shapes, numbers: Numbers) -> str | None:
    for component, config in numbers.configs.items():
        place = LAYOUTS[numbers.layout][component]
        wanted = shapes(component, config)
        for link in place.links(wanted):
            shape, got = _original_shape(link.form, wanted[link.names[0]]), found.get(place.prefix + link.original)
            if got is None or squeezed(got) != squeezed(shape):
                return f"{place.prefix}{link.original} is {'missing' if got is None else list(got)}, not {list(shape)}"
    return None


def _original_shape(form: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if form == "fused":
        return (3 * shape[0], *shape[1:])
    return tuple(reversed(shape)) if form == "transposed" else shape


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the trailing ones of a convolution of 1x1, which is a matrix in some files."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _prediction(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[str, list[str]]:
    """`epsilon`, `v_prediction` or `edm` by what the file says; for 2.x it may be a guess, and that is told."""
    said = metadata.get("modelspec.prediction_type") or metadata.get("modelspec.predict_key") or ""
    if PLAYGROUND[0] in tensors:
        return "edm", []
    if V_PREDICTION in tensors or said in ("v", "v_prediction"):
        return "v_prediction", []
    if said or layout_of(tensors) != "sd2" or _V_NORM not in tensors:
        return "epsilon", []
    guess = guessed_prediction(tensors[_V_NORM])
    return guess, [
        f"the file does not say whether it predicts the noise (2-base) or v (2.1 at 768 px); by its weights it is "
        f"{guess}. Compare with the model's page; `daguerre convert model` takes prediction_type="
    ]


def guessed_prediction(bias: Tensor) -> str:
    """What a 2.x UNet predicts by the bias of its last norm, as ComfyUI tells the published models apart."""
    return "v_prediction" if bias.float().std(correction=0) > 0.09 else "epsilon"


def _as_playground(numbers: Numbers, tensors: Mapping[str, Tensor]) -> Numbers:
    """Playground v2.5: SDXL's networks, statistics of the latents, and EDM."""
    for name, key in zip(PLAYGROUND, ("latents_mean", "latents_std"), strict=True):
        numbers.configs["vae"][key] = [round(number, 6) for number in tensors[name].float().flatten().tolist()]
    numbers.configs["vae"]["scaling_factor"] = 0.5
    scheduler = {
        "_class_name": "EDMDPMSolverMultistepScheduler",
        "sigma_min": 0.002,
        "sigma_max": 80.0,
        "sigma_data": 0.5,
        "sigma_schedule": "karras",
        "prediction_type": "epsilon",
        "rho": 7.0,
        "solver_order": 2,
        "algorithm_type": "dpmsolver++",
        "solver_type": "midpoint",
        "final_sigmas_type": "zero",
    }
    index = numbers.index | {"scheduler": ["diffusers", "EDMDPMSolverMultistepScheduler"]}
    return Numbers(numbers.layout, numbers.configs, scheduler, index, numbers.tokenizers)


def tokenizer_files(kept: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a tokenizer by name, of what `Numbers.tokenizers` keeps of it."""
    if "pad" in kept:
        return clip_vocabulary.files(kept["pad"])
    return {name: text.encode("utf-8") for name, text in kept.items()}
