"""Scans a folder of captioned images: samples in the order of their paths, and what was left out and why.

Reads headers and captions, never pixels: deep damage shows when a sample is decoded. Links are followed, but each
file and folder is taken once. What was read before and has not changed since is not read again:
`data/folder/index.py` keeps it. Captions and metadata are `data/folder/captions.py`. No torch here.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from daguerre.data import skipped
from daguerre.data.folder.captions import METADATA, UNCAPTIONED, NoCaption, Rules, Words
from daguerre.data.images import headers, kinds
from daguerre.data.images.headers import Undecodable
from daguerre.data.leftovers import HIDDEN, LEFTOVER, is_leftover
from daguerre.data.skipped import SkipReport
from daguerre.data.tar import samples
from daguerre.errors import UserError
from daguerre.storage.roots import AWAY, leads_away
from daguerre.unicode import printable

SUFFIXES = {name: tuple(f".{extension}" for extension in known) for name, known in samples.EXTENSIONS.items()}
"""What files of a format are called."""
EXTENSIONS = tuple(suffix for name in headers.USUAL for suffix in SUFFIXES[name])
"""What images are called where a recipe allows no more than the usual formats."""
OTHER_IMAGES: tuple[str, ...] = (".avif", ".heic", ".heif", ".jxl", ".jp2", ".ico", ".psd", ".svg")
OTHER_IMAGES += tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
LAYOUT = """Expected (subfolders are read too):
  DIR/cat.jpg   DIR/cat.txt      a caption next to each image (JPEG, PNG or WebP), UTF-8; or DIR/cat.json
or one file for all of them:
  DIR/cat.jpg   DIR/metadata.jsonl   with a line {"file_name": "cat.jpg", "text": "a cat"} for each image
or captions in the names: data.captions_from=file_names or folder_names
or one caption for all images: data.captions.text='a photo of a cat'"""
TWICE, CLOSED = "folder reached a second time by a link", "folder that may not be read"
LONE_TEXT = "text file without an image of that name"
SECOND_TEXT = "kept, but a second text file of the image is not read"
REPEATED = "kept, each image once: a number before a folder's name repeats nothing here (data.repeats does)"
"""As in kohya's `10_sks dog`."""
_REPEATED = re.compile(r"[1-9]\d{0,2}_\D")
INSIDE = "folder inside that is not read (data.recursive=false)"
NO_SAMPLES = frozenset({TWICE, CLOSED, AWAY, LONE_TEXT, LEFTOVER, INSIDE, REPEATED})
"""Reasons that tell of something else than a sample."""
_PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class Sample:
    """One image with its captions."""

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
    """Paths of the images next to it by name, inside the folder or absolute."""


@dataclass(frozen=True)
class Found:
    """The result of a scan."""

    samples: tuple[Sample | int, ...]
    """Samples; for one that is as it was before, its number there."""
    skipped: SkipReport
    left_out: Mapping[str, str]
    """{path: reason} of the images that are no samples."""
    words: Words
    """Of all images."""


def scan(folder: Path, rules: Rules, known: Mapping[str, tuple[int, int]]) -> Found:
    """All samples of a folder; of those that are `known` ({path: (stamp, number)}) and unchanged, the number alone.

    UserError without any, with what was found instead.
    """
    found = look(folder, rules, known)
    if not found.samples:
        raise UserError(
            _nothing(folder, [*found.left_out], found.words, found.skipped), code="empty", setting="data.path"
        )
    return found


def look(folder: Path, rules: Rules, known: Mapping[str, tuple[int, int]]) -> Found:
    """`scan`, also of a folder without a sample. UserError for one that is not there."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        text = f"data.path: {str(folder)!r} {what} (seen from {os.getcwd()!r}).\n{LAYOUT}"
        raise UserError(text, code="missing", setting="data.path")
    counts: skipped.Counts = {}
    suffixes = tuple(suffix for name in rules.formats for suffix in SUFFIXES[name])
    paths = list(_files(folder, suffixes, counts, rules))
    found = [path for path in paths if path.lower().endswith(suffixes)]
    beside = _beside(found, rules.folders, suffixes, counts)
    images = [path for path in found if path not in beside.files]
    others = set(paths) - set(found)
    words = Words.of(folder, rules, images, others, counts)
    looked = {path: _sample(folder, path, beside.of(path), words, known, counts) for path in _told(images)}
    _count_unused(words, images, suffixes, counts)
    samples = tuple(each for each in looked.values() if not isinstance(each, str))
    left_out = {path: each for path, each in looked.items() if isinstance(each, str)}
    return Found(samples, counts, left_out, words)


def sample_id(path: str) -> int:
    """63 bits of BLAKE2b of a path's bytes."""
    return int.from_bytes(blake2b(os.fsencode(path), digest_size=8).digest(), "little") >> 1


def _files(folder: Path, suffixes: tuple[str, ...], counts: skipped.Counts, rules: Rules) -> Iterator[str]:
    """Paths inside `folder`, sorted within each folder, without what programs leave there and those in folders of
    masks and control images."""
    seen: set[str] = set()
    apart = {os.path.realpath(place) for _, place in rules.folders}
    pending = [""]
    while pending:
        inside = pending.pop()
        real = os.path.realpath(folder / inside)
        if real in apart:
            continue
        if real in seen:
            skipped.add(counts, TWICE, printable(inside), damage=False)
            continue
        if inside and leads_away(real):
            skipped.add(counts, AWAY, printable(inside), damage=False)
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(folder / inside), key=lambda e: os.fsencode(e.name))
        except PermissionError:
            skipped.add(counts, CLOSED, printable(inside) or ".")
            continue
        shown = [e for e in entries if not is_leftover(os.path.join(inside, e.name))]
        for entry in entries:
            path = os.path.join(inside, entry.name)
            if is_leftover(path) and entry.name != HIDDEN:
                skipped.add(counts, LEFTOVER, printable(path + "/" * entry.is_dir()), damage=False)
        files = (e for e in shown if not e.is_dir())
        yield from _unseen(files, inside, real, seen, suffixes, counts)
        folders = [os.path.join(inside, e.name) for e in reversed(shown) if e.is_dir()]
        pending.extend(folders if rules.recursive else [])
        for path in folders if not rules.recursive else ():
            if os.path.realpath(folder / path) not in apart:
                skipped.add(counts, INSIDE, f"{printable(path)}/", damage=False)


def _unseen(
    files: Iterator[os.DirEntry[str]],
    inside: str,
    real: str,
    seen: set[str],
    suffixes: tuple[str, ...],
    counts: skipped.Counts,
) -> Iterator[str]:
    for entry in files:
        path = os.path.join(inside, entry.name)
        if not entry.is_file():
            skipped.add(counts, "link that leads nowhere, or no regular file", printable(path))
            continue
        target = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)
        if entry.is_symlink() and leads_away(target):
            skipped.add(counts, AWAY, printable(path), damage=False)
            continue
        if target in seen and path.lower().endswith(suffixes):
            skipped.add(counts, "duplicate: a link to an image that is already there", printable(path), damage=False)
            continue
        seen.add(target)
        yield path


def _told(images: Sequence[str]) -> Iterator[str]:
    """The paths one by one; says how far it is every few seconds, so that a long scan is no silence."""
    spoken = time.monotonic()
    for number, path in enumerate(images):
        yield path
        if (now := time.monotonic()) - spoken > _PROGRESS_SECONDS:
            print(f"looked at {number + 1:,} of {len(images):,} images", file=sys.stderr, flush=True)
            spoken = now


def _sample(
    folder: Path,
    path: str,
    beside: Mapping[str, str],
    words: Words,
    known: Mapping[str, tuple[int, int]],
    counts: skipped.Counts,
) -> Sample | int | str:
    """The sample of one image file, or the reason why it cannot be used, which is counted."""
    try:
        stamp = words.stamp(path, beside)
        if path in known and known[path][0] == stamp:
            return known[path][1]
        with (folder / path).open("rb") as file:
            height, width = headers.upright_size(file, words.rules.formats)
        for name, image in beside.items():
            kinds.check(name, (folder / image).read_bytes(), (height, width), words.rules.formats)
        texts, metadata = words.said(path)
    except Undecodable as error:
        reason, at, damage = str(error), path, True
    except NoCaption as error:
        reason, at, damage = str(error), error.file or path, error.damage
    except PermissionError as error:
        reason, at, damage = "file that may not be read", os.path.relpath(error.filename, folder), True
    else:
        return Sample(path, height, width, stamp, texts, metadata, beside)
    skipped.add(counts, reason, printable(at), damage=damage)
    return reason


def _count_unused(words: Words, images: Sequence[str], suffixes: tuple[str, ...], counts: skipped.Counts) -> None:
    rules, stems = words.rules, {stem for path in images for stem in (os.path.splitext(path)[0], path)}
    second = {text for path in images for text in words.unread_of(path)}
    named = {path.split(os.sep)[0] for path in images if os.sep in path}
    for name in sorted(filter(_REPEATED.match, named)) if rules.captions_from != "folder_names" else ():
        skipped.add(counts, REPEATED, printable(f"{name}/"), kept=True)
    for path in sorted(words.others):
        stem, extension = os.path.splitext(path)
        is_caption = extension.lower() in rules.text_files
        if extension.lower() in OTHER_IMAGES and extension.lower() not in suffixes:
            reason = f"image in a format that is not read ({_spoken(rules.formats, 'and')} are)"
            skipped.add(counts, reason, printable(path), damage=False)
        elif is_caption and stem not in stems:
            skipped.add(counts, LONE_TEXT, printable(path), damage=False)
        elif is_caption and rules.captions_from == "files" and path in second:
            skipped.add(counts, SECOND_TEXT, printable(path), kept=True)
        elif is_caption and rules.captions_from != "files":
            reason = f"kept, but its text file is ignored (data.captions_from={rules.captions_from})"
            skipped.add(counts, reason, printable(path), kept=True)


def _spoken(formats: Sequence[str], last: str) -> str:
    names = [name.upper().replace("WEBP", "WebP") for name in formats]
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if names[1:] else names[0]


def _nothing(folder: Path, images: Sequence[str], words: Words, counts: SkipReport) -> str:
    rules = words.rules
    found = f"\nFound instead:\n{skipped.table(counts)}" if counts else ""
    if not images:
        formats = _spoken(rules.formats, "or")
        return f"data.path: there is no {formats} file in {str(folder)!r}.{found}\n{LAYOUT}"
    if counts.get(UNCAPTIONED, {"count": 0})["count"] == len(images):
        name = printable(os.path.splitext(images[0])[0]) + rules.text_files[0]
        return (
            f"data.path: none of the {len(images):,} images in {str(folder)!r} has a caption. Write one next to each: "
            f"the caption of {printable(images[0])} goes into {name}.{found}{_unread(words, images[0])}\n{LAYOUT}"
        )
    return f"data.path: none of the {len(images):,} images in {str(folder)!r} can be used.{found}\n{LAYOUT}"


def _unread(words: Words, image: str) -> str:
    """The other files that lie there, by their endings, in a line, and fields of the JSON of an image; they may hold
    the captions."""
    others = sorted(path for path in words.others if os.path.basename(path) != METADATA)
    endings = Counter(os.path.splitext(path)[1].lower() for path in others)
    listed = [f"{count:,} {ending or 'without an ending'}" for ending, count in endings.most_common(5)]
    if not listed:
        return ""
    table = next((path for path in others if path.lower().endswith((".csv", ".tsv", ".parquet", ".jsonl"))), None)
    way = "captions in files of another ending are read with data.caption_extension=.ENDING"
    if table is not None:
        way = f"a table such as {printable(table)} is a source of its own (data.source=csv, jsonl or parquet)"
    if fields := words.fields_of(image):
        named = ", ".join(map(printable, fields[:5]))
        way = f"the JSON of {printable(image)} has {named}: data.captions.fields=[NAME] reads one of them"
    return f"\nOther files that are there: {', '.join(listed)}; {way}"


@dataclass(frozen=True)
class _Beside:
    """Images that belong to others, such as masks and control images."""

    files: frozenset[str]
    """Those that lie among the images."""
    by_stem: Mapping[str, Mapping[str, str]]
    """{path of the image without extension: {name: path}}."""

    def of(self, path: str) -> Mapping[str, str]:
        """{name: path} of an image's, sorted."""
        return self.by_stem.get(os.path.splitext(path)[0], {})


def _beside(
    images: Iterable[str], folders: Sequence[tuple[str, str]], suffixes: tuple[str, ...], counts: skipped.Counts
) -> _Beside:
    """Finds those of `images` (paths inside a folder) that belong to others, and those in folders of their own, which
    come first."""
    owners = {path: kinds.owner(os.path.splitext(path)[0]) for path in images}
    stems = {os.path.splitext(path)[0] for path, owner in owners.items() if owner is None}
    mine = {path: owner for path, owner in owners.items() if owner is not None and owner[0] in stems}
    found: dict[str, dict[str, str]] = {}
    apart = [(path, stem, name) for name, place in folders for path, stem in _inside(place, suffixes)]
    for path, stem, name in [*apart, *((path, stem, name) for path, (stem, name) in mine.items())]:
        word = kinds.KINDS[name].word
        if stem not in stems:
            skipped.add(counts, f"{word} without an image of its name", printable(path), damage=False)
        elif found.setdefault(stem, {}).setdefault(name, path) != path:
            skipped.add(counts, f"duplicate: second {word} of one image", printable(path), damage=False)
    return _Beside(frozenset(mine), {stem: dict(sorted(of.items())) for stem, of in found.items()})


def _inside(folder: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(absolute path, path inside the folder without extension) of the images in a folder, sorted."""
    for inside, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_leftover(name))
        for name in sorted(files):
            path = os.path.join(inside, name)
            if (
                name.lower().endswith(suffixes)
                and not is_leftover(name)
                and os.path.isfile(path)
                and not leads_away(path)
            ):
                yield path, os.path.splitext(os.path.relpath(path, folder))[0]
