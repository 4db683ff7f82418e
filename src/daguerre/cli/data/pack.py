"""Write a data set into tar shards.

usage: daguerre data pack DATA -o FOLDER_OR_URL [key=value ...]

Writes the samples of a data set that its filters pass into tar shards with an index next to each, and a summary,
dataset.json. Image files are copied byte for byte; images that a source makes become PNG. Each sample keeps its id, so
that training on the shards draws the same random numbers as training on the data. The same command again goes on where
it was stopped: finished shards are checked and kept.

  daguerre data pack my_images -o my_shards
  daguerre data pack photos.parquet -o s3://bucket/photos shard_mb=512
  daguerre data pack "raw/{00000..00099}.tar" -o clean data.filters="pwatermark < 0.5 and original_width >= 512"
  daguerre data pack quickstart -o shapes count=10000

  -o FOLDER or out=FOLDER   where to; also s3:// and gs://
  shard_mb=N                size of a shard, about, in MB (256)
  shard_samples=N           or the number of its samples
  count=N                   the first N samples only; an endless source needs it
  order=shuffled            in random order, by the seed: for sets that are sorted by class or date
  processes=N               worker processes (as many as cores)
  data.KEY=VALUE            settings of the source, filters among them, as in training
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from daguerre import errors, keys
from daguerre.checkpoint.atomic import locked
from daguerre.cli.data.opened import is_remote, opened
from daguerre.config import options as config_options
from daguerre.config.options import Request
from daguerre.data.loading import job_pool
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Source
from daguerre.data.tools import pack
from daguerre.data.tools.manifest import Listing, given
from daguerre.data.tools.pack import Packer, Shard
from daguerre.errors import Held, UserError
from daguerre.formatting import counted, format_duration, format_size
from daguerre.settings import ADDRESS, Settings
from daguerre.tracking.progress import Counter, skip_summary

_USUAL_MB = 256.0
_LITTLE_BYTES = 64e6
"""Packed before worker processes have started."""


class Options(Settings):
    """Options of `pack`, as the help has them."""

    out: Annotated[str | None, ADDRESS] = None
    shard_mb: float | None = Field(None, gt=0)
    shard_samples: int | None = Field(None, ge=1)
    count: int | None = Field(None, ge=1)
    order: Literal["source", "shuffled"] = "source"
    processes: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_size(self) -> Options:
        if self.shard_mb is not None and self.shard_samples is not None:
            raise ValueError("shard_mb and shard_samples both set the size of a shard: give only one of them")
        return self


@dataclass(frozen=True)
class Chosen:
    """The samples to pack."""

    source: Source
    """Prepared to read them."""
    numbers: np.ndarray
    """[M] int64: records, in the order of packing."""
    ids: np.ndarray
    """[M] int64."""
    mean_bytes: float
    """Of a sample in a shard, estimated."""
    examined: int
    """Samples of the source."""
    left_out: SkipReport
    """By the source when it was opened, and by the filters."""


def run(arguments: list[str]) -> int:
    """Exit code 0 once every shard is there."""
    request = config_options.read(arguments, Options)
    to = _target(request.options.out)
    for notice in request.notices:
        print(notice)
    chosen = choose(request)
    with _alone(to):
        started = time.monotonic()
        fitting = round((request.options.shard_mb or _USUAL_MB) * 1e6 / max(1.0, chosen.mean_bytes))
        samples_per_shard = request.options.shard_samples or max(1, fitting)
        shards = pack.shards(chosen.numbers, samples_per_shard)
        listing = Listing(to, _about(request, chosen, samples_per_shard), len(shards))
        listing.take_over()
        little = chosen.mean_bytes * len(chosen.numbers) < _LITTLE_BYTES and not is_remote(chosen.source)
        kept = _pack(chosen, request, shards, listing, 1 if little else job_pool.usual_processes())
        listing.save(complete=True)
        _remove_unfinished(to)
    _conclude(listing, kept, time.monotonic() - started)
    return errors.DONE


def choose(request: Request[Options]) -> Chosen:
    """Opens the source and applies its filters. UserError if nothing is left, or an endless source has no `count`."""
    options, (settings, *others) = request.options, request.settings.sources.values()
    if others:
        raise UserError(
            "data.sources: only one source can be packed at a time; name it as a path or in a recipe",
            code="unsupported",
            setting="data.sources",
        )
    data = opened(settings)
    if data.index is None:
        if options.count is None:
            what = f"count: {settings.source} is endless; set how many samples to pack, such as count=10000"
            raise UserError(what, code="missing", setting="count")
        if options.order == "shuffled":
            what = f"order: {settings.source} is endless, so there is no order to change: remove it"
            raise UserError(what, code="unused", setting="order")
        numbers = np.arange(options.count, dtype=np.int64)
        ids = np.array([data.source.sample_id(number) for number in numbers.tolist()], dtype=np.int64)
        mean_bytes = pack.mean_bytes(data.source, numbers, settings.formats)
        return Chosen(data.source, numbers, ids, mean_bytes, len(numbers), {})
    numbers = np.flatnonzero(data.passes)
    if options.order == "shuffled":
        numbers = numbers[keys.permutation(request.seed, "pack", 0, len(numbers))]
    numbers = numbers[: options.count]
    # By the source as it was opened, which reads ranges of remote shards and fetches none of them whole.
    mean_bytes = pack.mean_bytes(data.source, np.sort(numbers), settings.formats)
    ids = data.index.ids[numbers]
    return Chosen(data.reading(numbers), numbers, ids, mean_bytes, data.index.count, data.left_out)


def _pack(chosen: Chosen, request: Request[Options], shards: Sequence[Shard], listing: Listing, processes: int) -> int:
    """Writes all shards; returns how many of them were there already."""
    kept = 0
    packer = Packer(chosen.source, request.settings.formats, listing.to, tuple(listing.done.values()))
    with Counter("packing", len(chosen.numbers)) as counter:
        steps = job_pool.run_jobs(packer, shards, request.options.processes or processes)
        for packed, was_there in job_pool.results(steps, counter.add):
            kept += was_there
            listing.add(packed)
    return kept


def _about(request: Request[Options], chosen: Chosen, samples_per_shard: int) -> dict[str, Any]:
    (settings,) = request.settings.sources.values()
    how = f"{settings.formats} {samples_per_shard}"
    return {
        "fingerprint": pack.fingerprint(chosen.ids, how),
        "samples_per_shard": samples_per_shard,
        "order": request.options.order,
        "source": given(settings),
        "samples_of_source": chosen.examined,
        "left_out": chosen.left_out,
    }


def _target(out: str | None) -> str:
    if not out:
        raise UserError(
            "no output given. Pass a folder or the address of an object store, such as -o my_shards",
            code="missing",
            setting="out",
        )
    out = out.removeprefix("file://")
    if "://" not in out:
        return str(Path(out).expanduser().absolute())
    if not out.startswith(("s3://", "gs://")):
        raise UserError(f"out={out}: shards are written to a folder, s3:// or gs://", setting="out")
    return out.rstrip("/")


@contextmanager
def _alone(to: str) -> Iterator[None]:
    """Holds the folder, so that two commands do not write into it at once. Stores have no such lock."""
    if "://" in to:
        yield
        return
    Path(to).mkdir(parents=True, exist_ok=True)
    with locked(Path(to), wait=False) as held:
        if not held:
            raise Held(f"another process is packing into {to}: wait for it, or choose another folder")
        yield


def _remove_unfinished(to: str) -> None:
    """Removes files that a kill left half written."""
    if "://" not in to:
        for path in (*Path(to).glob(".shard-*.tar.tmp"), *Path(to).glob("shard-*.tar.index.*.part")):
            path.unlink()


def _conclude(listing: Listing, kept: int, seconds: float) -> None:
    document = listing.document(complete=True)
    if kept == listing.number:
        print(f"{listing.to}: all {kept:,} shards already exist and are complete; nothing was written")
    else:
        there = f"; {kept:,} already existed and are complete" if kept else ""
        print(
            f"packed {document['samples']:,} samples into {counted(listing.number, 'shard')} "
            f"({format_size(document['bytes'])}) in {format_duration(seconds)}{there}"
        )
    if left_out := listing.left_out():
        print(skip_summary(left_out))
    location = f"{listing.to.rstrip('/')}/" if "://" in listing.to else listing.to
    print(f"train on them with: data.source=webdataset data.path={shlex.quote(location)}")
