"""Small data sets for tests of the `data` verbs: a folder as a user has one, and tar shards with metadata."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES_PX = ((48, 40), (64, 32), (32, 64), (50, 50), (96, 64))
"""Width and height of image i: the one at i % 5."""


def jpeg(i: int) -> bytes:
    """Image i."""
    width, height = SIZES_PX[i % 5]
    ramp = np.linspace(0, 255, width)[None, :, None] * np.array([1, 0.5, i % 3 / 3])
    buffer = io.BytesIO()
    Image.fromarray(np.broadcast_to(ramp, (height, width, 3)).astype(np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def folder(path: Path, number: int) -> Path:
    """Captioned images."""
    path.mkdir(parents=True)
    for i in range(number):
        (path / f"{i:03}.jpg").write_bytes(jpeg(i))
        (path / f"{i:03}.txt").write_text(f"picture number {i}", encoding="utf-8")
    return path


def shard(path: Path, numbers: range, no_caption: bool = False, **changes: Any) -> Path:
    """A tar of samples with metadata; `changes` replaces the images of some: {"p3": bytes}. With `no_caption` the
    JSON has none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i in numbers:
            document = {"caption": f"image {i}", "score": i / 10, "lang": "de" if i % 4 == 0 else "en"}
            if no_caption:
                del document["caption"]
            files = {"jpg": changes.get(f"p{i}", jpeg(i)), "json": json.dumps(document).encode()}
            for extension, data in {**files, "txt": f"image {i}".encode()}.items():
                info = tarfile.TarInfo(f"{i:05}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def shards(path: Path, number: int = 3, each: int = 10) -> Path:
    """A folder of shards."""
    for i in range(number):
        shard(path / f"part-{i:02}.tar", range(i * each, (i + 1) * each))
    return path
