"""What Stable Cascade's keys mean here: flat configs of Stage C and Stage B. Their families are not there yet."""

from __future__ import annotations

from daguerre.config_import.defaults import unasked
from daguerre.config_import.reader import Reading

STAGES = {"3.6B": "cascade_c", "1B": "cascade_c", "3B": "cascade_b", "700M": "cascade_b"}
"""Sizes of the published models, and the family that each is of."""


def convert(reading: Reading) -> None:
    """Reads a whole config."""
    version = str(reading.get("model_version"))
    if version in STAGES:
        reading.carry_all("model_version", {"model.family": STAGES[version], "model.variant": version})
    reading.refuse("model_version", f"one of {', '.join(STAGES)}")
    reading.assume({"model.family": "cascade_c"})
    reading.notice("checkpoint_path", "a run keeps its checkpoints in its own folder, {output_dir}/{run_name}")
    reading.carry("batch_size", "training.global_batch_size", why="over all devices, as there")
    reading.assume({"data.source": "webdataset"})
    reading.refuse("shift", "their code never reads it; objective.schedule.shift moves the noise levels")
    reading.aliases()
    for key in reading.keys("*_checkpoint_path"):
        reading.refuse(key, "the networks of Stable Cascade are not there yet")
    reading.assume({"ema.enabled": any(path.startswith("ema.") for path in reading.values)})
    reading.assume(unasked("Stable Cascade"))
