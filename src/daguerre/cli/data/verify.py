"""`daguerre data verify`: looks for damage in a data set, prints what was found, and says what could not be known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import Field

from daguerre import errors, plugins
from daguerre.cli.data import figures
from daguerre.cli.data.opened import is_far
from daguerre.config import options as config_options
from daguerre.config.options import Request
from daguerre.data import skipped
from daguerre.data.index import cache
from daguerre.data.index.index import Index
from daguerre.data.loading import job_pool
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Source
from daguerre.data.sources import webdataset
from daguerre.data.tools import manifest
from daguerre.data.tools.verify import MISSING, OF_FILES, Found, Unit, Verifier, chosen
from daguerre.errors import UserError
from daguerre.report import dataset_page
from daguerre.settings import Settings
from daguerre.storage.expand import expand
from daguerre.storage.file_cache import default_folder
from daguerre.tracking.console import duration_text
from daguerre.tracking.progress import Counter, size_text

SUMMARY = "look for damage: digests, counts, and a share of the pictures decoded"
HELP = """\
usage: daguerre data verify DATA [share=S] [key=value ...]

Reads the data whole and compares it with what is known of it: shards with their indexes and with the dataset.json of
`data pack`, sample by sample where a shard is not what it was. Decodes all pictures, or of a large set as many as a
laptop decodes in about a minute. Exits with 1 if anything is damaged or missing.

  daguerre data verify my_shards
  daguerre data verify my_pictures share=1
  daguerre data verify "s3://bucket/part-{000..099}.tar" share=0.001

  share=S          share of the pictures that are decoded, from 0 to 1: 1 finds every broken picture. Default: all of
                   20 gigapixels (1,600 photographs of 12 megapixels, 50,000 pictures of 512 x 512), of more so many;
                   0.01 of what is far away
  processes=N      how many work beside each other (as many as cores)
  data.KEY=VALUE   settings of the source, such as data.formats; filters leave nothing out here
"""

_LISTED_SHARDS = 20
_BLOCK_SAMPLES = 512
_MINUTE_PX = 2e10
"""Pixels that four cores of a laptop decode in about a minute."""
_SAMPLE_PX = 1e5
"""What a sample costs beside its pixels, in pixels."""
_UNKNOWN_PX = 2e7
"""What one costs whose size nobody knows before it is fetched."""
_FAR_SHARE = 0.01
_LITTLE_BYTES, _LITTLE_SAMPLES = 300e6, 300
"""What is read, and decoded, sooner than processes start."""
_DAMAGE: tuple[str, ...] = ("broken", "truncated", "cut", "empty file", "not an image", cache.DAMAGED, MISSING)
_DAMAGE += (manifest.ABSENT, manifest.UNFINISHED)
"""Beginnings of the reasons that tell of damage, of those for which a source leaves samples out."""


class Options(Settings):
    """What `verify` takes beside the data."""

    share: float | None = Field(None, ge=0, le=1)
    """Share of the pictures that are decoded. Default: by their number and sizes."""
    processes: int | None = Field(None, ge=1)
    """Processes beside each other."""


@dataclass(frozen=True)
class Subject:
    """A source and what is to be looked at in it."""

    settings: SourceSettings
    source: Source
    units: tuple[Unit, ...]
    files: bool
    """Whether its units are files with digests."""
    left_out: SkipReport
    """What is known to be wrong before anything is read again."""


def run(arguments: list[str]) -> int:
    """Exit code 0, or 1 where anything is damaged or missing."""
    request = config_options.read(arguments, Options)
    for notice in request.notices:
        print(notice)
    sound = True
    for settings in request.settings.sources.values():
        subject = _subject(settings, request)
        with Counter("verifying", sum(len(unit.numbers) for unit in subject.units)) as counter:
            found = list(_found(subject, _processes(subject, request.options), counter))
            seconds = counter.seconds
        sound &= _tell(subject, found, seconds)
    return errors.DONE if sound else errors.FAILED


def _found(subject: Subject, processes: int, counter: Counter) -> Iterator[Found]:
    for step in job_pool.work(Verifier(subject.source, subject.settings), subject.units, processes):
        if isinstance(step, int):
            counter.add(step)
        else:
            yield step.result


def _processes(subject: Subject, options: Options) -> int:
    """As many as were asked for; else one for what is done sooner than others have started."""
    if options.processes is not None:
        return options.processes
    decoded = sum(len(unit.decoded) for unit in subject.units)
    sizes = [0 if unit.place is None or unit.place.local is None else _size(unit.place.local) for unit in subject.units]
    little = sum(sizes) < _LITTLE_BYTES and decoded < _LITTLE_SAMPLES and not is_far(subject.source)
    return 1 if little else job_pool.usual_processes()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _subject(settings: SourceSettings, request: Request[Options]) -> Subject:
    places = expand(settings.path) if isinstance(settings, webdataset.Settings) else []
    cache_dir = Path(settings.cache_dir) if settings.cache_dir else default_folder()
    kind = webdataset.builder(settings).kind if isinstance(settings, webdataset.Settings) else ""
    before = [cache.found(place, kind, cache_dir) for place in places]
    source: Source = plugins.find("sources", settings.source).open_source(settings, "train")
    index = source.index
    if index is None:
        raise UserError(f"{settings.source} draws its pictures: there is nothing to verify")
    share = request.options.share
    picked = chosen(index.ids, _usual_share(source, index) if share is None else share)
    if not places:
        starts = np.arange(0, index.count, _BLOCK_SAMPLES)
        units = [
            _unit(f"samples from {start:,} on", start, start + _BLOCK_SAMPLES, picked) for start in starts.tolist()
        ]
        return Subject(settings, source, tuple(units), False, source.report())
    listed, missing = manifest.shards_beside(places)
    units = []
    for place, path, start, stop in zip(places, before, *_edges(index.shard_starts), strict=True):
        unit = _unit(place.name, start, stop, picked)
        now = path or cache.found(place, kind, cache_dir)
        listed_digest = listed.get(place.url)
        units.append(
            replace(unit, place=place, index=now, indexed_before=path is not None, listed_digest=listed_digest)
        )
    return Subject(settings, source, tuple(units), True, skipped.merged(source.report(), missing))


def _usual_share(source: Source, index: Index) -> float:
    """As many pictures as are decoded in about a minute, by their pixels; the same ones on every machine."""
    if is_far(source):
        return _FAR_SHARE
    pixels = index.heights_px.astype(np.float64) * index.widths_px
    cost = float(np.where(pixels > 0, pixels + _SAMPLE_PX, _UNKNOWN_PX).sum())
    return min(1.0, _MINUTE_PX / max(1.0, cost))


def _edges(starts: np.ndarray) -> tuple[list[int], list[int]]:
    return starts[:-1].tolist(), starts[1:].tolist()


def _unit(name: str, start: int, stop: int, picked: np.ndarray) -> Unit:
    numbers = np.arange(start, min(stop, len(picked)), dtype=np.int64)
    return Unit(name, numbers, numbers[picked[numbers]])


def _tell(subject: Subject, found: Sequence[Found], seconds: float) -> bool:
    """Prints what was found; whether all is well."""
    faults = skipped.merged(*(one.faults or {} for one in found))
    before = {r: entry for r, entry in subject.left_out.items() if not entry.get("kept") and r != cache.DAMAGED}
    if subject.files:
        _tell_files(found)
    samples, decoded = sum(one.samples for one in found), sum(one.decoded for one in found)
    size_bytes = sum(one.bytes or 0 for one in found)
    extent = (
        f"{len(found):,} shard{'s' * (len(found) != 1)}, {samples:,} samples, {size_text(size_bytes)}"
        if subject.files
        else f"{samples:,} samples"
    )
    print(f"{extent}; {_decoded(decoded, samples)}, in {duration_text(seconds)}")
    for line in figures.told(subject.source, subject.settings):
        print(line)
    for title, report in (("found when the data was opened:", before), ("damaged:", faults)):
        if report:
            print(f"{title}\n{skipped.table(report)}")
    unknown = _unknown(subject, found)
    if unknown:
        print(unknown)
    sound = not faults and not any(_is_damage(reason) for reason in before)
    print("nothing is damaged, as far as was looked" if sound else "the data is damaged")
    return sound


def _decoded(decoded: int, samples: int) -> str:
    share = dataset_page.percent(decoded, samples).replace("\N{NO-BREAK SPACE}", " ")
    how = "all" if decoded == samples else f"{share}; share=1 decodes all"
    return f"{decoded:,} picture{'s' * (decoded != 1)} decoded ({how})"


def _is_damage(reason: str) -> bool:
    """Whether what a source leaves out is a sign of damage, and not of what is not meant for it."""
    return reason.startswith(_DAMAGE)


def _tell_files(found: Sequence[Found]) -> None:
    """A line a shard: all of a few, else those with faults only."""
    shown = [one for one in found if one.faults or len(found) <= _LISTED_SHARDS]
    if not shown:
        return
    folder = shared_folder([one.name for one in shown])
    width = max(len("shard"), *(len(one.name) - len(folder) for one in shown))
    if folder:
        print(f"\nin {folder}")
    print(f"{'shard':<{width}}  {'samples':>9}  {'size':>9}")
    for one in sorted(shown, key=lambda one: one.name):
        size = "-" if one.bytes is None else size_text(one.bytes)
        print(f"{one.name.removeprefix(folder):<{width}}  {one.samples:>9,}  {size:>9}  {_state(one)}")
    if len(shown) < len(found):
        print(f"{len(found) - len(shown):,} more shards without faults")
    print()


def shared_folder(names: Sequence[str]) -> str:
    """The folder that all names lie in, with its slash; empty if they lie in several."""
    folders = {name.rpartition("/")[0] + "/" for name in names}
    return folders.pop() if len(folders) == 1 else ""


def _state(one: Found) -> str:
    if not one.faults:
        return "as it was indexed" if one.compared else "readable; nothing to compare it with"
    if MISSING in one.faults:
        return "not there"
    hurt = sum(entry["count"] for reason, entry in one.faults.items() if reason not in OF_FILES)
    return f"DAMAGED: {hurt:,} sample{'s' * (hurt != 1)}" if hurt else "DAMAGED"


def _unknown(subject: Subject, found: Sequence[Found]) -> str:
    """What could not be known, and what would make it known; empty if nothing."""
    alone = sum(1 for one in found if not one.compared)
    if not alone:
        return ""
    if not subject.files:
        return (
            f"not known: whether files are as they once were, as nothing holds digests of them "
            f"(data.source={subject.settings.source}); `daguerre data pack` makes shards that can be verified"
        )
    return (
        f"not known, for {alone:,} of {len(found):,} shards: whether their bytes are what they once were, and whether "
        "whole samples are missing at their end, as they had no index. One was made now, for this machine; "
        "`daguerre data index` makes it beside the shard"
    )
