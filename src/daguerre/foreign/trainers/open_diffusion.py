"""open-diffusion's (sd-training's) configs: what several keys mean together. The rest is in open_diffusion.yaml."""

from typing import Any

from daguerre.foreign import base_models as models
from daguerre.foreign.reader import REQUIRED, Reading, Tables

TRAINING = ("scheduler", "scheduler.training", "noise_scheduler_training")
"""Their names of the scheduler whose noise levels are trained on."""
PARTS = ("vae", "text_encoder", "tokenizer", "unet")
TABLES = Tables("open_diffusion")


def convert(reading: Reading) -> None:
    for key, first in TABLES["repeated"].items():
        if reading.get(key) == reading.get(first):
            reading.notice(key, f"the same as {first}")
    _data(reading)
    _model(reading)
    reading.aliases()
    reading.take(TABLES["last"])
    if str(reading.get("optimizer.name", "adamw")).lower() == "adamw":
        reading.carry("optimizer.name", "optimizer.name", "adamw")
    if reading.values.get("ema.path"):
        reading.values["ema.enabled"] = True
    without = [] if reading.values.get("ema.enabled") else ["ema.decay"]
    without += [] if reading.values.get("training.mixed_precision") == "bf16" else ["training.frozen_precision"]
    reading.assume(TABLES["unasked"], *without)


def _data(reading: Reading) -> None:
    reading.alias("dataset.type")
    reading.assume({"data.source": "webdataset"})
    filters = {key.removeprefix("dataset.params.filters."): reading.get(key) for key in reading.keys("*.filters.*")}
    for key in reading.keys("dataset.params.filters.*"):
        reading.carry(key, "data.filters", filters)
    if not reading.whole.keys() & {"dataset.params.path"}:
        reading.assume({"data.path": REQUIRED})


def _model(reading: Reading) -> None:
    places = {part: reading.get(f"model.{part}.pretrained") for part in (*PARTS, *TRAINING)}
    given = [place for place in places.values() if place is not None]
    whole = reading.get("model.pretrained", reading.get("model.pt_path"))
    base = next((place for place in (whole, *given) if place is not None), REQUIRED)
    found = models.base(base)
    for key in ("model.pretrained", "model.pt_path"):
        reading.carry(key, "model.pretrained_model_name_or_path", why=found.doubt)
    reading.assume({"model.pretrained_model_name_or_path": base, "model.family": found.family})
    first = next((part for part in PARTS if places[part] is not None), "") if whole is None else ""
    for part in PARTS:
        _component(reading, part, base, part == first)
    for name in TRAINING:
        if reading.get(f"model.{name}.pretrained") == base != REQUIRED:
            reading.notice(f"model.{name}.pretrained", "the base's own, with which the objective is compared")
        reading.alias(f"model.{name}.params.prediction_type")
    scheduler = next((places[name] for name in TRAINING if places[name] is not None), base)
    reading.assume({"objective.name": models.base(scheduler).objective})


def _component(reading: Reading, part: str, base: Any, is_base: bool) -> None:
    """A network (or the tokenizer) from a place or from numbers."""
    place = f"model.{part}.pretrained"
    reading.alias(f"model.{part}.target")
    if is_base:
        why = "; ".join(filter(None, ("the base model, from which everything else is taken", models.base(base).doubt)))
        reading.carry(place, "model.pretrained_model_name_or_path", why=why)
    elif reading.get(place) == base != REQUIRED:
        reading.notice(place, "the base's own")
    else:
        reading.carry(place, f"model.{part}")
    _numbers(reading, part)


def _numbers(reading: Reading, part: str) -> None:
    """The numbers of a network's config, which then starts from random weights."""
    for name in ("dual_cross_attention", "only_cross_attention"):  # False is what every UNet of Stable Diffusion has
        if reading.get(f"model.{part}.params.{name}") is False:
            reading.notice(f"model.{part}.params.{name}", "the default")
    keys = reading.keys(f"model.{part}.params.*")
    numbers = {key.removeprefix(f"model.{part}.params."): reading.get(key) for key in keys}
    for key in keys:
        reading.carry(key, f"model.{part}.{key.removeprefix(f'model.{part}.params.')}")
    if numbers:
        reading.values = {path: v for path, v in reading.values.items() if not path.startswith(f"model.{part}.")}
        reading.values[f"model.{part}"] = numbers
