"""What a folder of captioned pictures holds: samples in the order of their paths, and what was left out and why.

Reads headers and captions, never pixels: deep damage shows when a sample is decoded. Links are followed, but each
file and folder is taken once. What was read before and has not changed since is not read again:
`data/folder/index.py` keeps it. Captions and metadata are `data/folder/captions.py`. No torch here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from daguerre.data import skipped as data_skipped
from daguerre.data.folder import images as folder_images
from daguerre.data.folder.captions import TEXT_FILES, NoCaption, Rules, Words
from daguerre.data.images import headers
from daguerre.data.images import kinds as images_kinds
from daguerre.data.images.headers import Undecodable
from daguerre.errors import UserError
from daguerre.unicode import printable

SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "jpeg": (".jpg", ".jpeg"),
    "png": (".png",),
    "webp": (".webp",),
    "gif": (".gif",),
    "bmp": (".bmp",),
    "tiff": (".tif", ".tiff"),
}
"""What files of a format are called."""
EXTENSIONS = tuple(suffix for name in headers.USUAL for suffix in SUFFIXES[name])
"""What pictures are called where a recipe allows no more than the usual formats."""
OTHER_IMAGES: tuple[str, ...] = (".avif", ".heic", ".heif", ".jxl", ".jp2", ".ico", ".psd", ".svg")
OTHER_IMAGES += tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
LAYOUT = """What is expected (folders inside are read too):
  DIR/cat.jpg   DIR/cat.txt      a caption beside each picture (JPEG, PNG or WebP), UTF-8; or DIR/cat.json
or one file for all of them:
  DIR/cat.jpg   DIR/metadata.jsonl   with a line {"file_name": "cat.jpg", "text": "a cat"} for each picture
or captions in the names: data.captions_from=file_names or folder_names"""
TWICE, CLOSED = "folder reached a second time by a link", "folder that may not be read"
LONE_TEXT = "text file without a picture of that name"
NO_SAMPLES = frozenset({TWICE, CLOSED, LONE_TEXT})
"""Reasons that tell of something else than a sample."""
_PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class Sample:
    """One picture with its captions."""

    path: str
    """Inside the folder."""
    height: int
    width: int
    """Upright, in pixels."""
    stamp: int
    """Stands for everything that was read: an equal one means that nothing has changed."""
    texts: Mapping[str, str]
    metadata: Mapping[str, object]
    images: Mapping[str, str]
    """Paths of the images beside it by name, inside the folder or absolute."""


@dataclass(frozen=True)
class Found:
    """The result of a scan."""

    samples: tuple[Sample | int, ...]
    """Samples; for one that is as it was before, its number there."""
    skipped: data_skipped.SkipReport


def scan(folder: Path, rules: Rules, known: Mapping[str, tuple[int, int]]) -> Found:
    """All samples of a folder; of those that are `known` ({path: (stamp, number)}) and unchanged, the number alone.

    UserError where there is none, with what was found instead.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"data.path: {str(folder)!r} {what} (seen from {os.getcwd()!r}).\n{LAYOUT}")
    counts: data_skipped.Counts = {}
    suffixes = tuple(suffix for name in rules.formats for suffix in SUFFIXES[name])
    paths = list(_files(folder, suffixes, counts, rules.mask_dir))
    found = [path for path in paths if path.lower().endswith(suffixes)]
    beside = folder_images.beside(found, rules.mask_dir, suffixes, counts)
    images = [path for path in found if path not in beside.files]
    others = set(paths) - set(found)
    words = Words.of(folder, rules, images, others, counts)
    looked = ((path, beside.of(path)) for path in _told(images))
    samples = tuple(s for path, own in looked if (s := _sample(folder, path, own, words, known, counts)) is not None)
    _count_unused(others, images, suffixes, rules, counts)
    if not samples:
        raise UserError(_nothing(folder, images, rules, counts))
    return Found(samples, counts)


def sample_id(path: str) -> int:
    """63 bits of BLAKE2b of a path's bytes."""
    return int.from_bytes(blake2b(os.fsencode(path), digest_size=8).digest(), "little") >> 1


def _files(
    folder: Path, suffixes: tuple[str, ...], counts: data_skipped.Counts, aside: str | None = None
) -> Iterator[str]:
    """Paths inside `folder`, sorted within each folder, without hidden ones and those in the folder `aside`."""
    seen: set[str] = set()
    aside = aside and os.path.realpath(aside)
    pending = [""]
    while pending:
        inside = pending.pop()
        real = os.path.realpath(folder / inside)
        if real == aside:
            continue
        if real in seen:
            data_skipped.add(counts, TWICE, printable(inside), damage=False)
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(folder / inside), key=lambda e: os.fsencode(e.name))
        except PermissionError:
            data_skipped.add(counts, CLOSED, printable(inside) or ".")
            continue
        shown = [e for e in entries if not e.name.startswith(".")]
        files = (e for e in shown if not e.is_dir())
        yield from _unseen(files, inside, real, seen, suffixes, counts)
        pending.extend(os.path.join(inside, e.name) for e in reversed(shown) if e.is_dir())


def _unseen(
    files: Iterator[os.DirEntry[str]],
    inside: str,
    real: str,
    seen: set[str],
    suffixes: tuple[str, ...],
    counts: data_skipped.Counts,
) -> Iterator[str]:
    for entry in files:
        path = os.path.join(inside, entry.name)
        if not entry.is_file():
            data_skipped.add(counts, "link that leads nowhere, or no regular file", printable(path))
            continue
        target = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)
        if target in seen and path.lower().endswith(suffixes):
            data_skipped.add(
                counts, "duplicate: a link to a picture that is already there", printable(path), damage=False
            )
            continue
        seen.add(target)
        yield path


def _told(images: Sequence[str]) -> Iterator[str]:
    """The paths one by one; says how far it is every few seconds, so that a long scan is no silence."""
    spoken = time.monotonic()
    for number, path in enumerate(images):
        yield path
        if (now := time.monotonic()) - spoken > _PROGRESS_SECONDS:
            print(f"looked at {number + 1:,} of {len(images):,} pictures", file=sys.stderr, flush=True)
            spoken = now


def _sample(
    folder: Path,
    path: str,
    beside: Mapping[str, str],
    words: Words,
    known: Mapping[str, tuple[int, int]],
    counts: data_skipped.Counts,
) -> Sample | int | None:
    """The sample of one image file, or None after counting why there is none."""
    try:
        stamp = words.stamp(path, beside)
        if path in known and known[path][0] == stamp:
            return known[path][1]
        with (folder / path).open("rb") as file:
            height, width = headers.upright_size(file, words.rules.formats)
        for name, image in beside.items():
            images_kinds.check(name, (folder / image).read_bytes(), (height, width), words.rules.formats)
        texts, metadata = words.said(path)
    except Undecodable as error:
        data_skipped.add(counts, str(error), printable(path))
    except NoCaption as error:
        data_skipped.add(counts, str(error), printable(error.file or path), damage=error.damage)
    except PermissionError as error:
        data_skipped.add(counts, "file that may not be read", printable(os.path.relpath(error.filename, folder)))
    else:
        return Sample(path, height, width, stamp, texts, metadata, beside)
    return None


def _count_unused(
    others: set[str], images: Sequence[str], suffixes: tuple[str, ...], rules: Rules, counts: data_skipped.Counts
) -> None:
    stems = {os.path.splitext(path)[0] for path in images}
    for path in sorted(others):
        stem, extension = os.path.splitext(path)
        if extension.lower() in OTHER_IMAGES and extension.lower() not in suffixes:
            reason = f"picture in a format that is not read ({_spoken(rules.formats, 'and')} are)"
            data_skipped.add(counts, reason, printable(path), damage=False)
        elif extension in TEXT_FILES and stem not in stems:
            data_skipped.add(counts, LONE_TEXT, printable(path), damage=False)
        elif extension in TEXT_FILES and rules.captions_from != "files":
            reason = f"kept, but its text file is not read (data.captions_from={rules.captions_from})"
            data_skipped.add(counts, reason, printable(path), kept=True)


def _spoken(formats: Sequence[str], last: str) -> str:
    names = [name.upper().replace("WEBP", "WebP") for name in formats]
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if names[1:] else names[0]


def _nothing(folder: Path, images: Sequence[str], rules: Rules, counts: data_skipped.Counts) -> str:
    found = f"\nWhat was found instead:\n{data_skipped.table(counts)}" if counts else ""
    if not images:
        kinds = _spoken(rules.formats, "or")
        return f"data.path: there is no {kinds} file in {str(folder)!r}.{found}\n{LAYOUT}"
    if counts.get("picture without a caption", {"count": 0})["count"] == len(images):
        return (
            f"data.path: none of the {len(images):,} pictures in {str(folder)!r} has a caption. Write one beside each: "
            f"the caption of {printable(images[0])} belongs into {printable(os.path.splitext(images[0])[0])}.txt.\n"
            + LAYOUT
        )
    return f"data.path: none of the {len(images):,} pictures in {str(folder)!r} can be used.{found}\n{LAYOUT}"
