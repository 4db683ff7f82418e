"""Index shards: offsets, sizes, digests and metadata that training needs.

usage: daguerre data index PATH... [key=value ...]

Reads tar shards through and writes SHARD.index next to each: how many samples, where they are, their digests, sizes of
images and metadata for filters. Training needs them, and makes those that are missing when it starts; here they are
made beforehand, in parallel, and lie where others find them too. Shards that have one already are left alone.

  daguerre data index my_shards
  daguerre data index "part-{00000..00099}.tar" more/*.tar
  daguerre data index s3://bucket/photos/            the indexes are written to the store
  daguerre data index my_shards again=true           make them again, after the shards have changed

  again=true       make all of them again
  processes=N      worker processes (as many as cores)
  data.formats     kinds of images, where a recipe has others than the usual

Exits with 1 if a shard is damaged: the index holds what can be read of it, and where it is broken.
"""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pydantic import Field

from daguerre import errors
from daguerre.config import options as config_options
from daguerre.data import skipped
from daguerre.data.index import cache
from daguerre.data.index.cache import SUFFIX, About, BadIndex
from daguerre.data.loading import job_pool
from daguerre.data.sources import webdataset
from daguerre.errors import UserError
from daguerre.formatting import counted, format_duration, format_size
from daguerre.settings import Settings
from daguerre.storage import io as storage_io
from daguerre.storage.expand import expand
from daguerre.storage.location import WEB, Location
from daguerre.tracking.progress import Counter, skip_summary


class Options(Settings):
    """Options of `index`, as the help has them."""

    again: bool = False
    processes: int | None = Field(None, ge=1)


def run(arguments: list[str]) -> int:
    """Exit code 0, or 1 where a shard is damaged; UserError where an index cannot be written."""
    words = config_options.split(arguments)
    options, rest = config_options.own_options(words.overrides, Options)
    if not words.bare:
        raise UserError("no shards given. Pass tar files, a pattern, or a folder of them", code="missing")
    data = config_options.from_paths(words.bare, ["data.source=webdataset", *rest])[0].data
    (settings,) = data.sources.values()
    assert isinstance(settings, webdataset.Settings)
    locations = expand(settings.path)
    _check_writable(locations)
    build = webdataset.builder(settings)
    missing = [location for location in locations if options.again or not _is_there(location, build.kind)]
    with Counter("indexing", len(missing), "shards") as counter:
        steps = job_pool.run_jobs(Indexing(build), missing, options.processes or cache.processes(missing))
        made = list(job_pool.results(steps, counter.add))
        seconds = counter.seconds
    return _conclude(made, len(locations), seconds)


@dataclass(frozen=True)
class Indexing:
    """Builds and writes the index of one shard; a task of a job pool."""

    build: webdataset.Build

    def __call__(self, location: Location) -> Generator[int, None, tuple[int, About]]:
        """Yields 1 for the shard; returns its samples, and what is known of it."""
        index = self.build(location)
        storage_io.write(Location(location.url + SUFFIX), cache.encoded(index))
        yield 1
        return index.table.num_rows, index.about


def _is_there(location: Location, kind: str) -> bool:
    """True if a usable index of a shard of this size lies next to it."""
    beside = Location(location.url + SUFFIX)
    try:
        if beside.local is not None:
            about = cache.load(beside.local).about
        else:
            data = storage_io.read(beside, 0, storage_io.size(beside).bytes, twice=True)
            about = cache.decoded(pa.py_buffer(data), Path(beside.name)).about
    except (FileNotFoundError, BadIndex):
        return False
    return about.kind == kind and about.shard_bytes == storage_io.size(location).bytes


def _check_writable(locations: list[Location]) -> None:
    for location in locations:
        if location.scheme in WEB:
            raise UserError(
                f"{location.name}: a web server cannot be written to. Training creates the indexes it needs in "
                "data.cache_dir; or copy the shards to a folder or an object store first",
                code="unsupported",
            )


def _conclude(made: list[tuple[int, About]], count: int, seconds: float) -> int:
    if not made:
        have = "the shard has" if count == 1 else f"all {count:,} shards have"
        print(f"{have} an index; again=true makes {'it' if count == 1 else 'them'} again")
        return errors.DONE
    samples, size = sum(samples for samples, _ in made), format_size(sum(about.shard_bytes for _, about in made))
    had = f"; {count - len(made):,} already had one" if len(made) < count else ""
    print(f"indexed {counted(len(made), 'shard')}: {samples:,} samples, {size}, in {format_duration(seconds)}{had}")
    report = skipped.merged(*(cache.found_in(about) for _, about in made))
    if report:
        print(skip_summary(report))
    return errors.FAILED if any(about.damage for _, about in made) else errors.DONE
