"""Upkeep of caches: rows compared with what the encoders make now, what is not used any more, and its removal."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daguerre import documents, keys
from daguerre.caching import encode
from daguerre.caching.cache import Cache, Wanted
from daguerre.caching.fill import ABOUT, Filling, cut
from daguerre.caching.needed import Known
from daguerre.data.cached import rows
from daguerre.data.cached.rows import Lost, Rows, Writer
from daguerre.data.cached.source import image_digest
from daguerre.data.images.headers import Undecodable
from daguerre.formatting import counted
from daguerre.models import encoders
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location

TOLERANCE = 0.01
"""Largest difference of a row from what is encoded again, as a share of its root mean square: rounding of other devices
and of float16 is below a tenth of it."""


ENCODE = "encoded again by: daguerre cache RECIPE ..."
READ = "found, and encoded again, by: daguerre cache RECIPE ... again=true"
ELSEWHERE = "kept, as the rows are as they were written: encode all of it here by another cache.path=FOLDER"


@dataclass
class Verified:
    """Result of a look at random rows."""

    rows: int = 0
    equal: int = 0
    """Of them, to the bit."""
    largest: float = 0.0
    """Largest difference, as a share of the root mean square."""
    wrong: dict[str, list[str]] = field(default_factory=dict)
    """Faults by what mends them, one of the constants above."""

    def add(self, remedy: str, fault: str) -> None:
        """Notes a fault."""
        self.wrong.setdefault(remedy, []).append(fault)


def verify(filling: Filling, each: Sequence[Wanted], known: Known, count: int, seed: int) -> Verified:
    """Reads and encodes `count` random samples and captions again, and compares."""
    found, cache = Verified(), filling.cache
    for name, half in cache.halves.items():
        for component, known_as in half.told["networks"].items():
            if encoders.identity(filling.parts.family, component, anew=True) != known_as:
                found.add(READ, f"{component}: its files changed, but neither their sizes nor times of change did")
        held = cache.rows(name)
        for shard in [] if held is None else held.damaged:
            found.add(ENCODE, f"{cache.name}/{shard}: a damaged file")
    for name, own in used(filling, each, known).items():
        held = Rows.found(f"{cache.url}/{name}")
        if damaged := len(own & held.lost()):
            found.add(ENCODE, f"{cache.name}/{name}: {counted(damaged, 'damaged row')}")
    with filling.present():
        for one in _drawn([one for one in each if (one.member, one.number) in known], count, seed):
            _verify_sample(filling, one, known, found)
        if (texts := cache.rows("texts")) is not None:
            said = filling.needed.captions(each, known)
            for key in _drawn([*said], count, seed):
                for caption in filling.read_caption(said[key]):
                    made = encode.encode_texts(filling.parts, filling.config.cache, [caption])[0]
                    _compare(texts, key, made, f"the caption {caption.text!r}", found)
    return found


def _drawn(of: Sequence[Any], count: int, seed: int) -> list[Any]:
    order = keys.permutation(seed, "cache verify", 0, len(of))
    return [of[number] for number in order[:count].tolist()]


def _verify_sample(filling: Filling, one: Wanted, known: Known, found: Verified) -> None:
    member, fact = filling.members[one.member], known[one.member, one.number]
    name = member.source.name(one.number)
    try:
        record = member.source.record(one.number)
    except Undecodable:
        return
    digests = {name: image_digest(image) for name, image in record.images.items()}
    changed = [name for name, one in fact.pictures.items() if digests.get(name) != one.digest]
    if changed or dict(record.texts) != dict(fact.texts):
        found.add(READ, f"{name}: changed, but neither its size nor its time of change did")
        return
    if fact.broken or (images := filling.cache.rows("images")) is None:
        return
    for key, crop in cut(record, one, filling.needed.crops(one, fact)).items():
        made = encode.encode_images(filling.parts, filling.config.cache, [crop], [name])[0]
        _compare(images, key, made, name, found)


def _compare(held: Rows, key: bytes, made: rows.Row, name: str, found: Verified) -> None:
    found.rows += 1
    try:
        row = held.read(key)
    except Lost as lost:
        found.add(ENCODE, f"{name}: {lost}")
        return
    if row.keys() != made.keys() or any(row[each].shape != made[each].shape for each in row):
        found.add(ELSEWHERE, f"{name}: has other features than are encoded now")
        return
    found.equal += all(np.array_equal(row[feature], made[feature]) for feature in row)
    for kept, now in ((rows.numbers(row[each]), rows.numbers(made[each])) for each in row):
        off = float(np.abs(kept - now).max() / max(float(np.sqrt(np.square(now).mean())), 1e-12))
        found.largest = max(found.largest, off)
        if off > TOLERANCE:
            found.add(ELSEWHERE, f"{name}: differs by {off:.1%} from what is encoded now")


@dataclass(frozen=True)
class Part:
    """A folder of a cache."""

    name: str
    rows: int
    bytes: int
    used: int
    """Rows that the recipe reads."""
    damaged: int
    """Files."""


def parts(cache: Cache, used: dict[str, set[bytes]]) -> list[Part]:
    """The folders of rows in a cache, and how many of their rows a recipe reads; `used` by folder."""
    found = []
    for name in _folders(cache.url):
        held = Rows.found(f"{cache.url}/{name}")
        own = used.get(name, set())
        size = sum(storage_io.size(held.location(shard)).bytes for shard in held.shards)
        in_use = int(held.has(sorted(own)).sum())
        found.append(Part(name, len(held.keys), size, in_use, len(held.damaged)))
    return found


def _folders(url: str) -> list[str]:
    location = Location(url)
    if location.local is not None:
        return sorted(path.parent.name for path in location.local.glob(f"*/{ABOUT}"))
    return sorted(name.partition("/")[0] for name in rows.files(url, f"/{ABOUT}"))


def used(filling: Filling, each: Iterable[Wanted], known: Known) -> dict[str, set[bytes]]:
    """The keys of all rows that a recipe reads, by folder."""
    each, halves = [*each], filling.cache.halves
    found = {}
    if half := halves.get("images"):
        needed = filling.needed
        found[half.folder] = {key for one in each for key in needed.keys(one, known.get((one.member, one.number)))}
    if half := halves.get("texts"):
        found[half.folder] = {*filling.needed.captions(each, known)}
    return found


def purge(cache: Cache, used: dict[str, set[bytes]], shard_bytes: float) -> None:
    """Removes all rows that are not in `used`, and those that are damaged. A file with rows of both kinds is written
    again without the others, and then removed, so that a kill loses nothing."""
    for name in _folders(cache.url):
        folder = f"{cache.url}/{name}"
        held, own = Rows.found(folder), used.get(name)
        if own is None:
            rows.remove(folder, [*held.shards, ABOUT])
            if (local := Location(folder).local) is not None:
                shutil.rmtree(local)  # with what a kill left half written
            continue
        seen: set[bytes] = set()
        for shard, head in held.heads.items():
            bad = held.damaged_rows[shard]
            whole = ((row, key) for row, key in enumerate(map(_whole, head.keys)) if not bad[row])
            kept = [(row, key) for row, key in whole if key in own and key not in seen]
            seen.update(key for _, key in kept)
            if len(kept) == len(head.keys):
                continue
            writer = Writer(folder, shard_bytes)
            for row, key in kept:
                writer.add(key, held.row(shard, row))
            writer.flush()
            rows.remove(folder, [shard])
        rows.remove(folder, held.damaged)


def _whole(key: np.bytes_) -> bytes:
    """A key with the zeros at its end, which numpy leaves away."""
    return bytes(key).ljust(rows.KEY_BYTES, b"\0")


def about(cache: Cache, name: str) -> str:
    """The networks that a folder of rows is of, for people."""
    location = Location(f"{cache.url}/{name}/{ABOUT}")
    try:
        told = documents.parse(storage_io.read(location, 0, storage_io.size(location).bytes, twice=True))["told"]
        return f"{', '.join(told['networks'])}, cache.dtype={told['dtype']}"
    except (ValueError, LookupError, TypeError):
        return f"what its {ABOUT} no longer says, as that is damaged"
