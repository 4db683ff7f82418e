"""What MindOne SDXL's keys mean here: trees of `target` and `params`. What targets mean is a closed list.

The engine, its optimizer and its data are read here, the networks in config_import/mindone_networks.py.
"""

from __future__ import annotations

import re
from typing import Any

from daguerre.config_import import mindone_networks as nets
from daguerre.config_import.defaults import unasked
from daguerre.config_import.reader import REQUIRED, Reading, last
from daguerre.errors import UserError

KINDS = (
    # what stands in a target, or in the name of a key, the kind of config that it is, and what to do
    ("textual_?inversion", "a config of textual inversion", "training of new tokens is not there yet"),
    ("control_?(net|stage)", "a config of a ControlNet", "ControlNet is not there yet"),
    ("lora", "a config of LoRA", "LoRA is not there yet"),
    ("refiner|aesthetic_score", "a config of SDXL's refiner", "the refiner is not planned: the base alone is trained"),
    (
        "dreambooth",
        "a config of DreamBooth",
        "it has a recipe of its own: daguerre train sdxl_dreambooth instance_data_dir=... (docs/dreambooth.md)",
    ),
)
"""Kinds of training other than that of the whole UNet, as which such a config would come out."""
NAMED = ("target", "version", "input_key")
"""Keys whose values name what they are."""
VERSIONS = {"SDXL-base-1.0": "stabilityai/stable-diffusion-xl-base-1.0"}
MODEL, OPTIM = "model.params", "optim"

OBJECTIVES = {
    # (scaling, weighting): what is predicted; in each the loss is plain MSE in the space of the prediction
    ("EpsScaling", "EpsWeighting"): "eps",
    ("VScaling", "VWeighting"): "v",
    ("EDMScaling", "EDMWeighting"): "edm",
}
DISCRETE = ("DiscreteDenoiser", "DiscreteSampling", "LegacyDDPMDiscretization")
OPTIMIZERS = ("AdamWeightDecay", "AdamW")
SCHEDULES = ("LambdaWarmUpScheduler", "LambdaLinearScheduler")
SOURCES = {
    "Text2ImageDataset": {"data.source": "csv", "data.image_column": "dir", "data.caption_column": "text"},
    "T2I_Webdataset": {"data.source": "webdataset"},
    "T2I_Webdataset_RndAcs": {"data.source": "webdataset"},
    "T2I_BaseDataset": {"data.source": "webdataset"},
}
INTERPOLATION = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "area", 5: "bicubic"}
"""Numbers of `Resize`, and the filters that they are."""
LENGTHS = ("cycle_lengths", "f_start", "f_max", "f_min")


def convert(reading: Reading) -> None:
    """Reads a whole config. UserError for one that trains something else than the whole UNet."""
    refuse_other_kinds(reading)
    version = str(reading.get("version"))
    if version in VERSIONS:
        reading.carry("version", "model.pretrained_model_name_or_path", VERSIONS[version])
    target = reading.get("model.target")
    reading.expect("model.target", target if last(target) == "DiffusionEngine" else None, "the loop trains the network")
    reading.carry(f"{MODEL}.scale_factor", "model.scaling_factor")
    for name in ("latents_mean", "latents_std"):
        reading.carry(f"{MODEL}.{name}", f"model.{name}")
    reading.alias(f"{MODEL}.disable_first_stage_amp", "disable_first_stage_amp")
    _objective(reading)
    nets.convert(reading)
    _optimizer(reading)
    _data(reading)
    reading.aliases()
    plain = last(reading.get(f"{OPTIM}.optimizer_config.target")) != "AdamWeightDecay"
    reading.assume({"run_name": REQUIRED, "training.duration": "1 epochs"})
    reading.assume(unasked("MindOne", "ema.name", *(["optimizer.epsilon"] if plain else [])))


def refuse_other_kinds(reading: Reading) -> None:
    """UserError that says what a config is which trains something else than the whole UNet of SDXL's base."""
    said = [f"{reading.get(key)}" for key in reading.rest if key.rpartition(".")[2] in NAMED]
    words = " ".join([*said, *(part for key in reading.rest for part in key.split("."))])
    for pattern, kind, instead in KINDS:
        if re.search(pattern, words, re.IGNORECASE):
            raise UserError(f"{kind}: {instead}")


def _objective(reading: Reading) -> None:
    """Denoiser, its weighting and scaling, the law of noise levels and the loss, which are one objective together."""
    denoiser, sampler = f"{MODEL}.denoiser_config", f"{MODEL}.sigma_sampler_config"
    scaling, weighting = (f"{denoiser}.params.{name}_config" for name in ("scaling", "weighting"))
    pair = (last(reading.get(f"{scaling}.target")), last(reading.get(f"{weighting}.target")))
    name = OBJECTIVES.get(pair)
    if name is None:
        reading.refuse(f"{weighting}.target", f"no weighting here is {pair[1]} with {pair[0]}: see objective.weighting")
        name = {scale: objective for (scale, _), objective in OBJECTIVES.items()}.get(pair[0])
    if name:
        reading.carry(f"{scaling}.target", "objective.name", name)
    reading.notice(f"{weighting}.target", "the loss is the plain square error of the prediction")
    if name == "edm":
        _edm(reading, scaling, weighting, sampler)
    else:
        _discrete(reading, denoiser, sampler)
    _loss(reading)


def _edm(reading: Reading, scaling: str, weighting: str, sampler: str) -> None:
    sigma = reading.get(f"{scaling}.params.sigma_data", 0.5)
    reading.carry(f"{scaling}.params.sigma_data", "objective.sigma_data")
    reading.expect(f"{weighting}.params.sigma_data", sigma, "sigma_data of scaling and weighting are one")
    reading.notice(f"{MODEL}.denoiser_config.target", "noise levels are continuous")
    if last(reading.get(f"{sampler}.target")) == "EDMSampling":
        reading.notice(f"{sampler}.target", "objective.times of edm: log_normal")
        reading.carry(f"{sampler}.params.p_mean", "objective.times.mean")
        reading.carry(f"{sampler}.params.p_std", "objective.times.std")


def _discrete(reading: Reading, denoiser: str, sampler: str) -> None:
    for prefix in (denoiser, sampler):
        for key in (f"{prefix}.target", f"{prefix}.params.discretization_config.target"):
            if last(reading.get(key)) in DISCRETE:
                reading.notice(key, "uniform timesteps of the schedule scaled_linear")
    reading.carry(f"{denoiser}.params.num_idx", "objective.schedule.num_train_timesteps")
    steps = reading.get(f"{denoiser}.params.num_idx", 1000)
    if reading.get(f"{sampler}.params.num_idx") == steps:
        reading.notice(f"{sampler}.params.num_idx", "the timesteps of the schedule")


def _loss(reading: Reading) -> None:
    loss = f"{MODEL}.loss_fn_config"
    if last(reading.get(f"{loss}.target")) == "StandardDiffusionLoss":
        reading.notice(f"{loss}.target", "the loss of the objective")
    reading.alias(f"{loss}.params.offset_noise_level", "offset_noise_level")
    if reading.get(f"{loss}.params.type") == "l2":
        reading.notice(f"{loss}.params.type", "the square error")


def _optimizer(reading: Reading) -> None:
    optimizer, scheduler = f"{OPTIM}.optimizer_config", f"{OPTIM}.scheduler_config"
    if last(reading.get(f"{optimizer}.target")) in OPTIMIZERS:
        why = "with the correction of bias that the first updates need"
        reading.carry(f"{optimizer}.target", "optimizer.name", "adamw", why)
    if last(reading.get(f"{scheduler}.target")) in SCHEDULES:
        reading.carry(f"{scheduler}.target", "lr_scheduler.name", "constant")
    steps = _only(reading.get(f"{scheduler}.params.warm_up_steps"))
    if isinstance(steps, int | float):
        reading.carry(f"{scheduler}.params.warm_up_steps", "lr_scheduler.warmup", f"{int(steps)} steps")
    shape = [_only(reading.get(f"{scheduler}.params.{name}")) for name in LENGTHS]
    if shape[2:] == [1, 1]:  # after warm-up the rate stays
        for name in LENGTHS:
            reading.notice(f"{scheduler}.params.{name}", "a rise from (almost) nothing to the peak, which then stays")


def _only(value: Any) -> Any:
    """The one member of a list, or the value itself."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _data(reading: Reading) -> None:
    reading.carry("data.shuffle", "data.shuffle")
    source = SOURCES.get(last(reading.get("data.dataset_config.target")))
    if source:
        reading.carry_all("data.dataset_config.target", source)
    params = "data.dataset_config.params"
    caption = reading.get(f"{params}.caption_key")
    reading.carry(f"{params}.caption_key", "data.captions.fields", [caption])
    _shapes(reading, f"{params}.multi_aspect")
    steps = [*reading.keys(f"{params}.transforms.*"), *reading.keys(f"{params}.batched_transforms.*")]
    for key in [key for key in steps if key.endswith(".target")]:
        _transform(reading, key.removesuffix(".target"), last(reading.get(key)))
    reading.assume({"data.source": "csv"})


def _shapes(reading: Reading, key: str) -> None:
    """Pictures of several shapes: there a batch takes one of them by chance, here each picture the nearest."""
    sizes = reading.get(key)
    if isinstance(sizes, list) and sizes and all(isinstance(size, list) and len(size) == 2 for size in sizes):
        why = "each picture goes to the nearest shape; there a batch takes one by chance"
        reading.carry(key, "data.buckets.aspects", [f"{one}/{other}" for one, other in sizes], why)


def _transform(reading: Reading, key: str, name: str) -> None:
    size = reading.get("data.dataset_config.params.target_size")
    if name == "Resize":
        reading.notice(f"{key}.target", "pictures are resized to cover the square")
        reading.expect(f"{key}.params.size", size, "pictures are resized to data.resolution")
        number = reading.get(f"{key}.params.interpolation")
        if isinstance(number, int) and number in INTERPOLATION:
            reading.carry(f"{key}.params.interpolation", "data.interpolation", INTERPOLATION[number])
    elif name == "AddOriginalImageSizeAsTupleAndCropToSquare":
        reading.carry(f"{key}.target", "data.crop", "random", "sizes and crop are always kept")
    elif name == "BatchedResizedAndRandomCrop":
        reading.carry(f"{key}.target", "data.crop", "random", "pictures are resized to cover their shape")
    elif name == "CenterCrop":
        reading.carry(f"{key}.target", "data.crop", "center")
        reading.expect(f"{key}.params.size", size, "pictures are cropped to data.resolution")
    elif name == "RandomHorizontalFlip":
        reading.carry(f"{key}.target", "data.random_flip", True)
        reading.expect(f"{key}.params.p", 0.5, "half of the pictures are mirrored")
    elif name in ("Rescaler", "BatchedRescaler"):
        reading.notice(f"{key}.target", "pixels are scaled to -1 to 1 where they are encoded")
        reading.expect(f"{key}.params.isfloat", False, "pixels are read as 0 to 255")
    elif name in ("Transpose", "BatchedTranspose"):
        reading.notice(f"{key}.target", "the order of a picture's axes is the engine's")
        reading.expect(f"{key}.params.type", "hwc2chw", "the order of a picture's axes is the engine's")
