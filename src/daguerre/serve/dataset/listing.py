"""The pictures of a folder as training reads it: those that are trained on, and those that are not, with the reason."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from daguerre.data import alternatives
from daguerre.data.filters.evaluate import FilterResult
from daguerre.data.folder import scan
from daguerre.data.folder.captions import CAPTION, METADATA, Rules
from daguerre.data.folder.scan import Found, Sample
from daguerre.data.images import headers, kinds
from daguerre.data.index.file import metadata_columns
from daguerre.data.index.index import Index
from daguerre.data.leftovers import HIDDEN, is_leftover
from daguerre.data.plan import buckets as bucketing
from daguerre.data.plan.buckets import TOO_SMALL, Bucket
from daguerre.data.tools import statistics
from daguerre.errors import UserError
from daguerre.report.run import MOST_BYTES
from daguerre.serve.bounds import OutOfBounds, check_file, within
from daguerre.serve.dataset.folders import Place
from daguerre.serve.dataset.reading import Reading
from daguerre.unicode import printable

AWAY = {"left_out": "left out", "trash": "in the trash"}
_KEPT = 4
_UNKNOWN_PX = 256
FILTERED = "left out by a filter"
_SIDES = ("height", "width")


@dataclass(frozen=True)
class Picture:
    """A picture of a folder."""

    id: str
    path: str
    """Inside the folder."""
    height: int
    width: int
    """Upright; 0 where it is not known."""
    caption: str
    """All texts of the fields in use, a line each."""
    images: dict[str, str]
    """Paths of masks and others by their names, inside the folder or absolute."""
    reason: str = ""
    """Why it is not trained on."""
    away: str = ""
    """`left_out` or `trash` for one that was put away on the page."""


@dataclass(frozen=True)
class Shape:
    """The bucket of a picture, and its crop."""

    bucket: Bucket
    cropped: float
    """Share of its pixels that no crop shows."""
    enlarged: bool
    box: tuple[float, float, float, float]
    """Left, top, width and height of a crop in the middle, as shares of the picture."""


@dataclass(frozen=True)
class Listing:
    """A folder as it was looked at."""

    place: Place
    found: Found
    samples: list[Sample]
    away: list[Picture]
    signature: int

    @cached_property
    def pictures(self) -> list[Picture]:
        """All, by their paths; those that were put away last."""
        fields = self.found.words.rules.fields
        known = [
            Picture(_id(one.path), one.path, one.height, one.width, _texts(one.texts, fields), dict(one.images))
            for one in self.samples
        ]
        lost = [Picture(_id(path), path, 0, 0, "", {}, why) for path, why in self.found.left_out.items()]
        return [*sorted([*known, *lost], key=lambda one: os.fsencode(one.path)), *self.away]

    @cached_property
    def by_id(self) -> dict[str, Picture]:
        return {one.id: one for one in self.pictures}

    @cached_property
    def index(self) -> Index:
        """Of the samples, as planning has it."""
        ids = np.array([scan.sample_id(one.path) for one in self.samples], dtype=np.int64)
        heights, widths = (np.array([getattr(one, side) for one in self.samples], np.int32) for side in _SIDES)
        columns, _, _ = metadata_columns([one.metadata for one in self.samples])
        numbers, texts = ({n[2:]: c for n, c in columns.items() if n.startswith(kind)} for kind in ("n:", "s:"))
        return Index(ids, np.array([0, len(ids)]), heights, widths, numbers, texts)

    def filtered(self, reading: Reading) -> FilterResult:
        """The samples that pass the filters of a run, and why others do not."""
        return reading.settings.filters.evaluate(self.index)

    def plan(self, reading: Reading, passes: np.ndarray) -> statistics.BucketPlan:
        """The buckets of the samples that pass, [N] bool."""
        return statistics.bucket_plan(self.index, passes, reading.settings)

    def shapes(self, reading: Reading, passes: np.ndarray) -> dict[str, Shape | str]:
        """By the id of a picture, or the reason why no bucket takes it: `FILTERED` for one that does not pass."""
        index, every = self.index, bucketing.buckets(reading.settings)
        assigned = bucketing.assign(reading.settings, index.heights_px[:], index.widths_px[:], index.ids[:])
        columns = (assigned.numbers.tolist(), assigned.enlarged.tolist(), passes.tolist())
        return {
            _id(one.path): (TOO_SMALL if number < 0 else _shape(one, every[number], enlarged)) if passed else FILTERED
            for one, number, enlarged, passed in zip(self.samples, *columns, strict=True)
        }

    def failed(self, picture: Picture, reading: Reading) -> str:
        """The filter that a picture does not pass, in the words of a training."""
        index, at = self.index, next(i for i, one in enumerate(self.samples) if one.path == picture.path)
        numbers, texts = ({n: c.slice(at, 1) for n, c in of.items()} for of in (index.numbers, index.texts))
        sides = (index.heights_px[at : at + 1], index.widths_px[at : at + 1])
        alone = Index(index.ids[at : at + 1], np.array([0, 1]), *sides, numbers, texts)
        return next(iter(reading.settings.filters.evaluate(alone).rejected))

    def picture(self, id: str) -> Picture:
        """UserError for an id of none."""
        if id not in self.by_id:
            raise UserError("there is no such picture in this folder any more", code="missing")
        return self.by_id[id]

    def size(self, picture: Picture) -> tuple[int, int]:
        """Width and height; a square for one that cannot be read."""
        if not picture.width:
            try:
                with (self.place.path / picture.path).open("rb") as file:
                    height, width = headers.upright_size(file, headers.USUAL)
            except (OSError, headers.Undecodable):
                return _UNKNOWN_PX, _UNKNOWN_PX
            return width, height
        return picture.width, picture.height

    def file(self, picture: Picture, number: int | None = None) -> Path:
        """The file of a picture, or of one of the images that belong to it. UserError."""
        beside = [*picture.images.values()]
        if number is not None and number >= len(beside):
            raise UserError("the picture has no such image", code="missing")
        return self.place.path / (picture.path if number is None else beside[number])


@dataclass
class Shelf:
    """The listings that were asked for last. Threads may call it."""

    roots: tuple[Path, ...]
    _kept: dict[tuple[str, Rules], Listing] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listing(self, place: Place, reading: Reading) -> Listing:
        """The folder as it is now; what has not changed is not read again. UserError for one that holds links to
        places outside the roots."""
        with self._lock:
            key = (place.id, reading.rules)
            before = self._kept.pop(key, None)
            signature, away = self._signature(place, reading)
            if before is None or before.signature != signature:
                before = _looked(place, reading.rules, before, signature, away)
            self._kept[key] = before
            for old in [*self._kept][:-_KEPT]:
                del self._kept[old]
            return before

    def kept(self, place: Place, id: str) -> Listing | None:
        """A listing that knows a picture, as it was last looked at."""
        with self._lock:
            for (of, _), listing in reversed(self._kept.items()):
                if of == place.id and id in listing.by_id:
                    return listing
        return None

    def _signature(self, place: Place, reading: Reading) -> tuple[int, list[Picture]]:
        """A number that stands for all files of a folder by their names, sizes and times, and what was put away."""
        digest, away = xxhash.xxh3_64(), list[Picture]()
        for folder in (str(place.path), *(path for _, path in reading.rules.folders)):
            for entry in _entries(folder):
                check_entry(entry, self.roots)
                found = entry.stat()
                digest.update(os.fsencode(f"{entry.path} {found.st_size} {found.st_mtime_ns} {found.st_ino}\n"))
                if f"/{HIDDEN}/" in entry.path and folder == str(place.path) and is_picture(entry.name):
                    inside = Path(entry.path).relative_to(folder)
                    if inside.parts[-3:-2] == (HIDDEN,) and inside.parts[-2] in AWAY:
                        away.append(_put_away(str(inside), inside.parts[-2]))
        return digest.intdigest(), sorted(away, key=lambda one: (one.away, one.path))


def check_entry(entry: os.DirEntry[str], roots: tuple[Path, ...]) -> None:
    """OutOfBounds for a link that leads out of the roots, and for a text that is too large to be read whole."""
    if entry.is_symlink() and not within(Path(entry.path), roots):
        raise OutOfBounds(
            f"{printable(entry.name)} is a link to a place outside the folders that this page may show: start it with "
            "--root DIR to let it"
        )
    if entry.name.lower().endswith((".json", ".jsonl")):
        check_file(Path(entry.path), roots, (8 if entry.name == METADATA else 1) * MOST_BYTES)


def is_picture(name: str) -> bool:
    """True for a name of a picture in a usual format that belongs to no other one."""
    stem, _ = os.path.splitext(name)
    return name.lower().endswith(scan.EXTENSIONS) and kinds.owner(stem) is None


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """The files below a folder, in an order that stays, and those that were put away; no other hidden ones."""
    waiting, seen = [folder], set[str]()
    while waiting:
        here = waiting.pop()
        if (real := os.path.realpath(here)) in seen:
            continue
        seen.add(real)
        try:
            with os.scandir(here) as found:
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        except PermissionError:
            continue
        for entry in entries:
            if is_leftover(entry.name) and entry.name != HIDDEN:
                continue
            if not entry.is_dir():
                if entry.is_file():
                    yield entry
                continue
            if entry.is_symlink():
                yield entry  # to be checked
            waiting.append(entry.path)


def _looked(place: Place, rules: Rules, before: Listing | None, signature: int, away: list[Picture]) -> Listing:
    old = before.samples if before else []
    found = scan.look(place.path, rules, {one.path: (one.stamp, number) for number, one in enumerate(old)})
    samples = [one if isinstance(one, Sample) else old[one] for one in found.samples]
    return Listing(place, found, samples, away, signature)


def _put_away(inside: str, kind: str) -> Picture:
    return Picture(_id(inside), inside, 0, 0, "", {}, AWAY[kind], kind)


def _id(path: str) -> str:
    return f"{scan.sample_id(path):016x}"


def _texts(texts: dict[str, str] | object, fields: tuple[str, ...]) -> str:
    assert isinstance(texts, dict)
    return "\n".join(text for name in fields or (CAPTION,) for text in alternatives.of(texts, name))


def _shape(sample: Sample, bucket: Bucket, enlarged: bool) -> Shape:
    tall, wide = bucket.covering(sample.height, sample.width)
    width, height = bucket.width_px / wide, bucket.height_px / tall
    return Shape(bucket, 1 - width * height, enlarged, ((1 - width) / 2, (1 - height) / 2, width, height))
