"""Configs of other trainers to our settings: one converter for each trainer, and what all have in common."""

import math

from daguerre import plugins, yaml_text
from daguerre.errors import UserError
from daguerre.foreign.reader import REQUIRED, Reading, leaves
from daguerre.foreign.trainers import (
    ai_toolkit,
    kohya,
    kohya_gui,
    maxdiffusion,
    mindone,
    musubi,
    onetrainer,
    open_diffusion,
    simpletuner,
    stable_cascade,
)
from daguerre.trees import Tree

CONVERT = {
    "MaxDiffusion": maxdiffusion.convert,
    "MindOne": mindone.convert,
    "open-diffusion": open_diffusion.convert,
    "Stable Cascade": stable_cascade.convert,
    "kohya's GUI": kohya_gui.convert,
    "musubi-tuner": musubi.convert,
    "kohya's sd-scripts": kohya.convert,
    "OneTrainer": onetrainer.convert,
    "ai-toolkit": ai_toolkit.convert,
    "SimpleTuner": simpletuner.convert,
}


def converted(trainer: str, tree: Tree, source: str) -> Reading:
    """Reads a config of a trainer. UserError for one of a kind that is not trained here."""
    reading = opened(tree, source)
    for key, value in leaves(tree):
        # 1e400 in JSON is infinite: no setting takes it, and what computes with it ends in an OverflowError.
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{source}: {key} is {value}, and must be a finite number", code="damaged")
    try:
        CONVERT[trainer](reading)
    except UserError as error:
        raise UserError(f"{source}: {error}", code=error.code, setting=error.setting) from error
    reading.finish()
    _without_decay(reading)
    return reading


def _without_decay(reading: Reading) -> None:
    """Takes away what is spared by a weight decay of 0, which is refused as a setting without effect."""
    name = str(reading.values.get("optimizer.name", "adamw"))
    fields = plugins.find("optimizers", name).Settings.model_fields if plugins.exists("optimizers", name) else {}
    usual = fields["weight_decay"].default if "weight_decay" in fields else None
    if str(reading.values.get("optimizer.weight_decay", usual)) in ("0", "0.0"):
        for values in (reading.values, reading.assumed):
            values.pop("optimizer.weight_decay_exclude", None)


def opened(tree: Tree, source: str) -> Reading:
    """Their values, interpolations resolved; what must be given, or refers to such a key, says so."""
    resolved, _ = yaml_text.resolve(tree, {}, source)
    given = dict(leaves(tree))
    found = {key: value for key, value in leaves(resolved) if value != {} or key in given}
    required = {key: REQUIRED for key in given if not any(f"{name}.".startswith(f"{key}.") for name in found)}
    return Reading(found | required)
