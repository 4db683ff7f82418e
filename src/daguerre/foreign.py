"""Configs of other trainers: which one a file is, and which of our recipes stands for one of theirs.

Only what tells them apart; `daguerre convert config` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from daguerre import foreign_peers

RECIPES = {
    # MaxDiffusion
    "base14.yml": "sd14",
    "base_2_base.yml": "sd2_base",
    "base21.yml": "sd21",
    "base_xl.yml": "sdxl",
    "base_xl_lightning.yml": "sdxl_lightning",
    # MindOne
    "sd_xl_base_finetune_910b.yaml": "sdxl",
    "sd_xl_base_finetune_910b_edm.yaml": "sdxl_edm",
}
"""Files of other trainers by name, and the shipped recipe that stands for each where there is no such file."""

LATER = {
    "finetune_c_*_lora*": "LoRA for Stable Cascade",
    "lora_c_*": "LoRA for Stable Cascade",
    "controlnet_c_*": "ControlNet for Stable Cascade",
    "finetune_[bc]_*": "the family of Stable Cascade",
    "stage_[bc]_*": "the family of Stable Cascade",
    "*dreambooth*lora*": "LoRA",
    "sd_xl_base_finetune_lora*": "LoRA",
    "sd_xl_base_finetune_controlnet*": "ControlNet",
}
"""Files of other trainers by patterns, whose part is still to be written, and what that is."""

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
    return RECIPES.get(PurePath(name).name)


def later(name: str) -> str | None:
    """What is to come for a file of another trainer; None for any other name."""
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
