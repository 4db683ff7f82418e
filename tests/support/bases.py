"""Tiny bases of the families that train from a pipeline, for tests of whole runs that hold for each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_cascade import EFFNET, PREVIEWER, write_decoder, write_prior
from tiny_models import write_sd, write_sdxl

WRITERS: dict[str, Callable[[Path], Any]] = {
    "sd": write_sd,
    "sdxl": write_sdxl,
    # Two heads, so that tensor parallel has something to split. Dropout inside a network is drawn by each device for
    # itself, so meshes agree without it alone.
    "cascade_c": lambda folder: write_prior(folder, dropout=[0.0, 0.0], num_attention_heads=[2, 2]),
    "cascade_b": lambda folder: write_decoder(folder, dropout=[0.0, 0.0], num_attention_heads=[-1, 2]),
}
_CASCADE = [f"model.effnet={EFFNET}", "objective.schedule.name=cosine", "data.resolution=64"]
_CASCADE += ["sampling.sampler=euler_ancestral", "sampling.height=64", "sampling.width=64"]
OWN = {"cascade_c": [*_CASCADE, f"model.previewer={PREVIEWER}"], "cascade_b": _CASCADE}
"""What a recipe says beside its base, by family."""
DENOISERS = {"sd": "unet", "sdxl": "unet", "cascade_c": "prior", "cascade_b": "decoder"}
"""Names of the networks that are trained."""


def write(kind: str, folder: Path) -> list[str]:
    """Writes a base of a family into `folder`; the settings of a recipe that starts from it."""
    WRITERS[kind](folder)
    return [f"model.family={kind}", f"model.pretrained_model_name_or_path={folder}", *OWN.get(kind, [])]
