"""Configs of other trainers to our settings: one converter for each trainer, and what all have in common."""

from collections.abc import Mapping
from typing import Any

from daguerre import plugins
from daguerre.config import merge, overrides, recipe, short_forms
from daguerre.config.config import Config
from daguerre.config.recipe import Tree
from daguerre.config_import import (
    ai_toolkit,
    kohya,
    kohya_gui,
    maxdiffusion,
    mindone,
    onetrainer,
    open_diffusion,
    simpletuner,
    stable_cascade,
)
from daguerre.config_import.reader import REQUIRED, Reading, leaves
from daguerre.errors import UserError

CONVERT = {
    "MaxDiffusion": maxdiffusion.convert,
    "MindOne": mindone.convert,
    "open-diffusion": open_diffusion.convert,
    "Stable Cascade": stable_cascade.convert,
    "kohya's GUI": kohya_gui.convert,
    "kohya's sd-scripts": kohya.convert,
    "OneTrainer": onetrainer.convert,
    "ai-toolkit": ai_toolkit.convert,
    "SimpleTuner": simpletuner.convert,
}
ORDER = list(Config.model_fields)


def converted(trainer: str, tree: Tree, source: str) -> Reading:
    """Reads a config of a trainer. UserError for one of a kind that is not trained here."""
    reading = opened(tree, source)
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
    fields = plugins.find("optimizers", name).Settings.model_fields if name in plugins.names("optimizers") else {}
    usual = fields["weight_decay"].default if "weight_decay" in fields else None
    if str(reading.values.get("optimizer.weight_decay", usual)) in ("0", "0.0"):
        for values in (reading.values, reading.assumed):
            values.pop("optimizer.weight_decay_exclude", None)


def is_later(values: Tree) -> bool:
    """True if the family of a recipe is still to come."""
    return values["model"]["family"] not in plugins.names("families")


def opened(tree: Tree, source: str) -> Reading:
    """Their values, interpolations resolved; what must be given, or refers to such a key, says so."""
    resolved, _ = recipe.resolve(tree, {}, source)
    given = dict(leaves(tree))
    found = {key: value for key, value in leaves(resolved) if value != {} or key in given}
    required = {key: REQUIRED for key in given if not any(f"{name}.".startswith(f"{key}.") for name in found)}
    return Reading(found | required)


def typed(values: Mapping[str, Any]) -> Tree:
    """Our settings as a tree in their usual order; text that names a number or a switch is one."""
    tree: Tree = {}
    for path, value in values.items():
        tree = recipe.merge(tree, overrides.nested(path, value))
    mapped = short_forms.layer({}, tree, [])
    known, only = merge.known(Config, mapped), short_forms.only(mapped)
    for path, value in values.items():
        leaf = known.get(path) or (known.get(short_forms.of_only(path, only)) if only else None)
        if isinstance(value, str) and value != REQUIRED and leaf is not None:
            tree = recipe.merge(tree, overrides.nested(path, overrides.typed(value, leaf.field.annotation)))
    assert tree.keys() <= {*ORDER}, "a short form, such as adapter: it would be left out"
    return {name: tree[name] for name in ORDER if name in tree}
