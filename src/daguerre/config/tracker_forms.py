"""The ways of writing which trackers get a run's numbers: all of them become the mapping `logging.trackers`.

    logging: {trackers: [tensorboard, wandb]}           these and no others; those that stay keep their settings
    logging: {trackers: {}}                             none; also [] and null
    logging: {trackers: {wandb: {project: mine}}}       beside those that are there, which is tensorboard by default
    logging: {tensorboard: false}                       one of them, on or off

`null` in the place of a tracker's settings takes it out.
"""

import json
from collections.abc import Sequence

from daguerre.config import overrides, recipe
from daguerre.config.overrides import Pair
from daguerre.config.recipe import Tree
from daguerre.tracking.settings import DEFAULT

_SECTION, _PATH, _SWITCH = "logging", "logging.trackers", "tensorboard"
_SHORT = {name: path for path in (_PATH, f"{_SECTION}.{_SWITCH}") for name in (path, path.rpartition(".")[2])}
_ON = {"true": True, "false": False}


def mapped(base: Tree, over: Tree) -> Tree:
    """A layer over `base`, which holds the mapping: now it holds it, too. What means nothing stays as it is, for the
    check to refuse."""
    section = over.get(_SECTION)
    if not isinstance(section, dict) or not {"trackers", _SWITCH} & section.keys():
        return over
    given, switch = section.get("trackers", {}), section.get(_SWITCH)
    on = _ON.get(str(switch).lower())
    listed = [given] if isinstance(given, str) else given
    if "trackers" in section and not given:  # a config without any is written as {}
        listed = []
    if (on is None and switch is not None) or not isinstance(listed, list | dict):
        return over
    there = recipe.get(base, _PATH)
    found: Tree = {} if isinstance(there, dict) else dict(DEFAULT)
    if isinstance(listed, list):
        found = dict.fromkeys(there if isinstance(there, dict) else DEFAULT)
        found |= {str(name): {"name": name} for name in listed}
    else:
        found |= {name: {"name": name, **own} if isinstance(own, dict) else own for name, own in listed.items()}
    if on is not None:
        found[_SWITCH] = (found.get(_SWITCH) or {"name": _SWITCH}) if on else None
    rest = {name: value for name, value in section.items() if name not in ("trackers", _SWITCH)}
    return {**over, _SECTION: {**rest, "trackers": found}}


def pairs(given: Sequence[Pair], tree: Tree) -> list[Pair]:
    """Overrides with paths of the mapping. Settings of a tracker that is not there add it."""
    given = [(label, _SHORT.get(path, path), text) for label, path, text in given]
    whole = [pair for pair in given if pair[1] in _SHORT.values()]
    layer: Tree = {}
    for _, path, text in whole:
        layer = recipe.merge(layer, overrides.nested(path, overrides.yaml_value(text)))
    found = recipe.get(mapped(tree, layer), _PATH)
    if whole and not isinstance(found, dict):
        return given  # left to the check
    wanted: Tree = found if isinstance(found, dict) else {}
    rest = [pair for pair in given if pair not in whole]
    inside = [pair for pair in rest if pair[1].startswith(f"{_PATH}.") and pair[2] != "null"]
    wanted |= {name: wanted.get(name) or {"name": name} for name in (path.split(".")[2] for _, path, _ in inside)}
    label = (whole or inside or [("", "", "")])[-1][0]
    chosen: list[Pair] = []
    for name, own in wanted.items():
        parts = {f".{key}": value for key, value in own.items()} if own and isinstance(own, dict) else {"": own or None}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in parts.items()}
        chosen += [(label, f"{_PATH}.{name}{key}", text) for key, text in texts.items()]
    return [*chosen, *rest]
