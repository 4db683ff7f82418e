"""Recipes of every family with a pipeline, found by its file: tiny networks, small images, a few updates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import several_devices
import tiny_families

from daguerre import plugins
from daguerre.families.pretrained import catalogue

NAMES = sorted({*catalogue.pipelines().values()})
WITH_TRANSFORMER = [n for n in NAMES if "transformer" in plugins.find("families", n).Settings.model_fields]
SIDE_PX = 64
AREAS = dict.fromkeys(NAMES, SIDE_PX**2)
"""Areas in px of reference images, for `reference_pictures.small_rule`: tiny networks read small ones."""
FEW_STEPS = {
    "run_name": "run",
    "training": {"duration": "3 steps", "global_batch_size": 4, "device": "cpu", "mixed_precision": "no"},
    # Gradients that are zero but for rounding must not be magnified to whole steps.
    "optimizer": {"learning_rate": 1e-4, "epsilon": 1e-6},
    "logging": {"every": "1 steps", "tensorboard": False},
    "checkpoint": {"every": None, "export": False},
    "validation": {"every": None},
    "sampling": {"num_images": 0, "prompts": ["a"], "height": SIDE_PX, "width": SIDE_PX},
}


def least_references(name: str) -> int:
    """The reference images that a sample of a family needs at least."""
    rule = getattr(plugins.find("families", name).Settings, "reference_rule", None)
    return 0 if rule is None else rule.least


def write(
    name: str,
    folder: Path,
    images: Path | None = None,
    references: int = 0,
    **sections: Mapping[str, Any],
) -> Path:
    """Writes a recipe of three updates, and what it reads, into `folder`. Without dropout, which each device draws for
    itself.

    Args:
        images: a folder of images with captions; None: 24 of noise.
        references: the reference images beside each image, where the family needs no more.
        sections: settings of sections of the recipe that are others than those of `FEW_STEPS`.
    """
    folder.mkdir(exist_ok=True)
    family = tiny_families.load(name, folder / "model")
    assert family.pretrained is not None
    scheduler = family.pretrained.scheduler()
    assert scheduler is not None
    model = tiny_families.settings(name, folder / "model")
    images = several_devices.images(folder / "images") if images is None else images
    count = max(references, least_references(name))
    for path in [path for path in sorted(images.glob("*.png")) if ".reference" not in path.name] if count else ():
        shutil.copyfile(path, path.with_suffix(".reference.png"))
    model |= {"references": references} if references > least_references(name) else {}
    for path in folder.rglob("config.json"):
        numbers = json.loads(path.read_text())
        if "dropout" in numbers:
            numbers["dropout"] = [0.0] * len(numbers["dropout"]) if isinstance(numbers["dropout"], list) else 0.0
            path.write_text(json.dumps(numbers))
    recipe: dict[str, Any] = {
        **FEW_STEPS,
        "model": model,
        "objective": family.pretrained.settings.schedulers.objective_of(scheduler),
        "data": {"source": "folder", "path": str(images), "resolution": SIDE_PX},
    }
    for section, own in sections.items():
        recipe[section] = {**recipe.get(section, {}), **own}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path
