"""MindOne SDXL's configs: what several keys of its trees mean together. Each by itself is in mindone.yaml."""

import json
import re
from typing import Any

from daguerre.errors import UserError
from daguerre.foreign.reader import Reading, Tables, last
from daguerre.models.weights import architectures

TABLES = Tables("mindone")
MODEL, DATA = "model.params.", "data.dataset_config.params"
CLIP_LAYERS = 12
"""Of CLIP-L, which FrozenCLIPEmbedder counts from the embeddings, which are 0."""
LAYERS = {"last": -1, "penultimate": -2}
ENCODERS = {
    "FrozenCLIPEmbedder": "",
    **dict.fromkeys(
        ("FrozenOpenCLIPEmbedder", "FrozenOpenCLIPEmbedder2", "FrozenOpenCLIPEmbedder2_CLIPTokenizer"), "_2"
    ),
}
"""Classes of text encoders, without the mark of a LoRA, and what ends the names of the encoder's settings here."""


def convert(reading: Reading) -> None:
    """Reads a whole config. UserError for SDXL's refiner."""
    check_kind(reading)
    reading.take(TABLES["model"])
    _objective(reading)
    _unet(reading, f"{MODEL}network_config.")
    reading.take(TABLES["conditioner"], f"{MODEL}conditioner_config.")
    for key in reading.keys(f"{MODEL}conditioner_config.params.emb_models.*.target"):
        _embedder(reading, key.removesuffix("target"))
    reading.take(TABLES["first_stage"], f"{MODEL}first_stage_config.")
    _learning(reading)
    _data(reading)
    reading.aliases()
    plain = not last(reading.get("optim.optimizer_config.target")).startswith("AdamWeightDecay")
    of_one_source = [path for path in TABLES["unasked"] if path.startswith("data.")] if _is_dreambooth(reading) else []
    own = {"data.resolution", "data.interpolation"}
    if _has_tokens(reading):
        reading.assume(TABLES["unasked_of_tokens"])
    without = [*(["optimizer.epsilon"] if plain else []), *(path for path in of_one_source if path not in own)]
    reading.assume(TABLES["unasked"], *without)


def check_kind(reading: Reading) -> None:
    """Raises UserError for a config of another model than SDXL's base."""
    named = [
        f"{reading.get(key)}" for key in reading.rest if key.rpartition(".")[2] in ("target", "version", "input_key")
    ]
    words = " ".join([*named, *reading.rest])
    for pattern, instead in TABLES["other_kinds"].items():
        if re.search(pattern, words, re.IGNORECASE):
            raise UserError(instead, code="unsupported")


def _objective(reading: Reading) -> None:
    """Denoiser, its weighting and scaling, the law of noise levels and the loss, which are one objective together."""
    denoiser, sampler = f"{MODEL}denoiser_config.params", f"{MODEL}sigma_sampler_config"
    scaling, weighting = (f"{denoiser}.{name}_config" for name in ("scaling", "weighting"))
    scales, weights = last(reading.get(f"{scaling}.target")), last(reading.get(f"{weighting}.target"))
    name = next((objective for scale, objective in TABLES["objectives"].values() if scale == scales), None)
    if weights not in TABLES["objectives"] or TABLES["objectives"][weights][0] != scales:
        reading.refuse(f"{weighting}.target", f"no weighting here is {weights} with {scales}: see objective.weighting")
    if name:
        reading.carry(f"{scaling}.target", "objective.name", name)
    reading.notice(f"{weighting}.target", "the loss is the plain square error of the prediction")
    if name == "edm":
        sigma = reading.get(f"{scaling}.params.sigma_data", 0.5)
        reading.take(TABLES["edm"], MODEL)
        reading.expect(f"{weighting}.params.sigma_data", sigma, "scaling and weighting share one sigma_data")
        if last(reading.get(f"{sampler}.target")) == "EDMSampling":
            reading.take(TABLES["edm_sampling"], MODEL)
    else:
        reading.take(TABLES["discrete"], MODEL)
        if reading.get(f"{sampler}.params.num_idx") == reading.get(f"{denoiser}.num_idx", 1000):
            reading.notice(f"{sampler}.params.num_idx", "the timesteps of the schedule")
    reading.take(TABLES["loss"], MODEL)


def _unet(reading: Reading, key: str) -> None:
    """The UNet: SDXL's own, or one of other numbers, which starts from random weights."""
    reading.take(TABLES["unet"], key)
    if _has_lora(reading):
        values = {"name": "lora", "rank": 4, "targets": "attention"}
        reading.assume({f"adapters.lora.{name}": value for name, value in values.items()})
        reading.take(_named(TABLES["lora"]), f"{key}params.")
    elif "adapters.controlnet.name" in reading.values:
        _controlnet(reading, f"{key}params.")
    keys = reading.keys(f"{key}params.*")
    numbers = _numbers({name.rpartition(".")[2]: reading.get(name) for name in keys})
    own = _published()
    differs = any(own.get(name) != value for name, value in numbers.items())
    for name in keys if numbers else ():
        if differs:
            reading.carry_all(
                name,
                {"model.unet": own | numbers},
                "its shape differs from the base model's, so it starts from random weights",
            )
        reading.notice(name, "the base's own")


def _controlnet(reading: Reading, key: str) -> None:
    """A ControlNet of the UNet, which has the UNet's numbers. Rates are scaled by its command."""
    reading.take(TABLES["controlnet"], key)
    stage = f"{key}control_stage_config.params."
    for name in reading.keys(f"{stage}*"):
        if reading.get(name) == reading.get(name.replace(stage, key)):
            reading.notice(name, "that of the UNet")
        reading.refuse(name, "a ControlNet has the UNet's numbers: adapters.controlnet.size leaves out blocks of it")
    reading.assume(TABLES["unasked_of_controlnet"])


def _published() -> dict[str, Any]:
    folder = architectures.find("sdxl")
    assert folder is not None, "it ships with the package"
    document = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in document.items() if not name.startswith("_") and name != "sample_size"}


def _numbers(theirs: dict[str, Any]) -> dict[str, Any]:
    """Their numbers of a UNet as diffusers' ones; nothing where one is missing or of another kind."""
    single = ("model_channels", "num_res_blocks", "num_head_channels", "context_dim", "adm_in_channels")
    several = ("channel_mult", "attention_resolutions")
    if not all(_whole(theirs.get(name)) for name in single) or "transformer_depth" not in theirs:
        return {}
    if not all(isinstance(theirs.get(name), list) and all(map(_whole, theirs[name])) for name in several):
        return {}
    mult, depth = theirs["channel_mult"], theirs["transformer_depth"]
    channels = [theirs["model_channels"] * factor for factor in mult]
    attends = [2**level in theirs["attention_resolutions"] for level in range(len(mult))]
    return {
        "block_out_channels": channels,
        "layers_per_block": theirs["num_res_blocks"],
        "attention_head_dim": [width // theirs["num_head_channels"] for width in channels],
        "transformer_layers_per_block": depth if isinstance(depth, list) else [depth] * len(mult),
        "cross_attention_dim": theirs["context_dim"],
        "projection_class_embeddings_input_dim": theirs["adm_in_channels"],
        "down_block_types": ["CrossAttnDownBlock2D" if has else "DownBlock2D" for has in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if has else "UpBlock2D" for has in reversed(attends)],
    }


def _whole(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _embedder(reading: Reading, key: str) -> None:
    """A text encoder, or an embedding of sizes."""
    name, field = last(reading.get(f"{key}target")).removesuffix("_lora"), str(reading.get(f"{key}input_key"))
    sizes = ("original_size_as_tuple", "crop_coords_top_left", "target_size_as_tuple")
    if name == "ConcatTimestepEmbedderND" and field in sizes:
        for part in ("target", "input_key"):
            reading.notice(f"{key}{part}", f"{field} conditions the UNet, as SDXL has it")
        reading.take(TABLES["sizes"], key)
    if field == "txt" and name not in ENCODERS:
        for part in reading.keys(f"{key}*"):
            reading.refuse(part, f"{name} is no text encoder of SDXL's here: the base's own takes its place")
    if field != "txt" or name not in ENCODERS:
        return
    mark = ENCODERS[name]
    reading.notice(f"{key}target", f"the text encoder model.text_encoder{mark}")
    if _has_lora(reading):
        _encoder_lora(reading, key, f"text_encoder{mark}")
    elif _adapts(reading) and (reading.get(f"{key}is_trainable") is False or _has_tokens(reading)):
        reading.notice(f"{key}is_trainable", "frozen")
    elif reading.get(f"{key}is_trainable") is True and reading.get(f"{key}params.freeze", True) is not False:
        why = (
            "it has no effect there, as `freeze` is True unless it is given: model.train_text_encoder{0}=true trains it"
        )
        reading.refuse(f"{key}is_trainable", why.format(mark))
    reading.carry(f"{key}is_trainable", f"model.train_text_encoder{mark}")
    reading.notice(f"{key}params.freeze", f"model.train_text_encoder{mark} says it")
    layer, index = reading.get(f"{key}params.layer"), reading.get(f"{key}params.layer_idx")
    if layer == "hidden" and isinstance(index, int):
        ours = index - CLIP_LAYERS - 1 if index > 0 else index
        reading.carry(f"{key}params.layer_idx", f"model.text_encoder_layer{mark}", ours)
        reading.notice(f"{key}params.layer", f"model.text_encoder_layer{mark} says which")
    elif str(layer) in LAYERS:
        reading.carry(f"{key}params.layer", f"model.text_encoder_layer{mark}", LAYERS[str(layer)])
    if reading.get(f"{key}params.version") == "openai/clip-vit-large-patch14":
        reading.notice(f"{key}params.version", "the base's own")
    reading.carry(f"{key}params.version", f"model.text_encoder{mark}")
    reading.take(TABLES["encoder"], key)


def _has_lora(reading: Reading) -> bool:
    return last(reading.get(f"{MODEL}network_config.target")) == "UNetModel_lora"


def _adapts(reading: Reading) -> bool:
    """True for a ControlNet or new tokens, with which everything else is frozen."""
    return _has_tokens(reading) or "adapters.controlnet.name" in reading.values


def _has_tokens(reading: Reading) -> bool:
    return last(reading.get("data.dataset_config.target")) == "Text2ImageDatasetTextualInversion"


def _named(table: dict[str, Any]) -> dict[str, Any]:
    """A table in which an alias without a name is the key's own."""
    return {
        name: {"alias": name} if isinstance(row, dict) and row.get("alias") == "" else row
        for names, row in table.items()
        for name in names.split(", ")
    }


def _encoder_lora(reading: Reading, key: str, component: str) -> None:
    """The LoRA of a text encoder, which there stands in its own class."""
    rank = reading.get(f"{key}params.lora_dim")
    for number in ("alpha", "dropout"):
        of_unet = reading.get(f"{MODEL}network_config.params.lora_{number}")
        if reading.get(f"{key}params.lora_{number}", of_unet) != of_unet:
            reading.refuse(
                f"{key}params.lora_{number}", f"it differs from the UNet's: set adapters.lora.{number}_pattern"
            )
    if last(reading.get(f"{key}target")).endswith("_lora"):
        reading.carry(f"{key}params.lora_dim", f"adapters.lora.ranks.{component}", rank)
        reading.take(_named(TABLES["lora_of_encoder"]), f"{key}params.")
    elif reading.get(f"{key}is_trainable") is True:
        reading.refuse(
            f"{key}is_trainable", "beside a LoRA of the UNet: add adapters.encoder={name: full, train: [...]}"
        )
    reading.notice(f"{key}is_trainable", "in the LoRA's ranks")


def _is_dreambooth(reading: Reading) -> bool:
    return last(reading.get("data.dataset_config.target")) == "Text2ImageDatasetDreamBooth"


def _learning(reading: Reading) -> None:
    reading.take(TABLES["learning"], "optim.")
    scheduler = "optim.scheduler_config.params."
    steps = _only(reading.get(f"{scheduler}warm_up_steps"))
    if isinstance(steps, int | float):
        reading.carry(f"{scheduler}warm_up_steps", "lr_scheduler.warmup", f"{int(steps)} steps")
    if [_only(reading.get(f"{scheduler}{name}")) for name in ("f_max", "f_min")] == [1, 1]:
        reading.take(TABLES["constant_after_warmup"], scheduler)
    for key in ("optim.scheduler_config.target", *reading.keys(f"{scheduler}*")):
        name = last(reading.get("optim.scheduler_config.target"))
        reading.refuse(key, f"{name}: the rate stays as it is here; lr_scheduler.name has the schedules that are there")


def _only(value: Any) -> Any:
    """The one member of a list, or the value itself."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _two_sets(reading: Reading) -> None:
    """Carries what both sets of DreamBooth share."""
    size = reading.get("data.per_batch_size")
    if isinstance(size, int):
        reading.carry("data.per_batch_size", "training.per_device_batch_size", 2 * size, "with as many class images")
    sets = ("data.sources.instance", "data.sources.class")
    reading.carry_all("data.shuffle", {f"{place}.shuffle": reading.get("data.shuffle") for place in sets})


def _data(reading: Reading) -> None:
    if _is_dreambooth(reading):
        _two_sets(reading)
    reading.take(TABLES["data"], "data.")
    reading.carry(f"{DATA}.caption_key", "data.captions.fields", [reading.get(f"{DATA}.caption_key")])
    sizes = reading.get(f"{DATA}.multi_aspect")
    if isinstance(sizes, list) and sizes and all(isinstance(size, list) and len(size) == 2 for size in sizes):
        why = (
            "each image goes to the bucket with the nearest aspect ratio; MindOne chooses the bucket of a batch at "
            "random"
        )
        aspects = [f"{one}/{other}" for one, other in sizes]
        reading.carry(f"{DATA}.multi_aspect", "data.buckets.aspects", aspects, why)
    for key in [*reading.keys(f"{DATA}.transforms.*.target"), *reading.keys(f"{DATA}.batched_transforms.*.target")]:
        name, prefix = last(reading.get(key)), key.removesuffix("target")
        reading.take(TABLES["transforms"].get(name, {}), prefix)
        if set(reading.get(f"{prefix}params.key") or ()) <= {"image", "control"}:
            reading.notice(f"{prefix}params.key", "control images follow their images")
        if name in TABLES["sizes_of_transforms"]:
            target = reading.get(f"{DATA}.target_size")
            reading.expect(f"{prefix}params.size", target, TABLES["sizes_of_transforms"][name])
