"""Configs of other trainers: which one a file is, and which of our recipes stands for one of theirs.

Only what tells them apart; `daguerre convert config` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from daguerre.config.aliases import foreign_peers

RECIPES = {
    # MaxDiffusion
    "base14.yml": "sd14",
    "base15.yml": "sd15",
    "base_2_base.yml": "sd2_base",
    "base21.yml": "sd21",
    "base_xl.yml": "sdxl",
    "base_xl_lightning.yml": "sdxl_lightning",
    # MindOne
    "sd_xl_base_finetune.yaml": "sdxl",
    "sd_xl_base_finetune_910b.yaml": "sdxl",
    "sd_xl_base_finetune_910b_edm.yaml": "sdxl_edm",
    # open-diffusion
    "imagenet.yaml": "imagenet_scratch",
    "sd_v2_base_stage1.yaml": "sd2_scratch_stage1",
    "sd_v2_base_stage2.yaml": "sd2_scratch_stage2",
    "laion/from-scratch.yaml": "sd2_scratch_stage1",
}
"""Files of other trainers by the end of their path, and the shipped recipe that stands for each where there is no such
file."""

LATER = {
    "finetune_c_*_lora*": "LoRA for Stable Cascade is not there yet",
    "lora_c_*": "LoRA for Stable Cascade is not there yet",
    "controlnet_c_*": "ControlNet for Stable Cascade is not there yet",
    "finetune_[bc]_*": "the family of Stable Cascade is not there yet",
    "stage_[bc]_*": "the family of Stable Cascade is not there yet",
    "*dreambooth*lora*": "LoRA is not there yet",
    "sd_xl_base_finetune_lora*": "LoRA is not there yet",
    "sd_xl_base_finetune_controlnet*": "ControlNet is not there yet",
    "sd_xl_*textual_inversion*": "training of new tokens is not there yet",
    "sd_xl_refiner*": "SDXL's refiner is not planned",
}
"""Files of other trainers by patterns, for which no recipe stands, and why."""

_SIGNS: dict[str, tuple[tuple[str, ...], ...]] = {
    # trainer: groups of keys at the top level; a file is its where all of a group are there
    "MaxDiffusion": (
        ("weights_dtype", "activations_dtype"),
        ("per_device_batch_size", "pretrained_model_name_or_path"),
        ("mesh_axes",),
        ("base_config",),
    ),
    "open-diffusion": (("experiment", "model"), ("experiment", "dataset"), ("system", "dataset"), ("system", "model")),
    "Stable Cascade": (("experiment_id",), ("webdataset_path", "updates"), ("model_version", "checkpoint_path")),
}


def stands_for(name: str) -> str | None:
    """The shipped recipe that stands for a file of another trainer, None for any other name."""
    path = PurePath(name)
    return next(
        (
            ours
            for theirs, ours in RECIPES.items()
            if path.parts[-len(PurePath(theirs).parts) :] == PurePath(theirs).parts
        ),
        None,
    )


def later(name: str) -> str | None:
    """Why no recipe stands for a file of another trainer; None for any other name."""
    file = PurePath(name).name
    return next((what for pattern, what in LATER.items() if fnmatchcase(file, f"{pattern}.y*ml")), None)


def trainer(tree: Mapping[str, Any]) -> str | None:
    """Whose config a mapping is; None for a recipe of ours and for what is nobody's."""
    if _of_mindone(tree):
        return "MindOne"
    for name, groups in _SIGNS.items():
        if any(all(key in tree for key in group) for group in groups):
            return name
    return foreign_peers.trainer(tree)


def _of_mindone(tree: Mapping[str, Any]) -> bool:
    """Trees of `target` and `params`."""
    model, data = tree.get("model"), tree.get("data")
    engine = isinstance(model, Mapping) and "target" in model and "params" in model
    return engine or ("optim" in tree and isinstance(data, Mapping) and "dataset_config" in data)
