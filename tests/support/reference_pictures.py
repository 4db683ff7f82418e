"""Small pictures that reference images are made of, of chosen sizes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def picture(path: Path, seed: int, size: tuple[int, int]) -> Path:
    """Writes a smooth random picture of this height and width."""
    low = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(low).resize(size[::-1], Image.Resampling.BICUBIC).save(path)
    return path


def pictures(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[Path]:
    """Writes one picture of each size."""
    return [picture(folder / f"{i}.png", i, size) for i, size in enumerate(sizes)]
