"""Generated images as files: PNG, JPEG or WebP with a JSON next to each, whole or not at all.

The JSON is written last and holds size and digest of the image, which tell whether it is whole.
"""

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash
from PIL import Image

from daguerre import documents
from daguerre.checkpoint.atomic import make_folder, to_json, write_bytes_atomically
from daguerre.generation.contact_sheet import Example
from daguerre.generation.generate import GeneratedImage, ImageRequest, numbered
from daguerre.generation.jobs import Describe, Generate, Output
from daguerre.tracking.progress import Counter

FILES_A_FOLDER = 10_000
"""Longer lists are spread over folders of this many images."""
_QUALITY = {"jpeg": 95, "webp": 90}
_SUFFIXES = {"png": "png", "jpeg": "jpg", "webp": "webp"}
_WAITING = 64
"""Most images that wait for a thread to write them."""
In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Encoding:
    """Encodes pixels as a file."""

    format: Literal["png", "jpeg", "webp"] = "png"
    quality: int | None = None
    """1 to 100, of JPEG and WebP."""

    @property
    def suffix(self) -> str:
        """Without the dot."""
        return _SUFFIXES[self.format]

    def __call__(self, pixels_HWC: np.ndarray) -> bytes:
        """The file of an image [H, W, 3] uint8."""
        options: dict[str, Any] = {} if self.format == "png" else {"quality": self.used_quality}
        if self.format == "jpeg":  # no colour at half the resolution: fine edges of colour stay
            options["subsampling"] = 0
        buffer = io.BytesIO()
        Image.fromarray(pixels_HWC).save(buffer, self.format, **options)
        return buffer.getvalue()

    def write(self, path: Path, pixels_HWC: np.ndarray) -> bytes:
        """Writes an image as a file, whole or not at all; what was written. OSError."""
        content = self(pixels_HWC)
        write_bytes_atomically(path, content)
        return content

    @property
    def used_quality(self) -> int | None:
        """The quality that holds; None for PNG, which keeps every pixel as it is."""
        return self.quality or _QUALITY.get(self.format)


@dataclass(frozen=True)
class Files:
    """The images of a list in a folder."""

    folder: Path
    total: int
    """Images of the whole list, over all processes."""
    encoding: Encoding

    def image(self, request: ImageRequest) -> Path:
        if request.name is not None:
            return self.folder / f"{request.name}.{self.encoding.suffix}"
        name = f"{numbered(request.number, self.total)}.{self.encoding.suffix}"
        if self.total <= FILES_A_FOLDER:
            return self.folder / name
        return self.folder / numbered(request.number // FILES_A_FOLDER, -(-self.total // FILES_A_FOLDER)) / name

    def is_complete(self, request: ImageRequest) -> bool:
        """True if an image is there, every byte as it was written, and is the one that is requested."""
        path = self.image(request)
        try:
            known = documents.read_object(path.with_name(f"{path.stem}.json"))
            if (known["prompt"], known["seed"]) != (request.prompt.text, request.seed):
                return False
            return bool(known["bytes"] == path.stat().st_size and known["xxh3_128"] == _digest(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write(self, image: GeneratedImage, metadata: Mapping[str, Any]) -> Path:
        path = self.image(image.request)
        if path.parent != self.folder:
            make_folder(path.parent)
        content = self.encoding.write(path, image.pixels_HWC)
        sizes = {"bytes": len(content), "xxh3_128": _digest(content)}
        document = {"file": path.name, **image_document(metadata, image), **sizes}
        write_bytes_atomically(path.with_name(f"{path.stem}.json"), to_json(document))
        return path


def image_document(metadata: Mapping[str, Any], image: GeneratedImage) -> dict[str, Any]:
    """The JSON of an image, with what was done to its prompts."""
    return {**metadata, **{f"{name}_was": how for name, how in image.truncated.items()}}


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def in_threads(work: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """`work` of each item, in their order, in threads: files are written while the next images are generated.

    Started work is finished when the caller stops in the middle.
    """
    waiting: deque[Future[Out]] = deque()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            while waiting and (len(waiting) > _WAITING or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@dataclass
class FileOutput(Output):
    """One file for each image."""

    encoding: Encoding = field(default_factory=Encoding)
    _complete: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @property
    def share(self) -> int:
        return self.part.share(self.total)

    def find_existing(self) -> None:
        """Finds the images of this part that are there, by every byte."""
        self._complete = np.zeros(self.total, dtype=bool)
        with Counter("checking existing images", self.share, unit="images") as counter:
            for number, whole in in_threads(lambda one: (one.number, self._files.is_complete(one)), self._own()):
                self._complete[number] = whole
                counter.add(1)
        self.kept = int(self._complete.sum())

    def write(self, generate: Generate, describe: Describe) -> None:
        """Generates and writes the rest of this part."""
        rest = (one for one in self._own() if not (self._complete.size and self._complete[one.number]))
        for _ in in_threads(lambda image: self._files.write(image, describe(image.request)), generate(rest)):
            pass

    def missing(self) -> int:
        """Images of the whole list that are not there; by their names alone, as other parts looked at theirs."""
        if self.part.count == 1:
            return 0
        names: dict[Path, set[str]] = {}  # each folder is listed once: quicker than asking for each file
        count = 0
        for request in self.requests:
            path = self._files.image(request)
            if path.parent not in names:
                names[path.parent] = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
            count += path.name not in names[path.parent]
        return count

    def examples(self) -> Iterator[Example]:
        """Some images of the whole list, evenly spread."""
        for one in self.requests:
            if one.number in self.shown:
                path = self._files.image(one)
                link = path.relative_to(self.folder).as_posix()
                inputs = tuple(one.images.values())
                yield Example(path.read_bytes(), one.prompt.text, one.seed, one.shown_px, link, link, inputs)

    def where(self) -> str:
        """The place of the images, for people."""
        if self.total > 1:
            return f"{self.folder}: {self.total:,} images, a JSON next to each"
        return f"{self._files.image(next(iter(self.requests)))}, a JSON next to it"

    def saved(self, generated: int) -> str:
        """For people: how much is kept of so many images that were generated when a signal came."""
        return f"{generated:,} finished images are kept"

    def _own(self) -> Iterator[ImageRequest]:
        return (one for one in self.requests if one.number in self.part)

    @cached_property
    def _files(self) -> Files:
        return Files(self.folder, self.total, self.encoding)
