"""The configs, scheduler, index and tokenizers of a single-file checkpoint, none of which its tensors hold.

They come from its metadata where Daguerre wrote the file, else from the shipped architecture with the same names and
shapes. The only guess is whether an SD 2.x file without any mark predicts v.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet
from huggingface_hub.errors import StrictDataclassError
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from daguerre import documents
from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import levels
from daguerre.families.stable_diffusion.single_file.layout import (
    EDM_V,
    LAYOUTS,
    PLAYGROUND,
    UNET,
    V_PREDICTION,
    ZERO_TERMINAL_SNR,
    components,
    layout_of,
)
from daguerre.models.parts.text import tokenizers
from daguerre.models.weights import architectures, unfilled
from daguerre.models.weights.files import read_json
from daguerre.models.weights.original_names import original_shape, squeezed

METADATA = "daguerre.model"
KINDS: dict[str, Any] = {
    "unet": UNet2DConditionModel,
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
    "prior": StableCascadeUNet,
    "decoder": StableCascadeUNet,
}
OF_LAYOUTS = {"sd1": "sd1", "sd2_base": "sd2", "sd21": "sd2", "sdxl": "sdxl"}
"""The shipped architectures that one file can hold all of, and their layouts."""
_TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
Shape = tuple[int, ...]
_TOKENIZER_FILE = re.compile(r"pad|\w[\w-]*\.(json|txt|model)")
_CLASSES = re.compile(
    r"None\.None|transformers\.(CLIPTokenizer|CLIPTokenizerFast|CLIPTextModel|CLIPTextModelWithProjection)"
    r"|diffusers\.(UNet2DConditionModel|AutoencoderKL|\w+Scheduler|StableDiffusionPipeline|StableDiffusionXLPipeline)"
)
"""Classes that a pipeline's index may name."""
_IMPOSSIBLE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ZeroDivisionError, AssertionError),
    StrictDataclassError,
)
"""Errors of libraries for configs of which no network can be built."""
_PREDICTION_KEYS = ("modelspec.prediction_type", "modelspec.predict_key")
_LAYER = "modelspec.encoder_layer"
_PREDICTIONS = {
    **dict.fromkeys(("epsilon", "eps"), "epsilon"),
    **dict.fromkeys(("v", "v_prediction", "v-prediction"), "v_prediction"),
    **dict.fromkeys(("sample", "x0"), "sample"),
    **dict.fromkeys(("flow", "flow_prediction"), "flow_prediction"),
}
"""diffusers' names of predictions by the words that headers have for them."""
FLOW = {
    "_class_name": "DPMSolverMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 1.0,
    "num_train_timesteps": 1000,
}
"""The scheduler's config of a file that says no more than that it predicts flow."""
_OF_ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
_LAST_NORM = f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"


@dataclass(frozen=True)
class PipelineConfigs:
    """All that a pipeline's folder in diffusers' layout holds in addition to the weights."""

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
        """JSON for the header of a safetensors file."""
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True, allow_nan=False)


def of_file(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    prediction_type: str | None = None,
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[PipelineConfigs, list[str]]:
    """The configs for normalized tensors, and messages for the user. UserError says what was found instead.

    `prediction_type`, if given, is what the UNet predicts, whatever the file says. `beside` is what a .yaml next to it
    tells of the scheduler: it counts where the file itself says nothing.
    """
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if METADATA in metadata:
        pipeline = _of_metadata(metadata[METADATA])
        if difference := _difference(found, pipeline):
            raise UserError(f"{difference}: it is incomplete or was changed; use another copy", code="damaged")
        if prediction_type is not None:
            _refuse_edm(_is_edm(pipeline) or bool(edm_marks(tensors)))
            pipeline.scheduler.update({**_of_tables(tensors), "prediction_type": prediction_type})
        else:
            _check_marks(pipeline, tensors, tensors, metadata)
        return pipeline, []
    edm = edm_marks(tensors)
    _refuse_edm(bool(edm) and prediction_type is not None)
    prediction, notices = (prediction_type, []) if prediction_type else _prediction(tensors, metadata, beside)
    pipeline = of_architecture(_architecture(found, prediction), components(tensors))
    if edm:
        return _as_edm(pipeline, tensors), []
    notices = [*notices, *_of_text_layer(pipeline.layout, metadata)]
    if prediction == FLOW["prediction_type"]:
        index = pipeline.index | {"scheduler": ["diffusers", FLOW["_class_name"]]}
        return replace(pipeline, scheduler=dict(FLOW), index=index), notices
    tables = _of_tables(tensors)
    usual = {name: pipeline.scheduler.get(name) for name in tables}
    if other := {name: value for name, value in tables.items() if usual[name] != value and name not in _OF_ZERO_SNR}:
        notices = [*notices, f"its tables of noise levels say {', '.join(f'{n} {v:g}' for n, v in other.items())}"]
    if "rescale_betas_zero_snr" in tables and ZERO_TERMINAL_SNR not in tensors:
        notices = [*notices, "its tables of noise levels are those of zero terminal SNR"]
    pipeline.scheduler.update({**beside, **tables, "prediction_type": prediction})
    return pipeline, notices


def _of_tables(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The part of the scheduler's config that tables in a file, and the mark of zero terminal SNR, tell."""
    found = levels.told(tensors)
    if ZERO_TERMINAL_SNR in tensors or "rescale_betas_zero_snr" in found:
        found |= _OF_ZERO_SNR
    return found


def _is_edm(pipeline: PipelineConfigs) -> bool:
    return str(pipeline.scheduler.get("_class_name")).startswith("EDM")


def _check_marks(
    pipeline: PipelineConfigs, names: Collection[str], marks: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """UserError where marks, or the header of all programs, say another prediction than the configs in our header: some
    program or person added them later, and knew what."""
    scheduler, is_edm = pipeline.scheduler, _is_edm(pipeline)
    v = scheduler.get("prediction_type") == "v_prediction"
    ours = [str(scheduler.get(name)) for name in ("_class_name", "prediction_type") if scheduler.get(name) is not None]
    fitting = {
        V_PREDICTION: v and not is_edm,
        ZERO_TERMINAL_SNR: bool(scheduler.get("rescale_betas_zero_snr")),
        **dict.fromkeys(PLAYGROUND, is_edm and not v),
        **dict.fromkeys(EDM_V, is_edm and v),
    }
    wrong = [f"the mark {name}" for name, fits in fitting.items() if name in names and not fits]
    if EDM_V[0] in names and not wrong:
        theirs = {name: edm_scheduler(marks)[name.rpartition(".")[2]] for name in EDM_V if name in names}
        own = {name: scheduler.get(name.rpartition(".")[2]) for name in theirs}
        wrong = [f"the mark {name} of {theirs[name]:g}" for name in theirs if not _is_close(own[name], theirs[name])]
        ours += [f"{name.rpartition('.')[2]} {level}" for name, level in own.items()]
    if (named := named_prediction(metadata)) and not is_edm and named != scheduler.get("prediction_type", "epsilon"):
        wrong.append(" and ".join(f"{key}={metadata[key]}" for key in _PREDICTION_KEYS if key in metadata))
    if not is_edm:
        tables = levels.told(marks)
        own = {name: scheduler.get(name) for name in tables}
        wrong += [
            f"tables of noise levels with {name} {value:g}" for name, value in tables.items() if own[name] != value
        ]
    if wrong:
        raise UserError(
            f"its header {METADATA!r} says {', '.join(ours)}, but the file also has {' and '.join(wrong)}, which was "
            "added later: one of them is wrong. `daguerre convert model FILE prediction_type=...` says which, epsilon "
            "or v_prediction (not for EDM); or take a copy of the file without the additions",
            code="conflict",
        )


def _of_metadata(text: str) -> PipelineConfigs:
    """The configs in metadata, which may be a stranger's: only expected files and classes may be named."""
    try:
        pipeline = TypeAdapter(PipelineConfigs).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"its metadata {METADATA!r} cannot be read ({place}: {first['msg']}). Write the file again", code="damaged"
        ) from error
    if strange := _unexpected(pipeline):
        raise UserError(f"its metadata {METADATA!r} names {strange[0]!r}, which Daguerre never writes: it is ignored")
    for component, config in pipeline.configs.items():
        try:
            shapes(component, config)
        except _IMPOSSIBLE as error:
            raise UserError(f"the {component} cannot be built from the config in its metadata: {error}") from error
    return pipeline


def _unexpected(pipeline: PipelineConfigs) -> list[str]:
    """Names by which a library would write elsewhere, load another class or run code."""
    places = LAYOUTS.get(pipeline.layout, {})
    classes = [
        ".".join(map(str, value)) if isinstance(value, list) else f"diffusers.{value}"
        for name, value in pipeline.index.items()
        if isinstance(value, list) or name == "_class_name"
    ]
    return [
        *({pipeline.layout} - LAYOUTS.keys()),
        *(pipeline.configs.keys() - places.keys()),
        *(pipeline.tokenizers.keys() - {name.replace("text_encoder", "tokenizer") for name in places}),
        *(name for kept in pipeline.tokenizers.values() for name in kept if not _TOKENIZER_FILE.fullmatch(name)),
        *(key for config in pipeline.configs.values() for key in config if "attn_impl" in key),
        *(name for name in classes if not _CLASSES.fullmatch(name)),
    ]


def of_architecture(name: str, wanted: tuple[str, ...]) -> PipelineConfigs:
    """The shipped configs of an architecture for some of its networks, with CLIP's own words."""
    folder = architectures.FOLDER / name
    layout = OF_LAYOUTS[name]
    own = {part: read_json(folder / part / "config.json") for part in LAYOUTS[layout] if part in wanted}
    return PipelineConfigs(
        layout,
        own,
        read_json(folder / "scheduler" / "scheduler_config.json"),
        read_json(folder / "model_index.json"),
        {tokenizer: {"pad": padding(name, tokenizer)} for part in own if (tokenizer := _TOKENIZERS.get(part))},
    )


def padding(architecture: str, tokenizer: str) -> str:
    """The word with which a tokenizer of a shipped architecture fills captions up."""
    is_open_clip = tokenizer == "tokenizer_2" or OF_LAYOUTS.get(architecture) == "sd2"
    return "!" if is_open_clip else tokenizers.END


def shapes(component: str, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Names and shapes of a network's weights by its config; no memory is used."""
    return _shapes(component, json.dumps(config, sort_keys=True))


# By the text of the config: a mapping cannot be a key, and building an SDXL takes seconds even without memory.
@lru_cache(maxsize=64)
def _shapes(component: str, config: str) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in outline(component, json.loads(config)).state_dict().items()}


def outline(component: str, config: Mapping[str, Any]) -> nn.Module:
    """A network of this config without memory, on the meta device."""
    kind = KINDS[component]
    documents.check_counts(config)
    with unfilled.outlining():
        is_diffusers = kind.__module__.startswith("diffusers")
        made: nn.Module = kind.from_config(dict(config)) if is_diffusers else kind(kind.config_class(**config))
    return made


def _architecture(found: Mapping[str, Shape], prediction: str) -> str:
    """The shipped architecture whose networks have these normalized names and shapes. UserError says where they
    differ."""
    layout, parts = layout_of(found), components(found)
    if parts == ("vae",):
        raise UserError(
            "it contains only an autoencoder, without its scaling factor (SD's .18215, SDXL's .13025): set it as "
            "model.vae together with a base model, whose config is then used",
            setting="model.vae",
        )
    differs = {}
    for name in OF_LAYOUTS:
        pipeline = of_architecture(name, parts)
        if layout not in (None, pipeline.layout) or len(pipeline.configs) < len(parts):
            continue
        if (difference := _difference(found, pipeline)) is None:
            if pipeline.layout == "sd2":
                return "sd21" if prediction == "v_prediction" else "sd2_base"
            return name
        differs[name] = difference
    listed = "; ".join(f"{name}: {difference}" for name, difference in differs.items())
    raise UserError(
        f"its {', '.join(parts)} have the layout of Stable Diffusion, but not the shapes of a known model "
        f"({listed}). Known are {', '.join(OF_LAYOUTS)}, and any file that `daguerre convert export` wrote",
        code="unsupported",
    )


def _difference(found: Mapping[str, Shape], pipeline: PipelineConfigs) -> str | None:
    """The first tensor that the networks of these configs need and that is missing or has another shape."""
    for component, config in pipeline.configs.items():
        place = LAYOUTS[pipeline.layout][component]
        wanted = shapes(component, config)
        for link in place.links(wanted):
            name, shape = place.prefix + link.original, original_shape(link, wanted)
            if name not in found:
                return f"{name} of its {component} is missing"
            if squeezed(found[name]) != squeezed(shape):
                return f"{name} is {list(found[name])}, not {list(shape)}"
    return None


def _is_close(given: Any, mark: float) -> bool:
    """Marks have the digits of float32."""
    return isinstance(given, int | float) and math.isclose(given, mark, rel_tol=1e-4)


def told(names: Collection[str], marks: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The scheduler's config, or a part of it, that a file's marks and header tell; {} where they tell nothing."""
    if METADATA in metadata:
        pipeline = _of_metadata(metadata[METADATA])
        _check_marks(pipeline, names, marks, metadata)
        return pipeline.scheduler
    if edm_marks(names):
        return edm_scheduler(marks)
    named = "v_prediction" if V_PREDICTION in names else named_prediction(metadata)
    if named == FLOW["prediction_type"]:
        return dict(FLOW)
    snr = {"rescale_betas_zero_snr": True} if ZERO_TERMINAL_SNR in names else {}
    return {**levels.told(marks), **snr, **({"prediction_type": named} if named else {})}


def mark_names(names: Collection[str]) -> list[str]:
    """Those of these names whose numbers say something of the scheduler."""
    return [*edm_marks(names), *(name for name in levels.TABLES if name in names)]


def named_prediction(metadata: Mapping[str, str]) -> str:
    """The prediction that the header of all programs names, in diffusers' words; "" where it names none.
    UserError for words that are not known."""
    said = {key: metadata[key] for key in _PREDICTION_KEYS if metadata.get(key)}
    found = {key: _PREDICTIONS.get(value.strip().casefold()) for key, value in said.items()}
    if None in found.values() or len({*found.values()}) > 1:
        raise UserError(
            f"its header says {' and '.join(f'{key}={value}' for key, value in said.items())}; known are "
            f"{', '.join(_PREDICTIONS)}. `daguerre convert model FILE prediction_type=...` says what it predicts",
            code="unsupported" if None in found.values() else "conflict",
        )
    return next(iter(found.values()), None) or ""


def _prediction(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], beside: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """`epsilon` or `v_prediction`, as the file says; and a message where it is guessed, for 2.x alone."""
    named = named_prediction(metadata)
    if V_PREDICTION in tensors:
        said = f"its mark {V_PREDICTION} says v_prediction and its header {named}: the mark counts"
        return "v_prediction", [said] if named not in ("", "v_prediction") else []
    if named == FLOW["prediction_type"]:
        return named, ["its header says that it predicts flow, and no shift of its noise levels: 1 is taken"]
    if not named and "prediction_type" in beside:
        return str(beside["prediction_type"]), [
            f"the .yaml next to it says that it predicts {beside['prediction_type']}"
        ]
    if named or layout_of(tensors) != "sd2" or _LAST_NORM not in tensors:
        return named or "epsilon", []
    guess = guessed_prediction(tensors[_LAST_NORM])
    return guess, [
        "the file does not record whether it predicts the noise (2-base) or v (2.1 at 768 px); its weights suggest "
        f"{guess}. Check the model's page; `daguerre convert model` has prediction_type="
    ]


def _of_text_layer(layout: str, metadata: Mapping[str, str]) -> list[str]:
    """A message where the header of all programs names another hidden state of the text encoder than is read of these
    weights: kohya's scripts write `clip_skip` there, counted from 1. They read SDXL by the layer before the last,
    whatever it says, and 2.x is published without its last one."""
    without = {"sd1": 0, "sd2": 1}.get(layout)
    told = metadata.get(_LAYER, "")
    if without is None or told in ("", str(1 + without)):
        return []
    if not re.fullmatch("[1-9][0-9]?", told) or int(told) <= without:
        return [f"its header says {_LAYER}={told}, which is no layer of its text encoder: it is ignored"]
    layer = f"model.text_encoder_layer=-{int(told) - without} model.text_encoder_final_norm=true"
    return [
        f"its header says that it was trained with clip skip {told} ({_LAYER}), and captions are read so with {layer}"
    ]


def guessed_prediction(bias: Tensor) -> str:
    """Prediction type of a 2.x UNet by the bias of its last norm, as ComfyUI tells the published models apart."""
    return "v_prediction" if bias.float().std(correction=0) > 0.09 else "epsilon"


def _refuse_edm(is_edm: bool) -> None:
    if is_edm:
        raise UserError(
            "it is marked as a model of EDM (Playground v2.5, CosXL), which says so: remove prediction_type",
            code="conflict",
            setting="prediction_type",
        )


def edm_marks(names: Collection[str]) -> tuple[str, ...]:
    """The marks of a file whose UNet is EDM's, in normalized names: of Playground v2.5 or of CosXL; () of others."""
    if all(name in names for name in PLAYGROUND):
        return PLAYGROUND
    return tuple(name for name in EDM_V if name in names) if EDM_V[0] in names else ()


def edm_scheduler(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The scheduler's config of a file with such marks."""
    playground = edm_marks(tensors) == PLAYGROUND
    usual = dict(zip(EDM_V, (80.0, 0.002), strict=True))
    high, low = (usual[name] if playground or name not in tensors else float(tensors[name]) for name in EDM_V)
    if not 0 < low < high < math.inf:
        raise UserError(
            f"its marks {', '.join(EDM_V)} say {high:g} and {low:g}, which are no noise levels", code="damaged"
        )
    return {
        "_class_name": "EDMDPMSolverMultistepScheduler",
        # Marks are float32: 0.002 would become 0.0020000000949949026 in a config that people read.
        "sigma_min": round(low, 7),
        "sigma_max": round(high, 4),
        "sigma_data": 0.5 if playground else 1.0,
        "sigma_schedule": "karras",
        "prediction_type": "epsilon" if playground else "v_prediction",
        "rho": 7.0,
        "solver_order": 2,
        "algorithm_type": "dpmsolver++",
        "solver_type": "midpoint",
        "final_sigmas_type": "zero",
    }


def _as_edm(pipeline: PipelineConfigs, tensors: Mapping[str, Tensor]) -> PipelineConfigs:
    """Playground v2.5, which has statistics of the latents, or CosXL: SDXL's networks, and EDM."""
    for name, key in zip(PLAYGROUND, ("latents_mean", "latents_std"), strict=True):
        if edm_marks(tensors) == PLAYGROUND and "vae" in pipeline.configs:
            pipeline.configs["vae"][key] = [round(number, 6) for number in tensors[name].float().flatten().tolist()]
            pipeline.configs["vae"]["scaling_factor"] = 0.5
    index = pipeline.index | {"scheduler": ["diffusers", "EDMDPMSolverMultistepScheduler"]}
    return replace(pipeline, scheduler=edm_scheduler(tensors), index=index)


def whole(pipeline: PipelineConfigs) -> PipelineConfigs:
    """The configs with those of the networks that a file lacks, and their tokenizers: those of the published
    architecture whose others it has."""
    for name, layout in OF_LAYOUTS.items():
        own = of_architecture(name, tuple(pipeline.configs))
        if layout == pipeline.layout and own.configs.get("unet") == pipeline.configs.get("unet"):
            all_of_it = of_architecture(name, tuple(LAYOUTS[layout]))
            return replace(
                pipeline,
                configs=all_of_it.configs | pipeline.configs,
                tokenizers=all_of_it.tokenizers | pipeline.tokenizers,
            )
    return pipeline


def tokenizer_files(kept: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a tokenizer by name, of what `PipelineConfigs.tokenizers` keeps of it."""
    if "pad" in kept:
        return tokenizers.files(tokenizers.clip(kept["pad"]))
    return {name: text.encode("utf-8") for name, text in kept.items()}
