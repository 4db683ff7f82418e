"""Configs of other trainers in the place of a recipe: converted in memory, where nothing of them is lost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from daguerre.config import config as configs
from daguerre.config import overrides, recipe
from daguerre.config.aliases import foreign
from daguerre.config.config import Loaded
from daguerre.config.errors import shown
from daguerre.config.recipe import Tree
from daguerre.config_import import files, trainers
from daguerre.config_import.reader import Reading
from daguerre.errors import UserError

SUFFIXES = (*files.YAML, ".json", *foreign.FORMATS)
"""Of files that may be configs of other trainers."""


@dataclass(frozen=True)
class Converted:
    """A config of another trainer as a recipe."""

    tree: Tree
    rest: tuple[str, ...]
    """The overrides that are not in it."""
    notices: tuple[str, ...]


def load(name: str, given: Sequence[str] = ()) -> Loaded:
    """As `config.load`, also for a config of another trainer."""
    found = of(name, given)
    if found is None:
        return configs.load(name, given)
    loaded = configs.load(name, found.rest, found.tree)
    return replace(loaded, notices=(*found.notices, *loaded.notices))


def peek(name: str, given: Sequence[str] = ()) -> tuple[str, str]:
    """As `config.peek`, also for a config of another trainer."""
    found = of(name, given, may_lose=True)
    return configs.peek(name, given) if found is None else configs.peek(name, found.rest, found.tree)


def is_one(name: str) -> bool:
    """True for the name of a config of another trainer."""
    return _read(name) is not None


def of(name: str, given: Sequence[str], may_lose: bool = False) -> Converted | None:
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
        before = recipe.get(tree, key)
        if before is recipe.ABSENT:
            rest.append(override)
        else:
            value = text if isinstance(before, str) and before != "???" else overrides.yaml_value(text)
            tree = recipe.merge(tree, overrides.nested(key, value))
    reading = trainers.converted(trainer, tree, name)
    values = trainers.typed(reading.values)
    if not may_lose:
        _refuse_loss(name, trainer, values, reading)
    return Converted(values, tuple(rest), tuple(_said(name, trainer, twice, reading)))


def _read(name: str) -> tuple[str, Tree, list[str]] | None:
    """The trainer whose config a file is, its values, and the keys that it gives twice; None for every other name."""
    path = Path(name).expanduser()
    if not name or name in recipe.shipped() or not path.is_file() or path.suffix not in SUFFIXES:
        return None
    tree, twice = files.read(path)
    trainer = foreign.trainer(tree)
    return None if trainer is None else (trainer, tree, twice)


def _refuse_loss(name: str, trainer: str, values: Tree, reading: Reading) -> None:
    lost = [line for line in reading.lines if line.kind == "refused"]
    if trainers.is_later(values):
        raise UserError(
            f"{name} is a config of {trainer}, but the family {values['model']['family']} is not supported yet",
            code="unsupported",
            setting="model.family",
        )
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
