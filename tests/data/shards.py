"""Tar shards of small captioned images with metadata, some of them damaged: what the engine is tried on."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = ((40, 48), (64, 32), (32, 64), (50, 50))
"""Height and width of image i: the one at i % 4."""


def encoded(i: int) -> tuple[str, bytes]:
    """Extension and file of image i."""
    pixels = np.random.default_rng(i).integers(0, 256, (*SIZES[i % 4], 3), dtype=np.uint8)
    kind, extension = (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"))[i % 3]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return extension, file.getvalue()


def members(i: int, damaged: bool) -> list[tuple[str, bytes]]:
    """The members of sample i: image, caption, metadata."""
    extension, image = encoded(i)
    metadata = {"score": i % 10, "lang": "en" if i % 3 else "de"}
    return [
        (f"{i:05}.{extension}", image[: len(image) // 2] if damaged else image),
        (f"{i:05}.txt", f"image {i}, noise, small".encode()),
        (f"{i:05}.json", json.dumps(metadata).encode()),
    ]


def write(path: Path, files: list[tuple[str, bytes]]) -> Path:
    """A tar of these members."""
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def build(folder: Path, shards: int, each: int, damaged_every: int = 0) -> Path:
    """`shards` files part-00.tar, part-01.tar ... of `each` samples; of every `damaged_every` samples one is cut."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        numbers = range(shard * each, (shard + 1) * each)
        files = [f for i in numbers for f in members(i, bool(damaged_every) and i % damaged_every == 5)]
        write(folder / f"part-{shard:02}.tar", files)
    return folder
