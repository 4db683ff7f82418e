"""A run of one's own, or a pipeline, as the base of a LoRA: its settings over a shipped recipe of its family."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from daguerre import trees
from daguerre.assembly.batch_sizes import batch_sizes
from daguerre.caching.cache import AUTO
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.generation import pipelines
from daguerre.models.weights import index
from daguerre.trees import Tree

_OF_SAMPLING = ("sampler", "num_inference_steps", "guidance_scale", "guidance_rescale", "timestep_spacing", "shift")
_OF_TRAINING = ("mixed_precision", "weights_dtype", "frozen_precision", "gradient_checkpointing")
"""What suits the base's size and the machine that trained it."""
_BATCH = "training.global_batch_size"
_OF_SMALL = "emoji_lora"
"""The recipe of a LoRA whose rate, batch, layers and averages were measured on a small model (docs/choosing.md)."""
_SMALL_BYTES = 400e6
"""A model whose files take less has fewer than 100 million parameters: that one has 5.6, Stable Diffusion 1066."""
_REPEATS = 80
"""Of each image in an epoch, of which a run has four: that recipe sees each 320 times."""


class Own(NamedTuple):
    """The recipe for a base of one's own."""

    recipe: str
    overrides: list[str]
    """What makes it one for this base."""
    settings: str
    """Where the settings are from, for people."""


def found(given: str, recipes: Iterable[str]) -> Own | None:
    """The first of the recipes that is for the base's family, as one for this base; None where there is no folder of a
    run or pipeline. UserError for one that no LoRA can be trained on."""
    folder = RunFolder(Path(given))
    if not folder.config.is_file() and index.find(folder.path) is None:
        return None
    trained = configs.load(given).config if folder.config.is_file() else None
    place = folder.path if trained is None else folder.pipeline
    if index.find(place) is None:
        raise UserError(
            f"base={given} has no pipeline/ to train a LoRA on: a run that trained the whole network has one when it "
            f"ends. Of a run of a LoRA: `daguerre convert export {given} format=diffusers out=merged`, then "
            "base=merged",
            code="missing",
            setting="base",
        )
    own = _of_pipeline(given, place) if trained is None else _of_run(trained)
    family = own["model"]["family"]
    suitable = next((name for name in recipes if trees.get(recipe.tree(name), "model.family") == family), None)
    if suitable is None:
        raise UserError(
            f"base={given} is of the family {family}, for which no recipe of a LoRA ships: write one "
            "(docs/adapters.md), for example by `adapters.lora.name=lora` with the recipe of the base",
            code="unsupported",
            setting="base",
        )
    small, settings = _of_small(place, family), f"the recipe {suitable}"
    if small:
        own = trees.merge(own, small)
        settings += f"; as the model is small, rate, batch and layers of {_OF_SMALL}, which were measured on such a one"
    fits = trained is not None and batch_sizes(trained).micro >= trees.get(recipe.tree(suitable), _BATCH)
    if small or fits:
        own = trees.merge(own, trees.nested("training.per_device_batch_size", None))  # a LoRA's batch fits in one pass
    about = {"description": f"A LoRA on {given}", "model": {"pretrained_model_name_or_path": str(place)}}
    overrides = [
        f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        for path, value in trees.paths(trees.merge(own, about))
    ]
    return Own(suitable, overrides, settings)


def _of_small(place: Path, family: str) -> Tree:
    """Settings of a LoRA for a small model, empty for a large one and for another family than that which was measured.
    A recipe for a large model hardly moves a small one, or breaks it."""
    measured = recipe.tree(_OF_SMALL)
    size_bytes = sum(file.stat().st_size for file in place.rglob("*.safetensors"))
    if size_bytes >= _SMALL_BYTES or trees.get(measured, "model.family") != family:
        return {}
    return {
        **{name: measured[name] for name in ("adapters", "optimizer", "lr_scheduler")},
        "ema": {"enabled": True, **measured["ema"]},
        "training": {"global_batch_size": trees.get(measured, _BATCH)},
        "data": {"sources": {"images": {"repeats": _REPEATS}}},
    }


def _of_pipeline(given: str, folder: Path) -> Tree:
    """Settings that a pipeline's files tell."""
    tree = pipelines.recipe(given, folder, folder.name)[0]
    return {
        "model": {"family": tree["model"]["family"]},
        "objective": tree["objective"],
        "sampling": tree["sampling"],
        "data": {"resolution": tree["data"]["resolution"]},
    }


def _of_run(config: Config) -> Tree:
    """Settings of a run that say how it saw its images, what it predicted, and how it computed and generated."""
    tree, whole = configs.differing(config), config.model_dump(mode="json")
    return {
        # Switches of the model; its words and parts are in the pipeline.
        "model": {name: value for name, value in tree["model"].items() if name == "family" or isinstance(value, bool)},
        "objective": tree["objective"],
        "sampling": {name: whole["sampling"][name] for name in (*_OF_SAMPLING, "prompts")},
        "data": {name: whole["data"][name] for name in ("resolution", "random_flip")},
        "training": {name: whole["training"][name] for name in _OF_TRAINING},
        "loader": {"num_workers": whole["loader"]["num_workers"]},
        "cache": {"path": AUTO} if config.cache.path == AUTO else {},  # a folder would be that of other images
    }
