"""Recipes as files: finding one by name, reading it and all that it extends.

Everything here is torch-free and imports no plug-in; what the keys mean is checked in `config`.
"""

import difflib
import os
from dataclasses import dataclass
from functools import reduce
from mimetypes import guess_type
from pathlib import Path

from daguerre import yaml_text
from daguerre.config import roots
from daguerre.errors import UserError
from daguerre.foreign import signs
from daguerre.remote import local_copy
from daguerre.storage import address
from daguerre.trees import Tree, merge

FOLDER = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Layer:
    """One recipe file: where it is and what it says, interpolations not resolved, `extends` taken out."""

    path: Path
    tree: Tree

    @property
    def is_shipped(self) -> bool:
        """True for a recipe of the package."""
        return self.path.parent == FOLDER

    @property
    def is_of_a_run(self) -> bool:
        """True for the config of a run, which says everything."""
        return self.path.name == "config.yaml"


def shipped() -> dict[str, Path]:
    """The recipes of the package by name, sorted."""
    names = sorted(name for name in os.listdir(FOLDER) if name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): FOLDER / name for name in names}


def locate(recipe: str, beside: Path | None = None) -> Path:
    """The file of a recipe: a shipped name, a YAML file or a run folder, also one in an object store. Relative paths
    may be meant `beside` a file.

    The name of a shipped recipe is that recipe; write `./name` for a file or folder that has the same name. A file of
    another trainer that is not there is the shipped recipe that stands for it.
    """
    there = shipped()
    if not recipe:
        known = "the name of a shipped one (`daguerre recipes` lists them)"
        raise UserError(f"no recipe given. Pass {known}, a YAML file or a run folder", code="missing")
    if recipe in there:
        return there[recipe]
    if address.is_remote(recipe):
        roots.check_recipe(recipe)
        return local_copy.located(recipe) / "config.yaml"
    path = (beside.parent if beside else Path()) / Path(recipe).expanduser()
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            if any(str(guess_type(name)[0]).startswith("image/") for name in os.listdir(path)):
                raise UserError(
                    f"{recipe} is a folder of images: `daguerre init {recipe}` writes a recipe that trains on them",
                    code="missing",
                )
            raise UserError(
                f"{recipe} is a folder without a config.yaml, so it is neither a run folder nor a recipe",
                code="missing",
            )
        roots.check_recipe(path / "config.yaml")
        return path / "config.yaml"
    if path.is_file():
        roots.check_recipe(path)
        return path
    if name := stand_in(recipe):
        return there[name]
    if what := signs.later(recipe):
        raise UserError(f"there is no recipe {recipe!r}, and no recipe is used in its place: {what}", code="unknown")
    if len(Path(recipe).parts) > 1:
        hub = f". If it is a model of the hub: `daguerre fetch {recipe}` first" if not path.parent.exists() else ""
        raise UserError(f"{recipe}: no such run folder or recipe file ({path.absolute()}){hub}", code="missing")
    near = difflib.get_close_matches(recipe, there, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise UserError(
        f"there is no recipe {recipe!r}: no such file or run folder in {path.parent.absolute()}. "
        f"{hint}`daguerre recipes` lists all.",
        code="unknown",
    )


def stand_in(recipe: str) -> str | None:
    """The shipped recipe that stands for a file of another trainer; None where the file is there, and for others."""
    name = signs.stands_for(recipe)
    return name if name in shipped() and not Path(recipe).expanduser().is_file() else None


def tree(recipe: str) -> Tree:
    """The settings of a recipe and of all that it extends, as they are written. UserError as from `layers`."""
    return reduce(merge, (layer.tree for layer in layers(recipe)))


def layers(recipe: str) -> list[Layer]:
    """A recipe and all that it extends, the outermost base first. UserError for a file that cannot be read."""
    found: list[Layer] = []
    path, name = locate(recipe), recipe
    while True:
        if any(path.resolve() == layer.path.resolve() for layer in found):
            chain = " -> ".join([*(str(layer.path) for layer in found), str(path)])
            raise UserError(f"{name}: `extends` refers back to itself: {chain}")
        tree = read(path)
        if theirs := signs.trainer(tree):
            raise UserError(
                f"{path} is a config of {theirs}: `daguerre convert config {path}` turns it into a recipe and lists "
                "what could not be converted"
            )
        if what := signs.unread(tree):
            raise UserError(f"{path} is {what}", code="unsupported")
        base = tree.pop("extends", None)
        found.append(Layer(path, tree))
        if base is None:
            return found[::-1]
        if not isinstance(base, str):
            raise UserError(f"{path}: extends takes one shipped name or path, got {base!r}")
        path, name = locate(base, beside=path), base


def read(path: Path) -> Tree:
    """The mapping in a recipe, its interpolations as written. UserError says what is wrong, and in which line."""
    if signs.is_format(path):
        raise UserError(f"{path} is not a recipe: `daguerre convert config {path}` converts another trainer's config")
    return yaml_text.read(path)
