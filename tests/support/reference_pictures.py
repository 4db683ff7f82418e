"""Small pictures that reference images are made of, of chosen sizes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from daguerre import plugins
from daguerre.types import REFERENCES


def picture(path: Path, seed: int, size: tuple[int, int]) -> Path:
    """Writes a smooth random picture of this height and width."""
    low = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(low).resize(size[::-1], Image.Resampling.BICUBIC).save(path)
    return path


def pictures(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[Path]:
    """Writes one picture of each size."""
    return [picture(folder / f"{i}.png", i, size) for i, size in enumerate(sizes)]


def samples(
    folder: Path,
    captions: Sequence[str],
    counts: Sequence[int],
    size: Callable[[int, int], tuple[int, int]],
) -> Path:
    """Writes an image with each of these captions, with so many reference images; `size` gives the height and width of
    one, by the number of its sample and its own."""
    for n, (caption, count) in enumerate(zip(captions, counts, strict=True)):
        picture(folder / f"{n}.png", n, (64, 64))
        (folder / f"{n}.txt").write_text(caption)
        for i, name in enumerate(REFERENCES[:count]):
            picture(folder / f"{n}.{name}.png", 10 * n + i, size(n, i))
    return folder


def small_rule(patch: pytest.MonkeyPatch, family: str, area: int, seen: int) -> None:
    """Has a family read reference images in these areas in px, so that tiny networks read them quickly."""
    settings = plugins.find("families", family).Settings
    if (rule := settings.reference_rule) is not None:
        copy = None if rule.seen is None else replace(rule.seen, max_px=seen)
        patch.setattr(settings, "reference_rule", replace(rule, max_px=area, seen=copy))
