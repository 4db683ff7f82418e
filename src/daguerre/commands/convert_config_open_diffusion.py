"""What open-diffusion's (sd-training's) keys mean here: groups with `???` and interpolation, networks by target."""

from __future__ import annotations

from typing import Any

from daguerre.commands import convert_config_models as models
from daguerre.commands.convert_config_reading import REQUIRED, Reading, last

UNASKED = {
    # What it does without a key: every caption, decay of every weight.
    "data.caption_dropout": 0.0,
    "optimizer.weight_decay_exclude": [],
    "ema.enabled": False,
}
OPTIMIZERS = {"adamw": "adamw"}
SOURCES = {"WebDataset": "webdataset", "ClassificationWebDataset": "webdataset", "Parquet": "parquet"}
PARTS = ("vae", "text_encoder", "tokenizer", "scheduler", "unet")
TRAINING, INFERENCE = (
    ("scheduler", "scheduler.training", "noise_scheduler_training"),
    ("scheduler.inference", "noise_scheduler_inference"),
)
"""Names of the scheduler: one for both, or a pair."""
SCHEDULE = {
    "num_train_timesteps": "objective.schedule.num_train_timesteps",
    "beta_start": "objective.schedule.beta_start",
    "beta_end": "objective.schedule.beta_end",
    "rescale_betas_zero_snr": "objective.schedule.zero_terminal_snr",
}

ALIASES = (
    *("system.gradient_accumulation", "system.batch_size", "system.workers"),
    *("experiment.log_dir", "experiment.name", "experiment.num_examples_to_see", "experiment.save_every"),
    *("experiment.save_only_most_recent", "experiment.requeue", "experiment.eval_caption_file"),
    *("experiment.num_eval_images", "experiment.project"),
    *("model.mixed_precision", "model.gradient_checkpointing", "model.xformers", "model.ema.path", "ema.path"),
    *("dataset.params.resolution", "dataset.params.path", "dataset.params.idx_to_prompt"),
    *("lr_scheduler.scheduler", "lr_scheduler.params.warmup_length"),
    *("optimizer.params.learning_rate", "optimizer.params.beta1", "optimizer.params.beta2"),
    *("optimizer.params.weight_decay", "optimizer.params.epsilon"),
    *("distributed.dist_backend", "distributed.dist_url"),
    *("wandb.api_key", "wandb.entity", "wandb.project", "wandb.mode"),
)
"""Keys that mean what they mean on the command line."""

REPEATED = {
    "dataset.params.batch_size": "system.batch_size",
    "dataset.params.workers": "system.workers",
    "dataset.params.num_examples_to_see": "experiment.num_examples_to_see",
    "lr_scheduler.params.learning_rate": "optimizer.params.learning_rate",
    "system.dist_backend": "distributed.dist_backend",
    "system.dist_url": "distributed.dist_url",
}
"""Keys that say once more what another says."""


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    for key, first in REPEATED.items():
        if reading.get(key) == reading.get(first):
            reading.notice(key, f"the same as {first}")
        reading.alias(key)
    reading.carry("model.use_ema", "ema.enabled")
    _data(reading)
    _model(reading)
    for key in ALIASES:
        reading.alias(key)
    name = OPTIMIZERS.get(str(reading.get("optimizer.name", "adamw")).lower())
    if name:
        reading.carry("optimizer.name", "optimizer.name", name)
    reading.assume(UNASKED)
    if reading.values.get("ema.path") and not reading.values["ema.enabled"]:
        reading.values["ema.enabled"] = True


def _data(reading: Reading) -> None:
    kind = str(reading.get("dataset.type", "WebDataset"))
    if kind in SOURCES:
        reading.carry("dataset.type", "data.source", SOURCES[kind])
    reading.assume({"data.source": "webdataset"})
    reading.carry("dataset.params.class_mapping", "data.idx_to_prompt")
    filters = {key.removeprefix("dataset.params.filters."): reading.get(key) for key in reading.keys("*.filters.*")}
    for key in reading.keys("dataset.params.filters.*"):
        reading.carry(key, "data.filters", filters)
    reading.alias("dataset.params.filters")
    if not reading.whole.keys() & {"dataset.params.path"}:
        reading.assume({"data.path": REQUIRED})


def _model(reading: Reading) -> None:
    places = {part: reading.get(f"model.{part}.pretrained") for part in (*PARTS, "noise_scheduler_training")}
    given = [place for place in places.values() if place is not None]
    whole = reading.get("model.pretrained", reading.get("model.pt_path"))
    base = next((place for place in (whole, *given) if place is not None), REQUIRED)
    found = models.base(base)
    for key in ("model.pretrained", "model.pt_path"):
        reading.carry(key, "model.pretrained_model_name_or_path", why=found.doubt)
    reading.assume({"model.pretrained_model_name_or_path": base, "model.family": found.family})
    first = next((part for part in PARTS if places[part] is not None), "") if whole is None else ""
    for part in PARTS[:3]:
        _component(reading, part, base, part == first)
    _unet(reading, base, first)
    _schedulers(reading, base)
    theirs = (reading.get(f"model.{name}.pretrained") for name in TRAINING)
    scheduler = next((place for place in theirs if place is not None), base)
    reading.assume({"objective.name": models.base(scheduler).objective})


def _component(reading: Reading, part: str, base: Any, is_base: bool) -> None:
    """A network (or the tokenizer) from a place or from numbers."""
    target, place = f"model.{part}.target", f"model.{part}.pretrained"
    if target in reading.rest and models.CLASSES.get(last(reading.get(target))) == part:
        reading.notice(target, "the class of this component")
    if is_base:
        why = "; ".join(filter(None, ("the base, of which all else is", models.base(base).doubt)))
        reading.carry(place, "model.pretrained_model_name_or_path", why=why)
    elif reading.get(place) == base != REQUIRED:
        reading.notice(place, "the base's own")
    else:
        reading.carry(place, f"model.{part}")
    _numbers(reading, part)


def _numbers(reading: Reading, part: str) -> None:
    keys = reading.keys(f"model.{part}.params.*")
    numbers = {key.removeprefix(f"model.{part}.params."): reading.get(key) for key in keys}
    for key in keys:
        reading.carry(key, f"model.{part}.{key.removeprefix(f'model.{part}.params.')}")
    if numbers:
        reading.values = {path: v for path, v in reading.values.items() if not path.startswith(f"model.{part}.")}
        reading.values[f"model.{part}"] = numbers


def _unet(reading: Reading, base: Any, first: str) -> None:
    """The UNet: from numbers it starts from random weights."""
    for name in ("dual_cross_attention", "only_cross_attention"):  # False is what every UNet of Stable Diffusion has
        if reading.get(f"model.unet.params.{name}") is False:
            reading.notice(f"model.unet.params.{name}", "the default")
    _component(reading, "unet", base, first == "unet")


def _schedulers(reading: Reading, base: Any) -> None:
    for name in TRAINING:
        prefix = f"model.{name}"
        known = last(reading.get(f"{prefix}.target")) in models.TRAINING_SCHEDULERS
        if known:
            reading.notice(f"{prefix}.target", "the noise levels of scaled_linear, which the objective has")
        if reading.get(f"{prefix}.pretrained") == base != REQUIRED:
            reading.notice(f"{prefix}.pretrained", "the base's own, with which the objective is compared")
        reading.carry(f"{prefix}.pretrained", "model.scheduler", why="compared with the objective")
        _noise_levels(reading, f"{prefix}.params")
    for name in INFERENCE:
        sampler = models.SCHEDULERS.get(last(reading.get(f"model.{name}.target")))
        if sampler:
            reading.carry(f"model.{name}.target", "sampling.sampler", sampler)
        if reading.get(f"model.{name}.target") is not None:
            reading.refuse(f"model.{name}.target", f"pictures are drawn by {', '.join(models.SCHEDULERS.values())}")
        reading.notice(f"model.{name}.pretrained", "pictures are drawn on the objective's own noise levels")


def _noise_levels(reading: Reading, prefix: str) -> None:
    kind = reading.get(f"{prefix}.prediction_type")
    if str(kind) in models.PREDICTIONS:
        reading.carry(f"{prefix}.prediction_type", "objective.name", models.PREDICTIONS[str(kind)])
    if f"{prefix}.beta_schedule" in reading.rest:
        reading.expect(f"{prefix}.beta_schedule", "scaled_linear", "the schedule is scaled_linear")
    for name, path in SCHEDULE.items():
        reading.carry(f"{prefix}.{name}", path)
