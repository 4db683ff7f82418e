"""What MindOne SDXL's keys mean here: trees of `target` and `params`. What targets mean is a closed list.

The engine, its optimizer and its data are read here, the networks in convert_config_mindone_nets.py.
"""

from __future__ import annotations

from typing import Any

from daguerre.commands import convert_config_mindone_nets as nets
from daguerre.commands.convert_config_reading import REQUIRED, Reading, last

UNASKED = {
    # What it does without a key: SDXL's own networks, every caption, no averages; norms and biases are not decayed.
    "model.family": "sdxl",
    "model.pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
    "data.caption_dropout": 0.0,
    "ema.enabled": False,
    "lr_scheduler.name": "constant",
    "run_name": REQUIRED,
    "data.path": REQUIRED,
}
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
    """Reads a whole config."""
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
    reading.assume(UNASKED)


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
    reading.carry(f"{OPTIM}.base_learning_rate", "optimizer.learning_rate")
    if last(reading.get(f"{optimizer}.target")) in OPTIMIZERS:
        why = "with the correction of bias that the first updates need"
        reading.carry(f"{optimizer}.target", "optimizer.name", "adamw", why)
    for theirs, ours in {"beta1": "beta1", "beta2": "beta2", "eps": "epsilon", "weight_decay": "weight_decay"}.items():
        reading.carry(f"{optimizer}.params.{theirs}", f"optimizer.{ours}")
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
    reading.carry("data.per_batch_size", "training.per_device_batch_size", why="of each device")
    reading.carry("data.total_step", "training.duration", f"{reading.get('data.total_step')} steps")
    reading.carry("data.num_parallel_workers", "loader.num_workers")
    reading.carry("data.shuffle", "data.shuffle")
    reading.alias("data.python_multiprocessing", "python_multiprocessing")
    source = SOURCES.get(last(reading.get("data.dataset_config.target")))
    if source:
        reading.carry_all("data.dataset_config.target", source)
    params = "data.dataset_config.params"
    reading.carry(f"{params}.target_size", "data.resolution")
    reading.carry(f"{params}.prompt_empty_probability", "data.caption_dropout")
    reading.alias(f"{params}.lpw", "lpw")
    caption = reading.get(f"{params}.caption_key")
    reading.carry(f"{params}.caption_key", "data.captions.fields", [caption])
    transforms = [key for key in reading.keys(f"{params}.transforms.*") if key.endswith(".target")]
    for key in transforms:
        _transform(reading, key.removesuffix(".target"), last(reading.get(key)))
    reading.assume({"data.source": "csv"})


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
    elif name == "CenterCrop":
        reading.carry(f"{key}.target", "data.crop", "center")
        reading.expect(f"{key}.params.size", size, "pictures are cropped to data.resolution")
    elif name == "RandomHorizontalFlip":
        reading.carry(f"{key}.target", "data.random_flip", True)
        reading.expect(f"{key}.params.p", 0.5, "half of the pictures are mirrored")
    elif name == "Rescaler":
        reading.notice(f"{key}.target", "pixels are scaled to -1 to 1 where they are encoded")
        reading.expect(f"{key}.params.isfloat", False, "pixels are read as 0 to 255")
    elif name == "Transpose":
        reading.notice(f"{key}.target", "the order of a picture's axes is the engine's")
        reading.expect(f"{key}.params.type", "hwc2chw", "the order of a picture's axes is the engine's")
