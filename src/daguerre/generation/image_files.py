"""Drawn pictures as files: PNG, JPEG or WebP with a JSON beside each, whole or not at all.

The JSON is written last and holds size and digest of the picture, so what is there can be told from what is whole.
"""

from __future__ import annotations

import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash
from PIL import Image

from daguerre.checkpoint.atomic import make_folder, to_json, write_bytes_atomically
from daguerre.generation.generate import Drawn, Wanted, numbered

FILES_A_FOLDER = 10_000
"""Longer lists are spread over folders of this many pictures."""
_QUALITY = {"jpeg": 95, "webp": 90}
_SUFFIXES = {"png": "png", "jpeg": "jpg", "webp": "webp"}
_AHEAD = 64
"""Pictures that wait for a thread to write them, at most."""
In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Encoding:
    """How pixels become a file."""

    format: Literal["png", "jpeg", "webp"] = "png"
    quality: int | None = None
    """1 to 100, of JPEG and WebP."""

    @property
    def suffix(self) -> str:
        """What files are called, without the dot."""
        return _SUFFIXES[self.format]

    def __call__(self, pixels_HWC: np.ndarray) -> bytes:
        """The file of a picture [H, W, 3] uint8."""
        buffer = io.BytesIO()
        image = Image.fromarray(pixels_HWC)
        if self.format == "png":
            image.save(buffer, "PNG")
        elif self.format == "jpeg":  # no colour at half the resolution: fine edges of colour stay
            image.save(buffer, "JPEG", quality=self.used_quality, subsampling=0)
        else:
            image.save(buffer, "WEBP", quality=self.used_quality)
        return buffer.getvalue()

    @property
    def used_quality(self) -> int | None:
        """The quality that holds; None for PNG, which keeps every pixel as it is."""
        return self.quality or _QUALITY.get(self.format)


@dataclass(frozen=True)
class Files:
    """The pictures of a list in a folder."""

    folder: Path
    total: int
    """Pictures of the whole list, over all ranks."""
    encoding: Encoding
    about: Callable[[Wanted], dict[str, Any]]
    """What the JSON of a picture says."""

    def image(self, one: Wanted) -> Path:
        """Where a picture is, or will be."""
        if one.name is not None:
            return self.folder / f"{one.name}.{self.encoding.suffix}"
        name = f"{numbered(one.number, self.total)}.{self.encoding.suffix}"
        if self.total <= FILES_A_FOLDER:
            return self.folder / name
        return self.folder / numbered(one.number // FILES_A_FOLDER, -(-self.total // FILES_A_FOLDER)) / name

    def is_whole(self, one: Wanted) -> bool:
        """Whether a picture is there, every byte as it was written, and is the one that is wanted."""
        path = self.image(one)
        try:
            known = json.loads(path.with_name(f"{path.stem}.json").read_bytes())
            if (known["prompt"], known["seed"]) != (one.prompt.text, one.seed):
                return False
            return bool(known["bytes"] == path.stat().st_size and known["xxh3_128"] == _digest(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write(self, drawn: Drawn) -> Path:
        """The picture, then its JSON."""
        path = self.image(drawn.wanted)
        if path.parent != self.folder:
            make_folder(path.parent)
        content = self.encoding(drawn.pixels_HWC)
        write_bytes_atomically(path, content)
        sizes = {"bytes": len(content), "xxh3_128": _digest(content)}
        document = {"file": path.name, **described(self.about(drawn.wanted), drawn), **sizes}
        write_bytes_atomically(path.with_name(f"{path.stem}.json"), to_json(document))
        return path


def described(about: Mapping[str, Any], drawn: Drawn) -> dict[str, Any]:
    """The JSON of a picture, and what was done to its prompt."""
    return {**about, **({"prompt_was": drawn.cut} if drawn.cut else {})}


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def in_threads(work: Callable[[In], Out], items: Iterable[In], ahead: int = _AHEAD) -> Iterator[Out]:
    """`work` of each item, in their order, in threads: files are written while the next pictures are drawn.

    What was begun is finished when the caller stops in the middle.
    """
    waiting: deque[Future[Out]] = deque()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            while waiting and (len(waiting) > ahead or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
