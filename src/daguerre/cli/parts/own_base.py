"""A run of one's own, or a pipeline, as the base of a LoRA: its settings over a shipped recipe of its family."""

import json
from collections.abc import Iterable
from pathlib import Path

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


def found(given: str, recipes: Iterable[str]) -> tuple[str, list[str]] | None:
    """The first of the recipes that is for the base's family, and overrides that make it one for this base; None where
    there is no folder of a run or pipeline. UserError for one that no LoRA can be trained on."""
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
    if trained is not None and batch_sizes(trained).micro >= trees.get(recipe.tree(suitable), _BATCH):
        own = trees.merge(own, trees.nested("training.per_device_batch_size", None))  # a LoRA's batch fits in one pass
    about = {"description": f"A LoRA on {given}", "model": {"pretrained_model_name_or_path": str(place)}}
    return suitable, [
        f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        for path, value in trees.paths(trees.merge(own, about))
    ]


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
        "data": {"resolution": whole["data"]["resolution"]},
        "training": {name: whole["training"][name] for name in _OF_TRAINING},
        "loader": {"num_workers": whole["loader"]["num_workers"]},
        "cache": {"path": AUTO} if config.cache.path == AUTO else {},  # a folder would be that of other images
    }
