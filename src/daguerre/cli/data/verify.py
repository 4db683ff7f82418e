"""Look for damage: digests, counts, and a share of the images decoded.

usage: daguerre data verify DATA [share=S] [key=value ...]

Reads the data whole and compares it with what is known of it: shards with their indexes and with the dataset.json of
`data pack`, sample by sample where a shard is not what it was. Decodes all images, or of a large set as many as a
laptop decodes in about a minute. Exits with 1 if anything is damaged or missing.

  daguerre data verify my_shards
  daguerre data verify my_images share=1
  daguerre data verify "s3://bucket/part-{000..099}.tar" share=0.001

  share=S          share of the images that are decoded, from 0 to 1: 1 finds every broken image. Default: all of
                   20 gigapixels (1,600 photographs of 12 megapixels, 50,000 images of 512 x 512), of more so many;
                   0.01 of remote data
  processes=N      worker processes (as many as cores)
  data.KEY=VALUE   settings of the source, such as data.formats; filters leave nothing out here
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from pydantic import Field

from daguerre import errors, plugins
from daguerre.cli.data import figures
from daguerre.cli.data.opened import is_remote
from daguerre.config import options as config_options
from daguerre.config.options import Request
from daguerre.data import skipped
from daguerre.data.index import cache
from daguerre.data.index.index import Index
from daguerre.data.loading import job_pool
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Source, cache_of
from daguerre.data.sources import webdataset
from daguerre.data.tools import manifest
from daguerre.data.tools.verify import MISSING, OF_FILES, Found, Unit, Verifier, chosen
from daguerre.errors import UserError
from daguerre.formatting import counted, format_duration, format_size, percent
from daguerre.settings import Settings
from daguerre.storage.expand import expand
from daguerre.tracking.progress import Counter

_LISTED_SHARDS = 20
_BLOCK_SAMPLES = 512
_MINUTE_PX = 2e10
"""Pixels that four cores of a laptop decode in about a minute."""
_SAMPLE_PX = 1e5
"""Cost of a sample in addition to its pixels, in pixels."""
_UNKNOWN_PX = 2e7
"""Cost of a sample whose size is not known before it is fetched."""
_REMOTE_SHARE = 0.01
_LITTLE_BYTES, _LITTLE_SAMPLES = 300e6, 300
"""Read, and decoded, before worker processes have started."""
_DAMAGE: tuple[str, ...] = ("broken", "truncated", "cut", "empty file", "not an image", cache.DAMAGED, MISSING)
_DAMAGE += (manifest.ABSENT, manifest.UNFINISHED, manifest.DAMAGED, manifest.WITHOUT_SHARD)
"""Starts of the reasons that mean damage, among those for which a source leaves samples out."""


class Options(Settings):
    """Options of `verify`, as the help has them."""

    share: float | None = Field(None, ge=0, le=1)
    processes: int | None = Field(None, ge=1)


@dataclass(frozen=True)
class Subject:
    """A source and the units of it to verify."""

    settings: SourceSettings
    source: Source
    units: tuple[Unit, ...]
    files: bool
    """True if its units are files with digests."""
    left_out: SkipReport
    """Known to be wrong before anything is read again."""


def run(arguments: list[str]) -> int:
    """Exit code 0, or 1 where anything is damaged or missing."""
    request = config_options.read(arguments, Options)
    for notice in request.notices:
        print(notice)
    sound = True
    for settings in request.settings.sources.values():
        subject = _subject(settings, request)
        with Counter("verifying", sum(len(unit.numbers) for unit in subject.units)) as counter:
            verifier = Verifier(subject.source, subject.settings)
            steps = job_pool.run_jobs(verifier, subject.units, _processes(subject, request.options))
            found = list(job_pool.results(steps, counter.add))
            seconds = counter.seconds
        sound &= _report(subject, found, seconds)
    return errors.DONE if sound else errors.FAILED


def _processes(subject: Subject, options: Options) -> int:
    """As many as were asked for; else one for what is done before others have started."""
    if options.processes is not None:
        return options.processes
    decoded = sum(len(unit.decoded) for unit in subject.units)
    paths = [
        unit.location.local for unit in subject.units if unit.location is not None and unit.location.local is not None
    ]
    size_bytes = sum(path.stat().st_size for path in paths if path.exists())
    little = size_bytes < _LITTLE_BYTES and decoded < _LITTLE_SAMPLES and not is_remote(subject.source)
    return 1 if little else job_pool.usual_processes()


def _subject(settings: SourceSettings, request: Request[Options]) -> Subject:
    locations = expand(settings.path) if isinstance(settings, webdataset.Settings) else []
    cache_dir = cache_of(settings).folder
    kind = webdataset.builder(settings).kind if isinstance(settings, webdataset.Settings) else ""
    before = [cache.found(location, kind, cache_dir) for location in locations]
    source: Source = plugins.find("sources", settings.source).open_source(settings, "train")
    index = source.index
    if index is None:
        raise UserError(f"{settings.source} generates its images: there are no files to verify", code="unsupported")
    share = request.options.share
    picked = chosen(index.ids[:], _usual_share(source, index) if share is None else share)
    if not locations:
        starts = range(0, index.count, _BLOCK_SAMPLES)
        units = [_unit(f"samples from {start:,} on", start, start + _BLOCK_SAMPLES, picked) for start in starts]
        return Subject(settings, source, tuple(units), False, source.report())
    listed, missing = manifest.shards_in_folder(locations)
    files = []
    for location, path, (start, stop) in zip(locations, before, pairwise(index.shard_starts.tolist()), strict=True):
        now = path or cache.found(location, kind, cache_dir)
        unit = _unit(location.name, start, stop, picked)
        unit = replace(unit, location=location, index=now, indexed_before=path is not None)
        files.append(replace(unit, listed_digest=listed.get(location.url)))
    return Subject(settings, source, tuple(files), True, skipped.merged(source.report(), missing))


def _usual_share(source: Source, index: Index) -> float:
    """The share that is decoded in about a minute, by the images' pixels; the same on every machine."""
    if is_remote(source):
        return _REMOTE_SHARE
    pixels = index.heights_px[:].astype(np.float64) * index.widths_px[:]
    cost = float(np.where(pixels > 0, pixels + _SAMPLE_PX, _UNKNOWN_PX).sum())
    return min(1.0, _MINUTE_PX / max(1.0, cost))


def _unit(name: str, start: int, stop: int, picked: np.ndarray) -> Unit:
    numbers = np.arange(start, min(stop, len(picked)), dtype=np.int64)
    return Unit(name, numbers, numbers[picked[numbers]])


def _report(subject: Subject, found: Sequence[Found], seconds: float) -> bool:
    """Prints what was found; False if anything is damaged."""
    faults = skipped.merged(*(one.faults or {} for one in found))
    before = {r: entry for r, entry in subject.left_out.items() if not entry.get("kept") and r != cache.DAMAGED}
    if subject.files:
        _report_files(found)
    samples, decoded = sum(one.samples for one in found), sum(one.decoded for one in found)
    extent = f"{samples:,} samples"
    if subject.files:
        extent = f"{counted(len(found), 'shard')}, {extent}, {format_size(sum(one.bytes or 0 for one in found))}"
    share = percent(decoded, samples).replace("\N{NO-BREAK SPACE}", " ")
    how = "all" if decoded == samples else f"{share}; share=1 decodes all"
    print(f"{extent}; {counted(decoded, 'image')} decoded ({how}), in {format_duration(seconds)}")
    for line in figures.summary(subject.source, subject.settings, bool(faults)):
        print(line)
    for title, report in (("found when the data was opened:", before), ("damaged:", faults)):
        if report:
            print(f"{title}\n{skipped.table(report)}")
    for other in subject.left_out.get(manifest.NOT_OURS, {"examples": ()})["examples"]:
        print(f"not compared: {other}: {manifest.NOT_OURS}")
    if unknown := _unknown(subject, found):
        print(unknown)
    sound = not faults and not any(reason.startswith(_DAMAGE) for reason in before)
    print("no damage found in what was checked" if sound else "the data is damaged")
    return sound


def _report_files(found: Sequence[Found]) -> None:
    """Prints a line a shard: all of a few, else those with faults only."""
    shown = [one for one in found if one.faults or len(found) <= _LISTED_SHARDS]
    if not shown:
        return
    folders = {one.name.rpartition("/")[0] + "/" for one in shown}
    folder = folders.pop() if len(folders) == 1 else ""
    width = max(len("shard"), *(len(one.name) - len(folder) for one in shown))
    if folder:
        print(f"\nin {folder}")
    print(f"{'shard':<{width}}  {'samples':>9}  {'size':>9}")
    for one in sorted(shown, key=lambda one: one.name):
        size = "-" if one.bytes is None else format_size(one.bytes)
        print(f"{one.name.removeprefix(folder):<{width}}  {one.samples:>9,}  {size:>9}  {_state(one)}")
    if len(shown) < len(found):
        print(f"{len(found) - len(shown):,} more shards without faults")
    print()


def _state(one: Found) -> str:
    if not one.faults:
        return "matches its index" if one.compared else "readable; no digest to compare it with"
    if MISSING in one.faults:
        return "not there"
    damaged = sum(entry["count"] for reason, entry in one.faults.items() if reason not in OF_FILES)
    return f"DAMAGED: {counted(damaged, 'sample')}" if damaged else "DAMAGED"


def _unknown(subject: Subject, found: Sequence[Found]) -> str:
    """A note on what could not be known, and what would make it known; empty if there is nothing."""
    alone = sum(1 for one in found if not one.compared)
    if not alone:
        return ""
    if not subject.files:
        return (
            "not checked: whether files changed since they were created, because no digests are stored "
            f"(data.source={subject.settings.source}); `daguerre data pack` writes shards that can be verified"
        )
    return (
        f"not known, for {alone:,} of {len(found):,} shards: whether their bytes are what they once were, and whether "
        "whole samples are missing at their end, as they had no index. One was made now, for this machine; "
        "`daguerre data index` makes it next to the shard"
    )
