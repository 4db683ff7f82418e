"""DreamBooth of any base: any recipe, to whose command line an instance set is given, gets class images."""

from collections.abc import Container, Sequence
from contextlib import suppress

from daguerre import plugins, trees
from daguerre.config import overrides, recipe
from daguerre.config.recipe import Layer
from daguerre.config.short_forms import FULL, layer, members
from daguerre.errors import UserError
from daguerre.foreign.names import lookup
from daguerre.trees import Tree

_INSTANCE = "data.sources.instance"
_OF_THE_BASE = ("output_dir", "seed", "model", "objective", "adapter", "adapters", "logging", "mesh", "distributed")
_OF_ADDITIONS = (
    *("optimizer.learning_rate", "optimizer.learning_rates", "optimizer.learning_rate_factors"),
    *("training.weights_dtype", "training.frozen_precision", "training.base_precision"),
    "training.per_device_batch_size",
)
"""Settings that it takes, too, from a recipe that trains no whole component: the learning rate of full training would
teach a LoRA nothing."""
_CLASS_FOLDER = (
    "${{output_dir}}/class_images/{name}/${{data.sources.class.captions.text}}/${{data.sources.class.generate.count}}"
)


def layers(name: str, given: Sequence[str], notices: list[str]) -> list[Layer]:
    """The layers of a recipe, the outermost base first.

    Where overrides name an instance set and the recipe has none, it says the base alone, and DreamBooth's recipe of its
    family all else.
    """
    own = recipe.layers(name)
    tree: Tree = {}
    for each in own:
        tree = trees.merge(tree, each.tree)
    asked = None if own[-1].is_of_a_run else _asked_by(tree, given)
    if asked is None:
        return own
    family = trees.get(tree, "model.family")
    for template in (path for shipped, path in recipe.shipped().items() if shipped.endswith("_dreambooth")):
        below = recipe.layers(template.stem)
        if trees.get(below[-1].tree, "model.family") == family:
            ours, theirs = "the model, the objective", "class images, learning rate, duration and batch"
            if _trains_no_whole(tree):
                ours = "the model, the objective, the adapters, their learning rate"
                theirs = "class images, duration and batch"
            notices.append(
                f"{asked}: this is DreamBooth, so the recipe {template.stem} is used with {ours} and the resolution of "
                f"{name}; {theirs} are {template.stem}'s"
            )
            return [*below, Layer(own[-1].path, _as_base(tree, own[-1].path.stem))]
    return own


def notices(tree: Tree, chosen: Container[str]) -> list[str]:
    """A line where the caption of the instance images is `chosen` and class images are still those of a shipped recipe,
    of another kind of thing: they would keep the model from forgetting dogs while it learns a cat."""
    own, theirs = (f"data.sources.{name}.captions.text" for name in ("instance", "class"))
    said, kept = trees.get(tree, own), trees.get(tree, theirs)
    theirs_chosen = theirs in chosen or "data.sources.class.generate.prompt" in chosen
    if own not in chosen or theirs_chosen or not isinstance(said, str) or not isinstance(kept, str):
        return []
    thing = kept.split()[-1:]
    if not thing or thing[0] in said.split():
        return []
    return [
        f"instance images have the caption {said!r}, and class images are still the recipe's, {kept!r}: "
        f"class_prompt='...' says what kind of thing yours is"
    ]


def _asked_by(tree: Tree, given: Sequence[str]) -> str | None:
    """The override that asks for DreamBooth on another recipe; None where nothing does."""
    has_sets = trees.get(tree, _INSTANCE) is not trees.ABSENT
    trains = str(trees.get(tree, "training.duration")).split()[:1] != ["0"]
    if has_sets or not trains:
        return None
    asked = None
    for override in given:
        with suppress(UserError):  # reported where the override is read
            key, text = overrides.pair(override)
            paths = [path for path, _ in lookup.translate(key, text).values]
            if {"source", "data.source"} & {*paths}:
                return None
            asked = asked or next((key for path in paths if path.startswith(f"{_INSTANCE}.")), None)
    return None if asked is None or _denoises_from_scratch(tree) else asked


def _denoises_from_scratch(tree: Tree) -> bool:
    """True if the recipe's denoiser starts from random weights."""
    family = trees.get(tree, "model.family")
    if not plugins.exists("families", family):
        return False
    names = plugins.find("families", family).Settings.networks("denoiser")
    return any(isinstance(trees.get(tree, f"model.{name}"), dict | None) for name in names)


def _as_base(tree: Tree, name: str) -> Tree:
    """The settings that DreamBooth takes from the recipe of a base."""
    sources = {"class": {"path": _CLASS_FOLDER.format(name=name)}}
    taken: Tree = {
        **{key: tree[key] for key in _OF_THE_BASE if key in tree},
        "run_name": f"{tree['run_name']}_dreambooth" if tree.get("run_name", "???") != "???" else "???",
        "description": f"{name}, DreamBooth",
        "data": {"sources": sources},
    }
    for path in ("data.resolution", *(_OF_ADDITIONS if _trains_no_whole(tree) else ())):
        if (value := trees.get(tree, path)) is not trees.ABSENT:
            taken = trees.merge(taken, trees.nested(path, value))
    return taken


def _trains_no_whole(tree: Tree) -> bool:
    """True of a recipe without the adapter `full`."""
    return all(own.get("name", name) != FULL for name, own in members(layer({}, tree, []), "adapters").items())
