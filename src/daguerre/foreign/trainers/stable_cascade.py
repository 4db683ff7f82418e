"""Stable Cascade's configs, which stable_cascade.yaml explains."""

import json

from daguerre.errors import UserError
from daguerre.foreign.names import controls, lora, tokens
from daguerre.foreign.reader import Reading, Tables

TABLES = Tables("stable_cascade")
_OF_B = ("3B", "700M")


def convert(reading: Reading) -> None:
    is_b = str(reading.get("model_version")) in _OF_B
    trains = any(key in reading.whole for key in ("updates", "lr", "experiment_id"))
    reading.take(TABLES["first"] if trains else TABLES["generating"])
    if reading.get("generator_checkpoint_path"):
        reading.take(TABLES["given"])
    elif trains:
        reading.take(TABLES["fresh"])
    reading.alias("model_version")
    if is_b:
        reading.take(TABLES["of_b"])
    if not trains:
        if reading.get("controlnet_checkpoint_path"):
            _controlnet(reading)
        reading.note(["controlnet_*"], "controlnet_checkpoint_path names no ControlNet: Stage C draws alone")
        reading.aliases()
        reading.assume(TABLES["generating_by_b" if is_b else "generating_by_c"])
        reading.assume(TABLES["unasked_of_generating"])
        return
    _adapters(reading)
    reading.assume({"model.family": "cascade_c", "data.source": "webdataset"})
    reading.aliases()
    reading.assume({"ema.enabled": any(path.startswith("ema.") for path in reading.values)})
    if reading.get("multi_aspect_ratio"):
        reading.assume(TABLES["unasked_of_buckets"])
    else:
        reading.assume({"data.crop": "smart"})
    if is_b:
        reading.assume(TABLES["unasked_of_b"])
    reading.assume(TABLES["drawn_by_b" if is_b else "drawn_by_c"])
    reading.assume(TABLES["unasked"])


def _controlnet(reading: Reading) -> None:
    """A ControlNet of Stage C, with the filter that makes what it reads."""
    prefix, place = "adapters.controlnet", "controlnet_checkpoint_path"
    if (name := reading.get("controlnet_filter")) is None:
        for key in ("controlnet_blocks", "controlnet_bottleneck_mode", place):
            reading.refuse(key, "a ControlNet needs controlnet_filter, which says what it reads")
        return
    reading.assume({f"{prefix}.name": "controlnet"})
    known = reading.keys("controlnet_filter_params.*")
    params = {key.partition(".")[2]: reading.get(key) for key in known}
    try:
        own, why = controls.of_filter(str(name), params)
    except UserError as error:
        for key in ("controlnet_filter", *known):
            reading.refuse(key, str(error))
        own = {}
    if reading.get(place):
        reading.carry(place, f"{prefix}.controlnet_model_name_or_path")
        reading.notice("controlnet_bottleneck_mode", f"the file of {place} tells")
        own.pop("reads", None)
    else:
        reading.notice(place, "a new ControlNet: nothing is read")
        reading.carry("controlnet_bottleneck_mode", f"{prefix}.bottleneck")
    reading.carry("controlnet_blocks", f"{prefix}.blocks")
    if own:
        reading.carry_all("controlnet_filter", {f"{prefix}.{key}": value for key, value in own.items()}, why)
        reading.note(known, "a setting of the condition")
    reading.carry("offset_noise", "objective.noise.offset")


def _adapters(reading: Reading) -> None:
    """A LoRA, and the words that are trained with it."""
    _controlnet(reading)
    if "rank" in reading.whole or "module_filters" in reading.whole:
        reading.assume({"adapters.lora.name": "lora"})
        reading.carry("rank", "adapters.lora.rank")
    filters, words = reading.get("module_filters"), reading.get("train_tokens")
    if isinstance(filters, list):
        targets = [lora.in_diffusers(str(part)) for part in filters]
        own = {"adapters.lora.targets": targets, "adapters.lora.alpha": 1.0}
        reading.carry_all("module_filters", own, "in diffusers' names; alpha is 1 there, whatever the rank")
    if words == []:
        reading.notice("train_tokens", "no tokens are trained")
    elif words is not None:
        found = dict(tokens.train_tokens("train_tokens", json.dumps(words)).values)
        own = {path.replace("adapter.", "adapters.tokens."): json.loads(value) for path, value in found.items()}
        reading.carry_all("train_tokens", {"adapters.tokens.name": "tokens", **own})
