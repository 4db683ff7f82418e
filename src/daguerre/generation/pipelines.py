"""Reads what a pipeline in diffusers' layout says of itself, as a recipe."""

from pathlib import Path
from typing import Any

from daguerre.errors import UserError, named
from daguerre.families.pretrained import catalogue
from daguerre.models.schedulers.scheduler import other_sampling
from daguerre.models.settings import BASE, INDEX, SCHEDULER
from daguerre.models.weights import index
from daguerre.models.weights.files import read_json
from daguerre.trees import Tree


def recipe(target: str, folder: Path, name: str) -> tuple[Tree, tuple[str, ...]]:
    """A recipe that generates with a folder's networks: what they predict, at which noise levels and sizes; and what
    it samples otherwise. UserError that names `target` for what is known of no family."""
    place = index.find(folder)
    assert place is not None, "callers have looked"
    told = read_json(place)
    class_name = told.get("_class_name")
    families = catalogue.pipelines()
    if not isinstance(class_name, str) or class_name not in families:
        raise UserError(
            f"{target} is a {class_name}; images can be generated with: {', '.join(families)}", code="unsupported"
        )
    family = catalogue.pretrained()[families[class_name]]
    places = {part: folder / part / "config.json" for part in family.networks()}
    configs_of = {part: read_json(path) for part, path in places.items() if path.is_file()}
    there: dict[str, Any] = dict.fromkeys(configs_of, BASE)
    there |= {ours: told[theirs] for theirs, ours in family.told_by_index.items() if theirs in told}
    place = folder / "scheduler" / "scheduler_config.json"
    scheduler = dict(family.own_scheduler) if family.own_scheduler and not place.is_file() else read_json(place)
    usual = family.usual_of({**configs_of, INDEX: told, SCHEDULER: scheduler})
    with named(target):
        objective = family.schedulers.objective_of(scheduler)
    tree: Tree = {
        "run_name": name,
        "model": {"family": families[class_name], "pretrained_model_name_or_path": str(folder.resolve()), **there},
        "objective": objective,
        "training": {"duration": "0 steps", "global_batch_size": 1},
        "lr_scheduler": {"warmup": "0 steps"},
        **usual,
        "sampling": {**usual.get("sampling", {}), **family.schedulers.sampling_of(scheduler)},
        "data": {"source": "folder", "path": str(folder), **usual["data"]},
    }
    return tree, tuple(other_sampling(scheduler))
