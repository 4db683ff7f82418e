"""Tar shards for tests: small images with captions, and damage."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Members = Iterable[tuple[str, bytes]]


def jpeg(seed: int, height: int = 12, width: int = 16, form: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def sample(key: str, seed: int, text: str | None = None, **metadata: Any) -> list[tuple[str, bytes]]:
    members = [(f"{key}.jpg", jpeg(seed)), (f"{key}.txt", (text or f"image {seed}").encode())]
    return members + ([(f"{key}.json", json.dumps(metadata).encode())] if metadata else [])


def packed(members: Members, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """The bytes of a tar; names as they are, whatever they hold."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write(path: Path, members: Members, form: int = tarfile.USTAR_FORMAT) -> Path:
    path.write_bytes(packed(members, form))
    return path


def shard(number: int, count: int = 5) -> bytes:
    """A small shard; every shard holds other images."""
    first = number * count
    return packed(m for i in range(first, first + count) for m in sample(f"{i:06}", i, number=i))


def damaged(data: bytes, headers: list[int], draw: random.Random) -> tuple[str, bytes]:
    """A shard that something happened to, and what: at headers, padding, data, the end, anywhere."""
    hurt = bytearray(data)
    at = draw.randrange(len(hurt))
    what = draw.choice(["header", "flip", "flips", "zeros", "cut", "end", "noise", "missing", "inserted"])
    if what == "header":
        at = draw.choice(headers) + draw.randrange(512)
        hurt[at] ^= 1 << draw.randrange(8)
    elif what == "flip":
        hurt[at] ^= 1 << draw.randrange(8)
    elif what == "flips":
        for _ in range(draw.randrange(2, 40)):
            hurt[draw.randrange(len(hurt))] ^= 1 << draw.randrange(8)
    elif what == "zeros":
        length = 1024 * draw.randrange(1, 4)
        hurt[at : at + length] = bytes(len(hurt[at : at + length]))
    elif what == "cut":
        del hurt[at:]
    elif what == "end":
        del hurt[-draw.randrange(1, 12_000) :]
    elif what == "noise":
        length = draw.randrange(1, 3000)
        hurt[at : at + length] = draw.randbytes(len(hurt[at : at + length]))
    elif what == "missing":
        del hurt[at : at + draw.randrange(1, 3000)]
    else:
        hurt[at:at] = draw.randbytes(draw.randrange(1, 3000))
    return what, bytes(hurt)


def truth(number: int, count: int = 5) -> Mapping[bytes, str]:
    """{image: caption} of `shard`."""
    return {jpeg(i): f"image {i}" for i in range(number * count, (number + 1) * count)}
