"""What a folder of captioned pictures holds: samples in the order of their paths, and what was left out and why.

Reads headers and captions, never pixels: deep damage shows when a sample is decoded. Links are followed, but each
file and folder is taken once. No torch here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from daguerre.data import headers, skips
from daguerre.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
OTHER_IMAGES = (".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl", ".jp2", ".ico", ".psd", ".svg")
METADATA = "metadata.jsonl"
LAYOUT = """What is expected (folders inside are read too):
  DIR/cat.jpg   DIR/cat.txt      a caption beside each picture (JPEG, PNG or WebP), UTF-8
or one file for all of them:
  DIR/cat.jpg   DIR/metadata.jsonl   with a line {"file_name": "cat.jpg", "text": "a cat"} for each picture"""


@dataclass(frozen=True)
class Sample:
    """One picture with its caption."""

    path: str
    """Inside the folder."""
    id: int
    """63-bit hash of `path`."""
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of its line in metadata.jsonl."""

    @property
    def name(self) -> str:
        """`path`, printable whatever bytes a file name holds."""
        return printable(self.path)


@dataclass(frozen=True)
class Found:
    """The result of a scan."""

    samples: tuple[Sample, ...]
    skipped: skips.SkipReport


def scan(folder: Path, resolution: int) -> Found:
    """All samples of a folder. UserError where there is none, with what was found instead."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"data.path: {str(folder)!r} {what} (seen from {os.getcwd()!r}).\n{LAYOUT}")
    counts: skips.Counts = {}
    paths = list(_files(folder, counts))
    images = [path for path in paths if path.lower().endswith(EXTENSIONS)]
    others = set(paths) - set(images)
    listed = _metadata(folder, set(images), counts) if METADATA in others else {}
    samples = tuple(s for path in images if (s := _sample(folder, path, listed, others, resolution, counts)))
    _count_unused(others, images, counts)
    if not samples:
        raise UserError(_nothing(folder, images, counts))
    return Found(samples, counts)


def sample_id(path: str) -> int:
    """63 bits of BLAKE2b of a path's bytes."""
    return int.from_bytes(blake2b(os.fsencode(path), digest_size=8).digest(), "little") >> 1


def printable(path: str) -> str:
    """A path with any byte that is no UTF-8 written as an escape."""
    return path.encode("utf-8", "backslashreplace").decode()


def _files(folder: Path, counts: skips.Counts) -> Iterator[str]:
    """Paths inside `folder`, sorted within each folder, without hidden ones."""
    seen: set[str] = set()
    pending = [""]
    while pending:
        inside = pending.pop()
        real = os.path.realpath(folder / inside)
        if real in seen:
            skips.add(counts, "folder reached a second time by a link", printable(inside))
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(folder / inside), key=lambda e: os.fsencode(e.name))
        except PermissionError:
            skips.add(counts, "folder that may not be read", printable(inside) or ".")
            continue
        shown = [e for e in entries if not e.name.startswith(".")]
        yield from _unseen((e for e in shown if not e.is_dir()), inside, real, seen, counts)
        pending.extend(os.path.join(inside, e.name) for e in reversed(shown) if e.is_dir())


def _unseen(
    files: Iterator[os.DirEntry[str]], inside: str, real: str, seen: set[str], counts: skips.Counts
) -> Iterator[str]:
    for entry in files:
        path = os.path.join(inside, entry.name)
        if not entry.is_file():
            skips.add(counts, "link that leads nowhere, or no regular file", printable(path))
            continue
        target = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)
        if target in seen and path.lower().endswith(EXTENSIONS):
            skips.add(counts, "duplicate: a link to a picture that is already there", printable(path))
            continue
        seen.add(target)
        yield path


def _metadata(folder: Path, images: set[str], counts: skips.Counts) -> dict[str, dict[str, Any]]:
    """{path: line} of the lines of metadata.jsonl that name a picture of the folder."""
    listed: dict[str, dict[str, Any]] = {}
    for number, raw in enumerate((folder / METADATA).read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{METADATA} line {number}"
        line = _line(raw)
        if isinstance(line, str):
            skips.add(counts, "line of metadata.jsonl that cannot be used", f"{where}: {line}")
            continue
        path = os.path.normpath(line["file_name"])
        if path not in images:
            skips.add(
                counts, "picture named in metadata.jsonl that is not in the folder", f"{where}: {line['file_name']}"
            )
        elif path in listed:
            skips.add(counts, "duplicate: picture named twice in metadata.jsonl", f"{where}: {path}")
        else:
            listed[path] = line
    return listed


def _line(raw: bytes) -> dict[str, Any] | str:
    """The object of one line, or what is wrong with it."""
    try:
        line = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return "no UTF-8"
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(line, dict):
        return 'no object such as {"file_name": "cat.jpg", "text": "a cat"}'
    for key in ("file_name", "text"):
        if not isinstance(line.get(key), str) or not line[key].strip():
            return f"no {key}"
    return line


def _sample(
    folder: Path,
    path: str,
    listed: Mapping[str, dict[str, Any]],
    others: set[str],
    resolution: int,
    counts: skips.Counts,
) -> Sample | None:
    """The sample of one image file, or None after counting why there is none."""
    name = printable(path)
    try:
        with (folder / path).open("rb") as file:
            shorter_px = min(headers.opened(file).size)
        line = listed.get(path) or {"text": _caption(folder, os.path.splitext(path)[0] + ".txt", others)}
    except headers.Undecodable as error:
        skips.add(counts, str(error), name)
    except _NoCaption as error:
        skips.add(counts, str(error), printable(error.file or path))
    except PermissionError as error:
        skips.add(counts, "file that may not be read", printable(os.path.relpath(error.filename, folder)))
    else:
        if shorter_px < resolution:
            skips.add(counts, f"kept, but enlarged: shorter side under {resolution} px", name, kept=True)
        metadata = {key: value for key, value in line.items() if key not in ("file_name", "text")}
        return Sample(path, sample_id(path), line["text"].strip(), metadata)
    return None


class _NoCaption(Exception):
    """Why a picture has no usable caption, and the caption file if there is one."""

    def __init__(self, reason: str, file: str = "") -> None:
        super().__init__(reason)
        self.file = file


def _caption(folder: Path, path: str, others: set[str]) -> str:
    if path not in others:
        raise _NoCaption("picture without a caption")
    try:
        text = (folder / path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _NoCaption("caption file that is not UTF-8", path) from None
    if not text.strip():
        raise _NoCaption("caption file without text", path)
    return text


def _count_unused(others: set[str], images: list[str], counts: skips.Counts) -> None:
    stems = {os.path.splitext(path)[0] for path in images}
    for path in sorted(others):
        stem, extension = os.path.splitext(path)
        if extension.lower() in OTHER_IMAGES:
            skips.add(counts, "picture in a format that is not read (JPEG, PNG and WebP are)", printable(path))
        elif extension == ".txt" and stem not in stems:
            skips.add(counts, "text file without a picture of that name", printable(path))


def _nothing(folder: Path, images: list[str], counts: skips.Counts) -> str:
    found = f"\nWhat was found instead:\n{skips.table(counts)}" if counts else ""
    if not images:
        return f"data.path: there is no JPEG, PNG or WebP file in {str(folder)!r}.{found}\n{LAYOUT}"
    if counts.get("picture without a caption", {"count": 0})["count"] == len(images):
        return (
            f"data.path: none of the {len(images):,} pictures in {str(folder)!r} has a caption. Write one beside each: "
            f"the caption of {printable(images[0])} belongs into {printable(os.path.splitext(images[0])[0])}.txt.\n"
            + LAYOUT
        )
    return f"data.path: none of the {len(images):,} pictures in {str(folder)!r} can be used.{found}\n{LAYOUT}"
