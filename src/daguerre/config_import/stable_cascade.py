"""Stable Cascade's configs, which stable_cascade.yaml explains."""

from daguerre.config_import.reader import Reading, tables

TABLES = tables("stable_cascade")
_OF_B = ("3B", "700M")


def convert(reading: Reading) -> None:
    is_b = str(reading.get("model_version")) in _OF_B
    reading.take(TABLES["first"])
    if is_b:
        reading.take(TABLES["of_b"])
    reading.alias("model_version")
    reading.assume({"model.family": "cascade_c", "data.source": "webdataset"})
    reading.aliases()
    reading.assume({"ema.enabled": any(path.startswith("ema.") for path in reading.values)})
    if reading.get("multi_aspect_ratio"):
        reading.assume(TABLES["unasked_of_buckets"])
    if is_b:
        reading.assume(TABLES["unasked_of_b"])
    reading.assume(TABLES["unasked"])
