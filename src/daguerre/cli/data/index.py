"""`daguerre data index`: makes the index beside each shard, so that no run has to read the shards through first."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pydantic import Field

from daguerre import errors
from daguerre.config import options as config_options
from daguerre.data import skipped
from daguerre.data.index import cache
from daguerre.data.index.cache import SUFFIX, BadIndex, ShardIndex
from daguerre.data.loading import job_pool
from daguerre.data.sources import webdataset
from daguerre.errors import UserError
from daguerre.settings import Settings
from daguerre.storage import io as storage_io
from daguerre.storage.expand import expand
from daguerre.storage.location import WEB, Place
from daguerre.tracking.console import duration_text
from daguerre.tracking.progress import Counter, size_text, spoken

SUMMARY = "read shards through once and keep what training needs to know of them"
HELP = """\
usage: daguerre data index PATH... [key=value ...]

Reads tar shards through and writes SHARD.index beside each: how many samples, where they are, their digests, sizes of
pictures and metadata for filters. Training needs them, and makes those that are missing when it starts; here they are
made beforehand, in parallel, and lie where others find them too. Shards that have one already are left alone.

  daguerre data index my_shards
  daguerre data index "part-{00000..00099}.tar" more/*.tar
  daguerre data index s3://bucket/photos/            the indexes are written to the store
  daguerre data index my_shards again=true           make them anew, after the shards have changed

  again=true       make all of them anew
  processes=N      how many work beside each other (as many as cores)
  data.formats     kinds of pictures, where a recipe has others than the usual

Exits with 1 if a shard is damaged: the index holds what can be read of it, and where it is broken.
"""

_LITTLE_BYTES = 64e6


class Options(Settings):
    """What `index` takes beside the paths."""

    again: bool = False
    """Make indexes anew that are there already."""
    processes: int | None = Field(None, ge=1)
    """Processes beside each other."""


@dataclass(frozen=True)
class Made:
    """An index that was written."""

    samples: int
    bytes: int
    """Of the shard."""
    damaged: bool
    left_out: skipped.SkipReport


def run(arguments: list[str]) -> int:
    """Exit code 0, or 1 where a shard is damaged; UserError where an index cannot be written."""
    words = config_options.split(arguments)
    options, rest = config_options.own_options(words.overrides, Options)
    if not words.bare:
        raise UserError("which shards? Give tar files, a pattern, or the folder that holds them")
    data = config_options.from_paths(words.bare, ["data.source=webdataset", *rest])[0].data
    (settings,) = data.sources.values()
    assert isinstance(settings, webdataset.Settings)
    places = expand(settings.path)
    _refuse_web(places)
    build = webdataset.builder(settings)
    missing = [place for place in places if options.again or not _is_there(place, build.kind)]
    made: list[Made] = []
    with Counter("indexing", len(missing), "shards") as counter:
        for step in job_pool.work(Indexing(build), missing, options.processes or _processes(missing)):
            if isinstance(step, int):
                counter.add(step)
            else:
                made.append(step.result)
        seconds = counter.seconds
    return _conclude(made, len(places), seconds)


def _processes(places: list[Place]) -> int:
    """One for what is read sooner than others start."""
    far = any(place.local is None for place in places)
    little = not far and sum(storage_io.size(place).bytes for place in places) < _LITTLE_BYTES
    return 1 if little else job_pool.usual_processes()


@dataclass(frozen=True)
class Indexing:
    """Builds and writes the index of one shard; a task of `crew.work`."""

    build: webdataset.Build

    def __call__(self, place: Place) -> Generator[int, None, Made]:
        """Yields 1 for the shard."""
        index = self.build(place)
        write_beside(index, place)
        yield 1
        about = index.about
        return Made(index.table.num_rows, about.shard_bytes, bool(about.damage), cache.found_in(about))


def write_beside(index: ShardIndex, place: Place) -> None:
    """Writes the index where the shard is."""
    if place.local is not None:
        cache.save(index, place.local.with_name(place.local.name + SUFFIX))
    else:
        storage_io.write(Place(place.url + SUFFIX), cache.encoded(index))


def _is_there(place: Place, kind: str) -> bool:
    """Whether there is an index beside the shard that can be used, and that is of a shard of this size."""
    beside = Place(place.url + SUFFIX)
    try:
        if beside.local is not None:
            about = cache.load(beside.local).about
        else:
            data = storage_io.read(beside, 0, storage_io.size(beside).bytes, twice=True)
            about = cache.decoded(pa.py_buffer(data), Path(beside.name)).about
    except (FileNotFoundError, BadIndex):
        return False
    return about.kind == kind and about.shard_bytes == storage_io.size(place).bytes


def _refuse_web(places: list[Place]) -> None:
    web = next((place for place in places if place.scheme in WEB), None)
    if web is not None:
        raise UserError(
            f"{web.name}: nothing can be written to a web server. Training on it makes its own indexes, in "
            "data.cache_dir; or copy the shards to a folder or a store first"
        )


def _conclude(made: list[Made], number: int, seconds: float) -> int:
    samples, size_bytes = sum(one.samples for one in made), sum(one.bytes for one in made)
    there = number - len(made)
    had = f"; {there:,} had one already" if there else ""
    if made:
        print(
            f"indexed {len(made):,} shard{'s' * (len(made) != 1)}: {samples:,} samples, {size_text(size_bytes)}, in "
            f"{duration_text(seconds)}{had}"
        )
    else:
        print(f"all {number:,} shards have an index; again=true makes them anew")
    report = skipped.merged(*(one.left_out for one in made))
    if report:
        print(spoken(report))
    return errors.FAILED if any(one.damaged for one in made) else errors.DONE
