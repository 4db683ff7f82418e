"""Configs of other trainers in the place of a recipe: converted in memory, where nothing of them is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daguerre import trees, yaml_text
from daguerre.config import fields, overrides, recipe, short_forms
from daguerre.errors import UserError
from daguerre.foreign import converters, files, signs
from daguerre.foreign.reader import REQUIRED, Reading
from daguerre.formatting import shown
from daguerre.settings import Settings
from daguerre.trees import Tree

SUFFIXES = (*files.YAML, ".json", *signs.FORMATS)
"""Of files that may be configs of other trainers."""


@dataclass(frozen=True)
class Converted:
    """A config of another trainer as a recipe."""

    tree: Tree
    rest: tuple[str, ...]
    """The overrides that are not in it."""
    notices: tuple[str, ...]


def of(root: type[Settings], name: str, given: Sequence[str], may_lose: bool = False) -> Converted | None:
    """The recipe that a file of another trainer is; None for every other name.

    Overrides by names that the file has replace its values, as they do there: what follows from several keys (a warm-up
    as a share of the run) follows from the new ones. UserError where something of the config would be lost, unless it
    may.
    """
    read = _read(name)
    if read is None:
        return None
    trainer, tree, twice = read
    rest = []
    for override in given:
        key, text = overrides.pair(override)
        before = trees.get(tree, key)
        if before is trees.ABSENT:
            rest.append(override)
        else:
            value = text if isinstance(before, str) and before != "???" else yaml_text.value(text)
            tree = trees.merge(tree, trees.nested(key, value))
    reading = converters.converted(trainer, tree, name)
    values = typed(root, reading.values)
    if not may_lose:
        _refuse_loss(name, trainer, reading)
    return Converted(values, tuple(rest), tuple(_said(name, trainer, twice, reading)))


def _read(name: str) -> tuple[str, Tree, list[str]] | None:
    """The trainer whose config a file is, its values, and the keys that it gives twice; None for every other name."""
    path = Path(name).expanduser()
    if not name or name in recipe.shipped() or not path.is_file() or path.suffix not in SUFFIXES:
        return None
    tree, twice = files.read(path)
    trainer = signs.trainer(tree)
    return None if trainer is None else (trainer, tree, twice)


def _refuse_loss(name: str, trainer: str, reading: Reading) -> None:
    lost = [line for line in reading.lines if line.kind == "refused"]
    if lost:
        listed = "".join(f"\n  {line.key}: {line.text}" for line in lost)
        raise UserError(
            f"{name} is a config of {trainer} with settings that are not supported here:{listed}\nGive other values "
            "for these on the command line (null to switch one off), or make a recipe without them: daguerre "
            f"convert config {name}",
            code="unsupported",
        )


def _said(name: str, trainer: str, twice: Sequence[str], reading: Reading) -> list[str]:
    """The lines by which a user knows what is trained: what was taken for granted, and what was left out."""
    assumed = ", ".join(f"{path}: {shown(value)}" for path, value in reading.assumed.items())
    said = [
        f"{name} is a config of {trainer}, read as a recipe: `daguerre convert config {name}` shows how each key was "
        "converted",
        f"defaults of {trainer}: {assumed}",
    ]
    said += [f"given twice ({trainer} uses the last one): {', '.join(twice)}"] if twice else []
    left_out = [line.text for line in reading.lines if line.kind != "refused" and "left out" in line.text]
    return said + [text.rpartition(" (")[2].removesuffix(")") for text in left_out]


def typed(root: type[Settings], values: Mapping[str, Any]) -> Tree:
    """Our settings as a recipe in their usual order; text that names a number or a switch is one."""
    tree: Tree = {}
    for path, value in values.items():
        tree = trees.merge(tree, trees.nested(path, value))
    tree = short_forms.layer({}, tree, [])
    leaves = fields.leaves(root, tree)
    for path, value in trees.paths(tree):
        if isinstance(value, str) and value != REQUIRED and path in leaves:
            tree = trees.merge(tree, trees.nested(path, overrides.typed(value, leaves[path].field.annotation)))
    return {name: tree[name] for name in root.model_fields if name in tree}
