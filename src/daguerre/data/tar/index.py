"""The index of a tar shard: where its samples lie, how large their images are, and what their metadata says.

Reads the shard through once. What cannot be used is left out here, and counted; what is damaged is a byte range.
"""

import io
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from daguerre.data import skipped
from daguerre.data.images import headers, kinds
from daguerre.data.images.headers import Undecodable
from daguerre.data.index import file as index_file
from daguerre.data.index.file import About, ShardIndex
from daguerre.data.tar import reader
from daguerre.data.tar import samples as tar_samples
from daguerre.data.tar.samples import Sample, Unusable
from daguerre.errors import UserError

_PARTS = pa.list_(pa.struct({"name": pa.int16(), "offset": pa.int64(), "size": pa.int64()}))
IMAGE_MARK = "/"
"""Stands before the name of an image among the parts of a sample: no extension has it."""
NAMES_LIMIT = 32_000
"""Fields of a shard, its members' extensions, after which no sample is taken: their numbers have 16 bits."""
_STARTS = {
    b"\x1f\x8b": "compressed with gzip: unpack it with `gunzip`",
    b"BZh": "compressed with bzip2: unpack it with `bunzip2`",
    b"\xfd7zXZ": "compressed with xz: unpack it with `unxz`",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it with `unzstd`",
    b"PK\x03\x04": "a zip archive: unpack it, and read the folder with data.source=folder",
    b"PAR1": "a parquet file: read it with data.source=parquet",
}


def kind(formats: Iterable[str]) -> str:
    """Names the kind of an index of shards read with these image formats: others leave out other samples."""
    names = sorted(set(formats))
    return "webdataset" if names == sorted(headers.USUAL) else f"webdataset {' '.join(names)}"


def digest(pieces: Iterable[bytes | memoryview]) -> int:
    """xxh3_64 of a sample's bytes: its image, its further images, then its texts in the order of their fields."""
    whole = xxhash.xxh3_64()
    for piece in pieces:
        whole.update(piece)
    return whole.intdigest()


def build(path: Path, name: str, formats: Sequence[str], version: str = "") -> ShardIndex:
    """The index of the tar at `path`, which messages call `name`. UserError where it is no tar at all."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return _built(b"", name, formats, version)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _built(data, name, formats, version)


def _built(data: reader.Bytes, name: str, formats: Sequence[str], version: str) -> ShardIndex:
    shard_digest = xxhash.xxh3_128_hexdigest(data)
    found = reader.contents(data)
    if found.damage == ((0, len(data)),) and len(data) and not reader.begins(data):
        text = f"data.path: {name} is not a tar file: it {_beginning(data[:512])}"
        raise UserError(text, code="damaged", setting="data.path")
    counts: skipped.Counts = {}
    for other, members in found.others.items():
        for one in members:
            skipped.add(counts, f"{other} in the tar", tar_samples.printable(one), kept=True)
    rows: list[_Row] = []
    names: dict[str, int] = {}
    for sample in tar_samples.joined(found.members, formats, counts):
        try:
            if len(names) > NAMES_LIMIT:
                raise Unusable(f"sample behind {NAMES_LIMIT:,} different extensions in its shard")
            rows.append(_row(sample, data, formats, counts))
        except (Unusable, Undecodable) as error:
            skipped.add(counts, str(error), tar_samples.printable(sample.image.name))
            continue
        for part, _ in rows[-1].sample.parts:
            names.setdefault(part, len(names))
    columns, fields, not_kept = index_file.metadata_columns([row.metadata for row in rows])
    table = {
        **_columns(rows, names, shard_digest),
        **columns,
        **index_file.caption_columns([row.captions for row in rows]),
        **index_file.image_columns([row.images for row in rows]),
    }
    about = About(
        kind=kind(formats),
        shard=name,
        shard_bytes=len(data),
        shard_digest=shard_digest,
        version=version,
        left_out={
            reason: {**entry, "examples": [f"{name}: {example}" for example in entry["examples"]]}
            for reason, entry in counts.items()
        },
        damage=found.damage,
        fields=fields,
        not_kept=not_kept,
        own={"names": list(names)},
    )
    return ShardIndex(pa.table(table), about)


class _Row(NamedTuple):
    """A sample that can be trained on."""

    sample: Sample
    """Its `parts` are the further images and the texts that are read."""
    given_id: int | None
    height: int
    width: int
    digest: int
    metadata: dict[str, Any]
    captions: frozenset[str]
    """Fields that have text."""
    images: frozenset[str]
    """Of the further images."""


def _row(sample: Sample, data: reader.Bytes, formats: Sequence[str], counts: skipped.Counts) -> _Row:
    """The row of a sample. `Unusable` or `Undecodable` where it cannot be used."""
    image = _bytes(data, sample.image)
    parts = {name: _bytes(data, member) for name, member in sample.parts}
    words = tar_samples.words(parts)
    captions = frozenset(name for name, text in words.texts.items() if text.strip())
    if not captions:
        raise Unusable("caption without text" if words.texts else "image without a caption")
    given_id = _id(words.metadata.get(tar_samples.ID))
    height, width = headers.upright_size(io.BytesIO(image), formats)
    beside = {name: _bytes(data, member) for name, member in sample.images}
    for name, encoded in beside.items():
        kinds.check(name, encoded, (height, width), formats)
    for name in parts.keys() - words.used:
        skipped.add(counts, "member that is neither image nor text", f"{sample.key}.{name}", kept=True)
    texts = tuple((name, member) for name, member in sample.parts if name in words.used)
    used = tuple((IMAGE_MARK + name, member) for name, member in sample.images) + texts
    own = digest([image, *beside.values(), *(parts[name] for name, _ in texts)])
    metadata = _metadata(words)
    return _Row(sample._replace(parts=used), given_id, height, width, own, metadata, captions, frozenset(beside))


def _columns(rows: Sequence[_Row], names: Mapping[str, int], shard_digest: str) -> dict[str, pa.Array]:
    """The columns that are not metadata; `names` are the numbers of the parts' names."""
    images = np.array([row.sample.image[1:] for row in rows], np.int64).reshape(-1, 3)
    ids = index_file.sample_ids(shard_digest, images[:, 1])
    for number, row in enumerate(rows):
        ids[number] = ids[number] if row.given_id is None else row.given_id
    parts = [[(names[name], member.offset, member.size) for name, member in row.sample.parts] for row in rows]
    return {
        "id": pa.array(ids),
        "height": pa.array([row.height for row in rows], pa.int32()),
        "width": pa.array([row.width for row in rows], pa.int32()),
        "digest": pa.array([row.digest for row in rows], pa.uint64()),
        "key": pa.array([row.sample.key for row in rows], pa.string()),
        "offset": pa.array(images[:, 1]),
        "size": pa.array(images[:, 2]),
        "parts": pa.array(parts, _PARTS),
    }


def _bytes(data: reader.Bytes, member: reader.Member) -> bytes:
    return data[member.offset : member.offset + member.size]


def _id(given: Any) -> int | None:
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < 1 << 63:
        raise Unusable(f"{tar_samples.ID} that is not a whole number of 63 bits")
    return given


def _metadata(words: tar_samples.Words) -> dict[str, Any]:
    """Metadata for filters: the JSON, and the class if it is a number."""
    metadata = {name: value for name, value in words.metadata.items() if name != tar_samples.ID}
    label = words.texts.get("cls", "").strip()
    if label.removeprefix("-").isdecimal() and label.isascii() and len(label) < 16:
        metadata.setdefault("cls", int(label))
    return index_file.brief(metadata)


def _beginning(start: bytes) -> str:
    """Says what a file is that is no tar, by how it begins."""
    for mark, what in _STARTS.items():
        if start.startswith(mark):
            return f"is {what}"
    if not start.strip(b"\0"):
        return "begins with zeros, as after an interrupted download"
    text = start.lstrip()[:80].decode("utf-8", "replace")
    if text.lower().startswith(("<!doctype", "<html", "<?xml")):
        return f"is a web page, such as an error or login page of a server: {text!r}"
    return f"begins with {text!r}"
