"""Ways to read a folder of pictures: as the form of the page says, or as a run does; and the runs that read it."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.data.folder.captions import Rules
from daguerre.data.images import kinds
from daguerre.data.settings import BucketSettings
from daguerre.data.sources import folder as folder_source
from daguerre.data.sources.folder import Settings
from daguerre.errors import UserError
from daguerre.report.run import MOST_BYTES, SAFE_LOADER
from daguerre.serve.bounds import check_file, within
from daguerre.serve.catalog import Catalog, Entry
from daguerre.serve.dataset.folders import Place

ENDED = "finished"
RESOLUTIONS = (64, 128, 256, 512, 768, 1024, 1280, 1536)
RESOLUTION = 1024
SHAPES = {"auto": "of every aspect", "square": "square"}
_SHARED = ("resolution", "buckets", "crop", "crops", "formats", "filters")
_OWN: tuple[str, ...] = ("captions", "captions_from", "recursive", "caption_extension")
_OWN += ("mask_dir", "control_dir", "rejected_dir", "reference_dir")
"""Settings of a run's data that say how a folder is read. What else a config names is not opened."""


@dataclass(frozen=True)
class Reading:
    """A way to read a folder."""

    settings: Settings
    rules: Rules


@dataclass(frozen=True)
class Reader:
    """A run that reads a folder, or one above or below it."""

    id: str
    name: str
    state: str
    step: int
    reading: Reading
    is_same: bool
    """True if it reads this very folder."""

    @property
    def may_go_on(self) -> bool:
        """True if captions are a part of what it goes on with."""
        return self.state != ENDED


def of_form(place: Place, query: Mapping[str, str]) -> Reading:
    """The way that the form of the page asks for; what is left out is as usual. UserError for what cannot be."""
    resolution, shapes = query.get("resolution", "") or str(RESOLUTION), query.get("shapes", "") or "auto"
    if resolution not in map(str, RESOLUTIONS) or shapes not in SHAPES:
        raise UserError("the page knows no such resolution or shapes")
    buckets = BucketSettings(aspects="auto" if shapes == "auto" else "square")
    settings = Settings(path=str(place.path), resolution=int(resolution), buckets=buckets)
    return Reading(settings, folder_source.rules(settings))


def readers(place: Place, catalog: Catalog) -> list[Reader]:
    """The runs that read a folder, as their configs say; those that still train or can go on first."""
    found = [each for entry in catalog.summed_up() for each in _of_entry(entry, place, catalog.roots)]
    return sorted(found, key=lambda each: (not each.may_go_on, not each.is_same))


def _of_entry(entry: Entry, place: Place, roots: tuple[Path, ...]) -> Iterator[Reader]:
    data, run = _data(entry.folder, roots), entry.summary
    sources = data.get("sources")
    for source in sources.values() if isinstance(sources, dict) else ():
        if run is None or not isinstance(source, dict) or source.get("source") != "folder":
            continue
        # Only compared as a text: what a config names is not opened.
        path = os.path.abspath(os.path.expanduser(str(source.get("path", ""))))
        if _related(path, str(place.path)):
            reading = _of_run({**data, **source}, place, roots)
            yield Reader(entry.id, run.name, run.state, run.step, reading, path == str(place.path))
            return


def _of_run(given: Mapping[str, Any], place: Place, roots: tuple[Path, ...]) -> Reading:
    """The way of a run, in this folder; folders of masks and others outside the roots are left out."""
    own = {name: given[name] for name in (*_SHARED, *_OWN) if given.get(name) is not None}
    try:
        settings = Settings.model_validate({**own, "path": str(place.path)})
    except ValidationError:  # of another version, or forged
        settings = Settings(path=str(place.path))
    there = [(name, os.path.abspath(os.path.expanduser(path))) for _, name, path in kinds.places(settings, "dir")]
    folders = tuple((name, path) for name, path in there if within(Path(path), roots) and os.path.isdir(path))
    return Reading(settings, folder_source.rules(settings, None, folders))


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + os.sep) or other.startswith(one + os.sep)


def _data(folder: Path, roots: tuple[Path, ...]) -> dict[str, Any]:
    """The section `data` of a run's config; {} for one that cannot be read."""
    path = RunFolder(folder).config
    try:
        check_file(path, roots, MOST_BYTES)
        stat = path.stat()
        return _section(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}


@lru_cache(maxsize=4096)
def _section(path: Path, changed_ns: int, size_bytes: int) -> dict[str, Any]:
    """By time and size, so that a file that changes is read again."""
    tree = yaml.load(path.read_bytes(), SAFE_LOADER)
    data = tree.get("data") if isinstance(tree, dict) else None
    return data if isinstance(data, dict) else {}
