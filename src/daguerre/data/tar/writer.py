"""Tar shards as they are written: a record's members, the file, and the index next to it.

The same records give the same bytes: ustar, no times and no owners, members in the order images, texts, JSON. Images
are copied as they are; those that a source renders become PNG. Which records go into which shard is
`data/tools/pack.py`'s.
"""

import io
import json
import math
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from daguerre.data.images import headers
from daguerre.data.images.headers import Undecodable
from daguerre.data.images.kinds import named
from daguerre.data.tar import samples as tar_samples
from daguerre.errors import UserError
from daguerre.fresh import hidden, naming
from daguerre.types import IMAGE, Record

_MEMBER = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")
"""Names of texts that can be members of a tar; others stand in the JSON."""
_TAKEN = {"json", *(suffix for suffixes in tar_samples.EXTENSIONS.values() for suffix in suffixes)}
_BLOCK = 512
_TAR_RECORD = 20 * _BLOCK


def members(record: Record, sample_id: int, formats: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """The files of a sample as (extension, bytes): its image, further images, texts, and a JSON with its metadata
    and id.

    Reading them back gives the record's texts and metadata. Raises `Undecodable` for an image whose header is broken
    or whose format is not among `formats`, and for one without any caption.
    """
    if not any(text.strip() for text in record.texts.values()):
        raise Undecodable("image without a caption")
    image = _file(record.image, formats)
    images = []
    for name in sorted(record.images.keys() - {IMAGE}):
        with named(name):
            extension, encoded = _file(record.images[name], formats)
        images.append((f"{name}.{extension}", encoded))
    texts = {name: text for name, text in record.texts.items() if name != "text"}
    document = {**record.metadata, tar_samples.ID: sample_id}
    parts: dict[str, bytes] = {}
    for name, text in texts.items():
        if _MEMBER.fullmatch(name) and name not in _TAKEN and document.get(name) != text:
            parts[name] = text.encode()
        elif name not in document:
            document[name] = text
    parts["json"] = to_json(document, record.key)
    caption = record.texts.get("text")
    if caption is not None and tar_samples.words(parts).texts.get("text") != caption:
        parts["txt"] = caption.encode()
    return [image, *images, *sorted(parts.items(), key=lambda part: (part[0] == "json", part[0]))]


def _file(image: bytes | np.ndarray, formats: tuple[str, ...]) -> tuple[str, bytes]:
    """(extension, bytes) of an image. Raises `Undecodable`."""
    return (image_extension(image, formats), image) if isinstance(image, bytes) else ("png", png(image))


def image_extension(encoded: bytes, formats: tuple[str, ...]) -> str:
    """The usual extension of an image file, by what it holds. Raises `Undecodable`."""
    image = headers.opened(io.BytesIO(encoded), formats)
    assert image.format is not None
    return tar_samples.EXTENSIONS[image.format.lower()][0]


def png(pixels_HWC: np.ndarray) -> bytes:
    """A PNG file that decodes to exactly these pixels, [H, W, 3] uint8."""
    buffer = io.BytesIO()
    Image.fromarray(pixels_HWC).save(buffer, "PNG")
    return buffer.getvalue()


def to_json(document: Mapping[str, Any], name: str) -> bytes:
    """UTF-8 JSON of a sample's metadata; dates become text, numbers that are not finite null."""
    plain = {str(key): _plain(value, key, name) for key, value in document.items()}
    return json.dumps(plain, ensure_ascii=False).encode(errors="backslashreplace")


def _plain(value: Any, key: str, name: str) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, Decimal)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(inner): _plain(below, key, name) for inner, below in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(below, key, name) for below in value]
    raise UserError(
        f"{name}: the metadata {key!r} is a {type(value).__name__}, which the JSON of a shard cannot hold: leave that "
        "column out of the source, or turn it into text or numbers",
        code="unsupported",
    )


def write_tar(file: BinaryIO, samples: Iterable[tuple[str, list[tuple[str, bytes]]]]) -> Iterator[str]:
    """Writes samples as (key, members) one after the other and ends the archive; yields each key once it is written."""
    written = 0
    for key, files in samples:
        for extension, content in files:
            header = tarfile.TarInfo(f"{key}.{extension}")
            header.size = len(content)
            padding = bytes(-len(content) % _BLOCK)
            written += sum(file.write(part) for part in (header.tobuf(tarfile.USTAR_FORMAT), content, padding))
        yield key
    end = 2 * _BLOCK
    file.write(bytes(end + -(written + end) % _TAR_RECORD))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that gets this name at the end of the block, after the disk has it; if the block raises, nothing is left.
    What a killed process left is overwritten."""
    temporary = hidden(path, ".tmp")
    try:
        with naming(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
