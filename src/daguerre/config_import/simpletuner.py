"""What SimpleTuner's config.json and config.env mean here, with the data sets of their data_backend_config."""

from __future__ import annotations

import re
from typing import Any

from daguerre.config_import import base_models as models
from daguerre.config_import import peers
from daguerre.config_import.peers import Folder
from daguerre.config_import.reader import REQUIRED, Reading

TRAINER = "SimpleTuner"
UNASKED: dict[str, Any] = peers.UNASKED | {
    # Gradients are clipped by value there, which is not there here.
    "training.per_device_batch_size": 4,
    "training.gradient_checkpointing": True,
    "training.mixed_precision": "bf16",
    "training.max_grad_norm": None,
    "optimizer.learning_rate": 4e-7,
    "checkpoint.every": "500 steps",
    "checkpoint.keep": 5,
    "data.resolution": 1024,
    "data.buckets.aspects": "auto",
}
FAMILIES = {"sdxl": "sdxl", "sd1x": "sd", "sd2x": "sd", "legacy": "sd"}
FLAGS_OF_OTHERS = ("stable_diffusion_3", "flux", "pixart_sigma", "kolors", "hunyuan_dit", "deepfloyd")
NO_MATTER = (
    *(
        "vae_*",
        "cache_*",
        "text_cache_*",
        "*_batch_size",
        "max_workers",
        "aws_max_pool_connections",
        "torch_num_threads",
    ),
    *("metadata_update_interval", "delete_*", "disable_benchmark", "webhook_*", "tracker_image_layout", "i_know_*"),
    *("aspect_bucket_rounding", "minimum_image_size", "preserve_*", "skip_file_discovery", "validation_torch_compile"),
    *(
        "training_scheduler_timestep_spacing",
        "model_flavour",
        "hub_*",
        "lora_*",
        "lycoris_*",
        "flux_*",
        "user_prompt_library",
    ),
    *("validation_guidance_real", "validation_no_cfg_until_timestep", "tokenizers_parallelism", "resolution_type"),
    *("training_dynamo_backend", "validation_on_startup", "validation_randomize", "debug_*", "print_*", "report_*"),
)
OF_A_BACKEND = (
    *(
        "id",
        "type",
        "dataset_type",
        "disabled",
        "cache_*",
        "*cache*",
        "text_embeds",
        "image_embeds",
        "skip_file_discovery",
    ),
    *("metadata_backend", "resolution", "resolution_type", "minimum_image_size", "maximum_image_size", "default"),
    *("target_downsample_size", "crop", "instance_prompt", "only_instance_prompt", "repeats", "probability"),
    *(
        "preserve_data_backend_cache",
        "write_batch_size",
        "caption_strategy",
        "instance_data_dir",
        "metadata_update_interval",
    ),
)


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    if str(reading.get("model_type", "full")) != "full":
        raise peers.not_there("LoRA", TRAINER)
    if reading.get("controlnet") is True:
        raise peers.not_there("ControlNet", TRAINER)
    family = str(reading.get("model_family") or "")
    others = [name for name in FLAGS_OF_OTHERS if reading.get(name) is True]
    if others or (family and family not in FAMILIES):
        raise peers.not_there(f"a model of the family {family or others[0]}", TRAINER)
    _model(reading, family)
    reading.carry("tracker_run_name", "run_name")
    reading.assume({"run_name": REQUIRED, "output_dir": "simpletuner-results"})
    folders = _folders(reading)
    peers.lay(reading, folders)
    _backends(reading, folders)
    _sizes(reading)
    _length(reading, folders)
    _learning(reading)
    _sampling(reading)
    dropout = reading.get("caption_dropout_probability", 0.1)
    for place in [folder.place for folder in folders] or ["data"]:
        reading.assume_over({f"{place}.caption_dropout": dropout})
    reading.notice("caption_dropout_probability", "the caption_dropout of its sources")
    reading.notice("data_backend_config", "the data sets of that file are read with this one")
    reading.notice("model_type", "the whole network is trained")
    peers.carry_known(reading, [key for key in reading.rest if "." not in key])
    peers.finish(reading, NO_MATTER, UNASKED)


def _model(reading: Reading, family: str) -> None:
    base = models.base(reading.get("pretrained_model_name_or_path", REQUIRED))
    reading.carry("model_family", "model.family", FAMILIES.get(family, base.family))
    for name in ("stable_diffusion_legacy", *FLAGS_OF_OTHERS):
        reading.notice(name, "in model.family")
    values = {"model.family": FAMILIES.get(family, base.family), "objective.name": base.objective}
    reading.assume(values | {"model.pretrained_model_name_or_path": REQUIRED})


def _folders(reading: Reading) -> list[Folder]:
    """Local data sets of pictures; all others are refused, or hold no pictures."""
    numbers = sorted({int(key.split(".")[1]) for key in reading.keys("data_backends.*.*")})
    found = []
    for prefix in (f"data_backends.{number}" for number in numbers):
        kind = str(reading.get(f"{prefix}.dataset_type", "image"))
        if kind != "image" or reading.get(f"{prefix}.disabled") is True:
            for key in reading.keys(f"{prefix}.*"):
                reading.notice(key, "it holds no pictures that are trained on")
            continue
        if reading.get(f"{prefix}.type", "local") != "local":
            for key in reading.keys(f"{prefix}.*"):
                reading.refuse(
                    key, "data sets in stores are read as shards or tables: data.source=webdataset or parquet"
                )
            continue
        found.append(_folder(reading, prefix))
    return found


def _folder(reading: Reading, prefix: str) -> Folder:
    strategy, prompt = reading.get(f"{prefix}.caption_strategy", "filename"), reading.get(f"{prefix}.instance_prompt")
    settings: dict[str, Any] = {"captions_from": "file_names"} if strategy == "filename" else {}
    if strategy == "instanceprompt" or reading.get(f"{prefix}.only_instance_prompt") is True:
        settings = {"captions.text": prompt or REQUIRED}
    repeats, share = reading.get(f"{prefix}.repeats", 0), reading.get(f"{prefix}.probability", 1)
    times = (repeats + 1 if isinstance(repeats, int) else 1) * (
        share if isinstance(share, int | float) and share else 1
    )
    path = reading.get(f"{prefix}.instance_data_dir", REQUIRED)
    return Folder(prefix, path, float(times), name=str(reading.get(f"{prefix}.id") or ""), settings=settings)


def _backends(reading: Reading, folders: list[Folder]) -> None:
    for folder in folders:
        for name, values in {"crop_style": ("center", "random"), "crop_aspect": ("square",)}.items():
            value = reading.get(f"{folder.key}.{name}")
            if value in values:
                path = "data.crop" if name == "crop_style" else "data.buckets.aspects"
                reading.carry(f"{folder.key}.{name}", path)
        if reading.get(f"{folder.key}.crop_aspect") == "preserve" or reading.get(f"{folder.key}.crop") is False:
            reading.notice(f"{folder.key}.crop_aspect", "buckets keep the shape of pictures as far as they can")
            reading.notice(f"{folder.key}.crop_style", "buckets keep the shape of pictures as far as they can")
        if reading.get(f"{folder.key}.prepend_instance_prompt") is True:
            prompt = reading.get(f"{folder.key}.instance_prompt")
            reading.carry(f"{folder.key}.prepend_instance_prompt", f"{folder.place}.captions.prefix", f"{prompt} ")
        for name in OF_A_BACKEND:
            for key in reading.keys(f"{folder.key}.{name}"):
                reading.notice(key, "in its source, its weight, or of its cache; repeats=0 there is once")


def _sizes(reading: Reading) -> None:
    kind, size = str(reading.get("resolution_type", "pixel_area")), reading.get("resolution", 1024)
    if kind == "area" and isinstance(size, int | float):
        reading.carry("resolution", "data.resolution", round((size * 1e6) ** 0.5 / 64) * 64, "megapixels there")
    why = "the shorter side there, the root of the area here" if kind == "pixel" else ""
    if isinstance(size, int):
        reading.carry("resolution", "data.resolution", size, why)


def _length(reading: Reading, folders: list[Folder]) -> None:
    if peers.asks(reading.get("max_train_steps")):
        reading.notice("num_train_epochs", "max_train_steps is the length of the run")
    elif peers.asks(reading.get("num_train_epochs")):
        batch, parts = reading.get("train_batch_size", 4), reading.get("gradient_accumulation_steps", 1)
        reading.notice("max_train_steps", "num_train_epochs is the length of the run")
        peers.length(reading, "num_train_epochs", "training.duration", folders, (batch, parts))
    reading.assume({"training.duration": REQUIRED})


def _learning(reading: Reading) -> None:
    if str(reading.get("lr_scheduler")) == "constant":
        reading.notice("lr_warmup_steps", "lr_scheduler=constant has no warm-up")
    if str(reading.get("lr_scheduler")) == "polynomial":
        _polynomial(reading)
    if str(reading.get("grad_clip_method", "value")) == "value":
        reading.refuse(
            "max_grad_norm", "gradients are clipped by value there: give training.max_grad_norm for their norm"
        )
    reading.notice("grad_clip_method", "in training.max_grad_norm")
    if reading.get("offset_noise") is True:
        reading.carry("noise_offset", "objective.noise.offset", why="in every batch; a part of them there")
        reading.notice("offset_noise", "in objective.noise.offset")
    for key in ("noise_offset", "noise_offset_probability"):
        reading.notice(key, "offset_noise is off, or its number says it")
    if reading.get("use_ema") is not True:
        for key in ("use_ema", *reading.keys("ema_*")):
            reading.notice(key, "no averages")
    if str(reading.get("mixed_precision")) == "fp32":
        reading.carry("mixed_precision", "training.mixed_precision", "no")
    reading.carry("pure_bf16", "training.weights_dtype", "bfloat16" if reading.get("pure_bf16") is True else "float32")
    if str(reading.get("optimizer")) == "adamw_bf16":
        reading.notice("mixed_precision", "weights of 16 bits are computed with as they are")
        reading.assume({"training.mixed_precision": "auto"})


def _sampling(reading: Reading) -> None:
    size = re.fullmatch(r"(\d+)x(\d+)", str(reading.get("validation_resolution")))
    if size:
        values = {"sampling.width": int(size[1]), "sampling.height": int(size[2])}
        reading.carry_all("validation_resolution", values)
    side = reading.get("validation_resolution")
    reading.carry_all("validation_resolution", {"sampling.width": side, "sampling.height": side})
    reading.carry("validation_seed", "sampling.seed")


def _polynomial(reading: Reading) -> None:
    """The rate at the end is a number there and a share of the peak here."""
    try:
        share = float(reading.get("lr_end", 4e-7)) / float(reading.get("learning_rate", 4e-7))
    except (TypeError, ValueError, ZeroDivisionError):
        return
    reading.carry("lr_end", "lr_scheduler.final", min(1.0, float(f"{share:.6g}")), "a share of the peak")
    reading.assume({"lr_scheduler.power": 0.8, "lr_scheduler.final": min(1.0, float(f"{share:.6g}"))})
