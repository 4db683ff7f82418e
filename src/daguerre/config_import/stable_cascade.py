"""Stable Cascade's configs, which stable_cascade.yaml explains."""

from daguerre.config_import.reader import Reading, tables

TABLES = tables("stable_cascade")


def convert(reading: Reading) -> None:
    reading.take(TABLES["first"])
    reading.assume({"model.family": "cascade_c", "data.source": "webdataset"})
    reading.aliases()
    reading.take(TABLES["after_names"])
    reading.assume({"ema.enabled": any(path.startswith("ema.") for path in reading.values)})
    reading.assume(TABLES["unasked"])
