"""Stable Cascade's configs, which stable_cascade.yaml explains."""

import json

from daguerre.config.aliases import lora, tokens
from daguerre.config_import.reader import Reading, tables

TABLES = tables("stable_cascade")
_OF_B = ("3B", "700M")


def convert(reading: Reading) -> None:
    is_b = str(reading.get("model_version")) in _OF_B
    trains = any(key in reading.whole for key in ("updates", "lr", "experiment_id"))
    reading.take(TABLES["first"] if trains else TABLES["generating"])
    reading.alias("model_version")
    if is_b:
        reading.take(TABLES["of_b"])
    if not trains:
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


def _adapters(reading: Reading) -> None:
    """A LoRA, and the words that are trained beside it."""
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
