"""A folder of small captioned images, as a user would have one."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def noise(seed: int, height: int = 40, width: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def build(folder: Path, number: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(number):
        extension = ("jpg", "png", "webp")[i % 3]
        Image.fromarray(noise(i)).save(folder / f"{i:03}.{extension}")
        (folder / f"{i:03}.txt").write_text(f"image {i}\n", encoding="utf-8")
    return folder


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    return build(tmp_path / "images", 12)


@pytest.fixture
def build_images():
    """Makes a folder with as many captioned images as asked for."""
    return build
