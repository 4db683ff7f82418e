"""What ai-toolkit's YAML and JSON mean here: a job with one process of type `sd_trainer`."""

from __future__ import annotations

from typing import Any

from daguerre.config.aliases.values import OPTIMIZERS
from daguerre.config_import import base_models as models
from daguerre.config_import import peers
from daguerre.config_import.peers import Folder
from daguerre.config_import.reader import REQUIRED, Reading
from daguerre.plugins import names

TRAINER, ROOT = "ai-toolkit", "config.process.0"
UNASKED: dict[str, Any] = peers.UNASKED | {
    "training.duration": "1000 steps",
    "training.per_device_batch_size": 1,
    "training.gradient_checkpointing": True,
    "training.mixed_precision": "no",
    "optimizer.learning_rate": 1e-6,
    "checkpoint.every": "1000 steps",
    "data.buckets.aspects": "auto",
}
OTHERS = {
    "network": "LoRA",
    "adapter": "an adapter (ControlNet, IP-Adapter ...)",
    "embedding": "new tokens",
    "slider": "a slider",
}
SAME = {
    "training_folder": "output_dir",
    "save.max_step_saves_to_keep": "checkpoint.keep",
    "model.name_or_path": "model.pretrained_model_name_or_path",
    "model.vae_path": "model.vae",
    "train.batch_size": "training.per_device_batch_size",
    "train.gradient_accumulation": "training.gradient_accumulation_steps",
    "train.gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "train.gradient_checkpointing": "training.gradient_checkpointing",
    "train.train_unet": "model.train_unet",
    "train.lr": "optimizer.learning_rate",
    "train.max_grad_norm": "training.max_grad_norm",
    "train.noise_offset": "objective.noise.offset",
    "train.ema_config.use_ema": "ema.enabled",
    "train.optimizer_params.weight_decay": "optimizer.weight_decay",
    "train.optimizer_params.eps": "optimizer.epsilon",
    "sample.width": "sampling.width",
    "sample.height": "sampling.height",
    "sample.prompts": "sampling.prompts",
    "sample.seed": "sampling.seed",
    "sample.guidance_scale": "sampling.guidance_scale",
    "sample.guidance_rescale": "sampling.guidance_rescale",
    "sample.sample_steps": "sampling.num_inference_steps",
}
ALIASES = {
    "train.lr_scheduler": "lr_scheduler",
    "train.min_snr_gamma": "min_snr_gamma",
    "train.snr_gamma": "min_snr_gamma",
}
ALIASES |= {"train.loss_type": "loss_type", "train.xformers": "xformers", "train.sdp": "sdpa"}
OF_A_DATASET = {"shuffle_tokens": "captions.shuffle_tags", "caption_dropout_rate": "caption_dropout"}
NO_MATTER = (
    *("job", "meta.*", "config.process.*.type", f"{ROOT}.device", f"{ROOT}.performance_log_every", f"{ROOT}.logging.*"),
    *(f"{ROOT}.save.*", f"{ROOT}.sample.*", f"{ROOT}.model.dtype", f"{ROOT}.model.*_dtype", f"{ROOT}.model.low_vram"),
    *(f"{ROOT}.train.skip_first_sample", f"{ROOT}.train.disable_sampling", f"{ROOT}.train.timestep_type"),
    *(f"{ROOT}.train.unload_text_encoder", f"{ROOT}.train.attention_backend", f"{ROOT}.datasets.*.cache_*"),
    *(f"{ROOT}.datasets.*.num_workers", f"{ROOT}.datasets.*.prefetch_factor", f"{ROOT}.datasets.*.type"),
    *(f"{ROOT}.train.linear_timesteps*", f"{ROOT}.train.cache_text_embeddings", f"{ROOT}.sqlite_db_path"),
)


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    for name, what in OTHERS.items():
        if any(peers.asks(reading.get(key)) for key in reading.keys(f"{ROOT}.{name}*")):
            raise peers.not_there(what, TRAINER)
    _not_ours(reading)
    reading.carry("config.name", "run_name", reading.get("config.name") or REQUIRED)
    reading.assume({"run_name": REQUIRED, "output_dir": "output"})
    _model(reading)
    folders = _folders(reading)
    peers.lay(reading, folders)
    _datasets(reading, folders)
    for key, path in SAME.items():
        if reading.get(f"{ROOT}.{key}") is not None:
            reading.carry(f"{ROOT}.{key}", path)
    for key, name in ALIASES.items():
        reading.alias(f"{ROOT}.{key}", name)
    _training(reading)
    peers.finish(reading, NO_MATTER, UNASKED)


def _not_ours(reading: Reading) -> None:
    """Refuses models of other kinds, and schedulers that belong to them."""
    kinds = [key.rpartition(".is_")[2] for key in reading.keys(f"{ROOT}.model.is_*") if reading.get(key) is True]
    others = [kind for kind in kinds if kind not in ("xl", "v2", "v_pred")]
    arch = str(reading.get(f"{ROOT}.model.arch") or "")
    if others or arch.partition(":")[0] not in ("", "sd1", "sd15", "sd2", "sdxl"):
        raise peers.not_there(f"a model of type {others[0] if others else arch}", TRAINER)
    if reading.get(f"{ROOT}.model.quantize") is True:
        raise peers.not_there("quantised weights", TRAINER)


def _model(reading: Reading) -> None:
    base = models.base(reading.get(f"{ROOT}.model.name_or_path", REQUIRED))
    xl = reading.get(f"{ROOT}.model.is_xl") is True or reading.get(f"{ROOT}.model.arch") == "sdxl"
    family = "sdxl" if xl else base.family
    v = reading.get(f"{ROOT}.model.is_v_pred") is True
    reading.assume({"model.family": family, "objective.name": "v" if v else base.objective})
    reading.assume({"model.pretrained_model_name_or_path": REQUIRED})
    for name in ("is_xl", "is_v2", "is_v_pred", "arch"):
        reading.notice(f"{ROOT}.model.{name}", "in model.family and objective.name")
    encoders = ("train_text_encoder", "train_text_encoder_2") if family == "sdxl" else ("train_text_encoder",)
    trained = reading.get(f"{ROOT}.train.train_text_encoder") is True
    reading.carry_all(f"{ROOT}.train.train_text_encoder", {f"model.{name}": trained for name in encoders})
    rates = {"unet_lr": "unet.*"} | ({"text_encoder_lr": "text_encoder*"} if trained else {})
    given = {pattern: reading.get(f"{ROOT}.train.{name}") for name, pattern in rates.items()}
    for name in rates:
        reading.carry(f"{ROOT}.train.{name}", "optimizer.learning_rates", {k: v for k, v in given.items() if v})
    reading.notice(f"{ROOT}.train.text_encoder_lr", "no text encoder is trained")


def _folders(reading: Reading) -> list[Folder]:
    numbers = sorted({int(key.split(".")[4]) for key in reading.keys(f"{ROOT}.datasets.*.*")})
    found = []
    for prefix in (f"{ROOT}.datasets.{number}" for number in numbers):
        path = reading.get(f"{prefix}.folder_path", reading.get(f"{prefix}.dataset_path", REQUIRED))
        caption = reading.get(f"{prefix}.default_caption")
        repeats = reading.get(f"{prefix}.num_repeats", 1)
        found.append(Folder(prefix, path, float(repeats or 1), caption, reading.get(f"{prefix}.is_reg") is True))
    return found


def _datasets(reading: Reading, folders: list[Folder]) -> None:
    for folder in folders:
        paths = dict(OF_A_DATASET)
        if reading.get(f"{folder.key}.shuffle_tokens") is True:
            paths["keep_tokens"] = "captions.keep_tags"
        if len(folders) > 1:
            paths["loss_multiplier"] = "loss_weight"
        for name in ("folder_path", "dataset_path"):
            reading.carry(f"{folder.key}.{name}", f"{folder.place}.path")
        for name, path in paths.items():
            reading.carry(f"{folder.key}.{name}", f"{folder.place}.{path}")
        for name in ("num_repeats", "is_reg"):
            reading.notice(f"{folder.key}.{name}", "in data.weights, or data.repeats")
        reading.notice(f"{folder.key}.default_caption", "the caption of pictures that have none, where none has one")
        reading.carry(f"{folder.key}.flip_x", "data.random_flip")
        crop = reading.get(f"{folder.key}.random_crop")
        reading.carry(f"{folder.key}.random_crop", "data.crop", "random" if crop else "center")
        _shape(reading, folder.key)
        for name in ("caption_ext", "caption_type"):
            if str(reading.get(f"{folder.key}.{name}")).lstrip(".") == "txt":
                reading.notice(f"{folder.key}.{name}", "cat.txt is the caption of cat.jpg")
            reading.refuse(f"{folder.key}.{name}", "captions are read from .txt files: rename them")
    reading.assume({"data.resolution": 512})


def _shape(reading: Reading, prefix: str) -> None:
    """Sizes and buckets, which are one for all sources here."""
    given = reading.get(f"{prefix}.resolution")
    sizes = given if isinstance(given, list) else [given]
    whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    if whole:
        several = "the largest; each picture at several sizes is not there" if len(whole) > 1 else ""
        reading.carry(f"{prefix}.resolution", "data.resolution", max(whole), several)
    on = reading.get(f"{prefix}.buckets", True) is not False
    reading.carry(f"{prefix}.buckets", "data.buckets.aspects", "auto" if on else "square")
    if on and reading.get(f"{prefix}.bucket_tolerance"):
        reading.carry(f"{prefix}.bucket_tolerance", "data.buckets.step")
    reading.notice(f"{prefix}.bucket_tolerance", "no buckets")


def _training(reading: Reading) -> None:
    reading.carry(f"{ROOT}.train.steps", "training.duration", f"{reading.get(f'{ROOT}.train.steps')} steps")
    if peers.asks(reading.get(f"{ROOT}.save.save_every")):
        reading.carry(f"{ROOT}.save.save_every", "checkpoint.every", f"{reading.get(f'{ROOT}.save.save_every')} steps")
    if peers.asks(reading.get(f"{ROOT}.logging.log_every")):
        reading.carry(f"{ROOT}.logging.log_every", "logging.every", f"{reading.get(f'{ROOT}.logging.log_every')} steps")
    precision = {"bf16": "bf16", "fp16": "fp16", "fp32": "no", "float32": "no", "bfloat16": "bf16", "float16": "fp16"}
    key = f"{ROOT}.train.dtype"
    if str(reading.get(key)) in precision:
        reading.carry(key, "training.mixed_precision", precision[str(reading.get(key))])
    name = str(reading.get(f"{ROOT}.train.optimizer", "adamw")).lower().replace("_", "")
    if name in OPTIMIZERS:
        reading.carry(f"{ROOT}.train.optimizer", "optimizer.name", OPTIMIZERS[name])
    if reading.values.get("ema.enabled") is True:
        reading.carry(f"{ROOT}.train.ema_config.ema_decay", "ema.decay")
    reading.notice(f"{ROOT}.train.ema_config.ema_decay", "no averages")
    reading.expect(f"{ROOT}.train.noise_scheduler", "ddpm", "noise is added as the objective says")
    reading.expect(f"{ROOT}.train.content_or_style", "balanced", "times are drawn alike")
    negative = reading.get(f"{ROOT}.sample.neg")
    if isinstance(negative, str):
        reading.carry(f"{ROOT}.sample.neg", "sampling.negative_prompt")
    sampler = reading.get(f"{ROOT}.sample.sampler")
    if sampler in names("samplers"):
        reading.carry(f"{ROOT}.sample.sampler", "sampling.sampler")
