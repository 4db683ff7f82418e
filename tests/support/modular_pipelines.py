"""diffusers' modular pipelines of today's families, opened offline from a folder, and the images that they draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline
from tiny_families.anima import with_resize


def opened(folder: Path) -> Any:
    """The pipeline of a folder, with all of its components in memory."""
    with_resize()
    pipe = ModularPipeline.from_pretrained(str(folder), local_files_only=True)
    pipe.load_components(local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(pipe: Any, prompts: Sequence[str], noise_BCHW: torch.Tensor, scale: float, **call: Any) -> np.ndarray:
    """Images [B, H, W, 3] from 0 to 255 of a pipeline at a guidance scale, for this initial noise."""
    pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=scale))
    images = pipe(prompt=list(prompts), latents=noise_BCHW[:, :, None], output_type="np", output="images", **call)
    return (images * 255).round().astype(int)
