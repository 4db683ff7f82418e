"""Fills a cache with what is missing in it, by any number of processes, and puts it in place of a run's sources.

Files of rows and of facts are written at once or not at all, and never change: whatever is there after a kill is whole,
and the same command makes the rest.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from daguerre.assembly.parts import Components
from daguerre.caching import encode
from daguerre.caching.cache import Cache, Half, Wanted
from daguerre.caching.encode import Caption
from daguerre.caching.needed import Known, Needed, Said
from daguerre.checkpoint.atomic import to_json
from daguerre.conditions.condition import NO_IMAGES, ConditionSettings, Images
from daguerre.config.config import Config
from daguerre.data.cached import rows, samples, source
from daguerre.data.cached.rows import Rows, Writer
from daguerre.data.cached.samples import Fact, Facts
from daguerre.data.cached.source import CachedSource, image_digest
from daguerre.data.dataset import Dataset, Member
from daguerre.data.images import decode, kinds
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import retrying
from daguerre.data.source import cache_of
from daguerre.errors import UserError
from daguerre.formatting import counted, format_duration, format_size
from daguerre.models import encoders
from daguerre.storage import io as storage_io
from daguerre.types import IMAGE, OF_TEXTS, REFERENCES, Record

_SPEAK_SECONDS = 10.0
_NOTE_SECONDS = 60.0
_READERS = 4
ABOUT = "encoder.json"
"""The file next to an encoder's rows that describes the encoder."""

Say = Callable[[str], None]


@dataclass
class Filling:
    """The work of one process on a cache: what is not in it yet is read, encoded and written."""

    cache: Cache
    config: Config
    parts: Components
    members: Sequence[Member]
    say: Say
    rank: int = 0
    ranks: int = 1
    again: bool = False
    """Reads every sample, whatever is noted of it."""
    examines: bool = False
    """Compares rows with their digests, which reads them all; else a row is there if its key is."""
    encoded: int = 0
    """Rows that were made."""

    def fill(self, each: Sequence[Wanted], barrier: Callable[[], object]) -> Known:
        """Fills the cache for these samples, together with the other ranks, who meet at each `barrier`."""
        before = Facts(self.cache.url).files() if self.again else []
        known = {} if self.again else self.noted(each)
        barrier()
        self._images(each, known)
        barrier()
        if self.rank == 0:
            rows.remove(f"{self.cache.url}/{samples.FOLDER}", before)
        barrier()
        if self.ranks > 1:
            known = self.noted(each) | known
        self._texts(each, known)
        barrier()
        return known

    def noted(self, each: Sequence[Wanted]) -> Known:
        """The facts of samples that have not changed."""
        facts, known = Facts(self.cache.url), self._told(each)
        for number, stamps in enumerate(self._stamps):
            own = [one for one in each if one.member == number]
            if stamps is None or not own:
                continue
            ids = np.array([one.sample_id for one in own], dtype=np.int64)
            places = facts.places(ids, stamps[[one.number for one in own]])
            there = [(one.member, one.number) for one, place in zip(own, places.tolist(), strict=True) if place >= 0]
            known |= zip(there, facts.noted(places[places >= 0]), strict=True)
        return known

    def _told(self, each: Sequence[Wanted]) -> Known:
        """The samples of sources that are a cache alone, which say themselves all that there is to know."""
        known = {}
        for one in each:
            told = self.members[one.member].source
            if isinstance(told, CachedSource) and (fact := told.fact(one.number)) is not None:
                known[one.member, one.number] = fact
        return known

    @cached_property
    def _stamps(self) -> list[np.ndarray | None]:
        return [samples.stamps(own.source, own.settings, self.needed.further) for own in self.members]

    def _images(self, each: Sequence[Wanted], known: Known) -> None:
        """Reads samples that are new, and encodes what is missing of images; adds to what is known."""
        images = self._rows("images")
        lacking = self._lacking(images, each, known) if images else set()
        todo: dict[tuple[int, int], list[Wanted]] = {}
        for one in each:
            of = (one.member, one.number)
            # Where no stamp tells what others have found, each rank reads all.
            reads = of not in known and (self._mine(one) or self._stamps[one.member] is None)
            if reads or (one in lacking and self._mine(one)):
                todo.setdefault(of, []).append(one)
        if not todo:
            return
        self._refuse_alone(todo)
        self._work("images", self._encoded_images(todo, images, known), len(todo))

    def _refuse_alone(self, todo: Iterable[tuple[int, int]]) -> None:
        """UserError where something is missing of a source that is a cache alone."""
        alone = sum(isinstance(self.members[member].source, CachedSource) for member, _ in todo)
        if alone:
            raise UserError(
                f"data.source=cache: {self.cache.name} lacks {alone:,} of the samples that this recipe reads, as it "
                "reads them. It was filled with other weights, another resolution, crop or split, or another "
                "cache.dtype: fill it with this recipe and its images (daguerre cache RECIPE data.path=IMAGES)",
                code="missing",
            )

    def _lacking(self, images: Rows, each: Sequence[Wanted], known: Known) -> set[Wanted]:
        keys = [(one, key) for one in each for key in self.needed.keys(one, known.get((one.member, one.number)))]
        has = self._there(images, [key for _, key in keys])
        return {one for (one, _), there in zip(keys, has.tolist(), strict=True) if not there}

    def _rows(self, name: str) -> Rows | None:
        """The rows of a half as they are now; what is damaged of them is said where they are examined."""
        held = self.cache.rows(name)
        if held is not None and self.examines and (lost := len(held.lost())) and self.rank == 0:
            self.say(f"damaged rows of {name}: {lost:,}; those that this recipe reads are encoded again")
        return held

    def _there(self, held: Rows, keys: Sequence[bytes]) -> np.ndarray:
        """[n] bool: whether there is a row of each key; a damaged row counts as missing where rows are examined."""
        return held.sound(keys) if self.examines else held.has(keys)

    @cached_property
    def needed(self) -> Needed:
        """The rows that samples need."""
        return Needed(self.config, self.parts)

    def _mine(self, one: Wanted) -> bool:
        return one.sample_id % self.ranks == self.rank

    def _encoded_images(
        self, todo: Mapping[tuple[int, int], list[Wanted]], images: Rows | None, known: Known
    ) -> Iterator[list[tuple[bytes, Tensor, str]]]:
        """The crops to encode of one sample after the other, with their keys and its name; notes what was found."""
        facts, made, since = Facts(self.cache.url), set[bytes](), time.monotonic()

        def read(ones: list[Wanted]) -> tuple[Fact, dict[bytes, Tensor]]:
            return self._read(ones, images)

        with ThreadPoolExecutor(_READERS) as readers:
            for of, (fact, crops) in zip(todo, ahead(readers, read, todo.values()), strict=True):
                stamps = self._stamps[of[0]]
                if of not in known and stamps is not None:
                    facts.add(todo[of][0].sample_id, int(stamps[of[1]]), fact)
                known[of] = fact
                name = self.members[of[0]].source.name(of[1]) if crops else ""
                yield [(key, crop, name) for key, crop in crops.items() if key not in made]
                made.update(crops)
                if time.monotonic() - since > _NOTE_SECONDS:
                    facts.flush()
                    since = time.monotonic()
        facts.flush()

    def _read(self, ones: list[Wanted], images: Rows | None) -> tuple[Fact, dict[bytes, Tensor]]:
        """The facts of a sample, and crops of it that are missing in the cache by their keys."""
        first = ones[0]
        try:
            record = retrying(self.members[first.member].source.record, first.number)
        except Undecodable as error:
            return Fact(b"", 0, 0, {}, str(error)), {}
        image = record.images[IMAGE]
        crops: dict[bytes, Tensor] = {}
        digest = image_digest(image)
        fact = Fact(digest, 0, 0, record.texts, "")
        for one in ones:
            try:
                pixels_HWC, size = decode.sized(image, one.settings, one.bucket)
                fact = fact._replace(height=size[0], width=size[1], further=self.needed.pictures(record, one.settings))
                if images is not None and self._mine(one):
                    wanted = self.needed.crops(one, fact)
                    has = self._there(images, [*wanted])
                    absent = [key for key, there in zip(wanted, has.tolist(), strict=True) if not there]
                    crops |= cut(record, one, {key: wanted[key] for key in absent}, {IMAGE: pixels_HWC})
            except Undecodable as error:
                return Fact(digest, 0, 0, record.texts, str(error)), {}
        return fact, crops

    def _texts(self, each: Sequence[Wanted], known: Known) -> None:
        """Encodes the captions that are missing, each once."""
        if (texts := self._rows("texts")) is None:
            return
        said = self.needed.captions(each, known)
        has = dict(zip(said, self._there(texts, [*said]).tolist(), strict=True))
        todo = [key for key in said if not has[key] and int.from_bytes(key[:8], "little") % self.ranks == self.rank]
        if not todo:
            return
        of = (said[key].of for key in todo)
        self._refuse_alone((one.member, one.number) for one in of if one is not None)
        self._work(
            "texts", ([(key, caption, "") for caption in self.read_caption(said[key])] for key in todo), len(todo)
        )

    def read_caption(self, said: Said) -> list[Caption]:
        """A caption with the reference images that it is read with; none where these cannot be read."""
        if said.of is None:
            return [Caption(said.text)]
        try:
            record = retrying(self.members[said.of.member].source.record, said.of.number)
            return [self.needed.caption(said.text, record, said.of.settings)]
        except Undecodable:
            return []

    def _work(self, name: str, groups: Iterator[list[tuple[bytes, Any, str]]], count: int) -> None:
        """Encodes what comes in groups, one a sample, and writes it."""
        half = self.cache.halves.get(name)
        act: Any = encode.encode_images if name == "images" else encode.encode_texts
        settings = self.config.cache
        folder = "" if half is None else f"{self.cache.url}/{half.folder}"
        writer, started = Writer(folder, settings.shard_mb * 1e6), time.monotonic()
        waiting: dict[Any, list[tuple[bytes, Any, str]]] = {}
        with self.present() if half else nullcontext():
            if half is not None:
                self._describe(half)
            spoken, samples_written = started, 0
            for done, group in enumerate(groups, 1):
                samples_written += bool(group)
                for one in group:
                    alike = waiting.setdefault(getattr(one[1], "shape", None), [])
                    alike.append(one)
                    if len(alike) == settings.batch_size:
                        self._write(writer, act, alike)
                if (now := time.monotonic()) - spoken > _SPEAK_SECONDS:
                    left = (now - started) / done * (count - done)
                    self.say(f"caching {name}: {done:,} of {count:,}; about {format_duration(left)} left")
                    spoken = now
            for alike in waiting.values():
                self._write(writer, act, alike)
            writer.flush()
        self.encoded += writer.rows
        if writer.rows:
            took = format_duration(time.monotonic() - started)
            # A sample may need a row for each crop, and for its mirror image.
            rows = "" if writer.rows == samples_written else f" in {counted(writer.rows, 'row')}"
            self.say(f"cached {name}: {samples_written:,}{rows} ({format_size(writer.size_bytes)}) in {took}")

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within the block the encoders have their weights, and the denoiser makes room for them."""
        family, device = self.parts.family, self.parts.device
        with (
            encoders.aside(encoders.denoisers(family)),
            encoders.present(family, device, self.cache.components, stays=True),
        ):
            yield

    def _describe(self, half: Half) -> None:
        """Writes what made the rows of a folder next to them."""
        document = {"half": half.name, "key": half.key, "told": half.told}
        storage_io.write(f"{self.cache.url}/{half.folder}/{ABOUT}", to_json(json.loads(json.dumps(document))))

    def _write(self, writer: Writer, act: Callable[..., list[rows.Row]], alike: list[tuple[bytes, Any, str]]) -> None:
        if alike:
            keys, values, names = zip(*alike, strict=True)
            for key, row in zip(keys, act(self.parts, self.config.cache, values, names), strict=True):
                writer.add(key, row)
            alike.clear()


def cut(
    record: Record,
    one: Wanted,
    wanted: Mapping[bytes, tuple[str, Frame]],
    decoded: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> dict[bytes, Tensor]:
    """The wanted parts of a sample's images, some of which are `decoded`. `Undecodable`."""
    whole = {**decoded}
    for name in {name for name, _ in wanted.values()} - decoded.keys():
        with kinds.named(name):
            # As the loader decodes them: much larger JPEGs are made smaller for the frame of a bucket, not for others.
            bucket = None if name in REFERENCES else one.bucket
            whole[name], _ = decode.sized(record.images[name], one.settings, bucket)
    return {key: frame.apply(whole[name]) for key, (name, frame) in wanted.items()}


def ahead(pool: ThreadPoolExecutor, act: Callable[[Any], Any], given: Iterable[Any]) -> Iterator[Any]:
    """`act` of each, in order, some of them begun before they are asked for."""
    waiting: deque[Any] = deque()
    for one in given:
        waiting.append(pool.submit(act, one))
        if len(waiting) > 2 * _READERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@dataclass(frozen=True)
class Filled:
    """A cache that has all that a run reads."""

    cache: Cache
    known: Known
    encoded: int
    """Rows that this process made."""
    shapes: tuple[tuple[tuple[int, int], source.Shapes], ...]
    further: tuple[str, ...] = ()
    """Further images of samples that are encoded, too."""
    pictured: bool = False
    """Whether captions are read with the reference images."""

    def _reads(self, name: str) -> bool:
        """True for a further image whose pixels are read, as not all is cached that is made of them."""
        halves = self.cache.halves
        return "images" not in halves or (name in REFERENCES and self.pictured and "texts" not in halves)

    def of(
        self,
        dataset: Dataset,
        images: Images = NO_IMAGES,
        mend: source.Mend | None = None,
        columns: tuple[str, ...] = (),
    ) -> Dataset:
        """The data set with cached features, in place of what they are made of; `images` are further ones, and
        `columns` numbers of the metadata that are asked for. `mend` encodes rows again that are damaged when they are
        read."""
        computes = any(isinstance(condition, ConditionSettings) for condition in images.values())
        reads = [IMAGE] if computes or "images" not in self.cache.halves else []
        reads += [name for name in kinds.stored(images) if name not in self.further or self._reads(name)]
        members = []
        for number, own in enumerate(dataset.members):
            inner = None if isinstance(own.source, CachedSource) else own.source
            if inner is None and reads:
                raise UserError(
                    f"data.source=cache: a cache alone has no {', '.join(reads)}, which this recipe reads: give the "
                    "source that it was filled from",
                    code="conflict",
                )
            made = CachedSource(
                inner, self._table(number, own), own.settings, images=self.cache.rows("images"),
                texts=self.cache.rows("texts"), reads=tuple(reads), shapes=self.shapes, mend=mend, columns=columns,
                further=self.further, pictured=self.pictured,
            )  # fmt: skip
            members.append(own._replace(source=made, remote=own.remote if reads else None))
        return replace(dataset, members=tuple(members))

    def _table(self, number: int, own: Member) -> Path:
        if isinstance(own.source, CachedSource):
            return own.source.table
        data = self._contents(number, own)
        path = cache_of(own.settings).folder / source.SETS / f"{xxhash.xxh3_128_hexdigest(data)}.index"
        if not path.exists():
            storage_io.write(path, data)
        return path

    def _contents(self, number: int, own: Member) -> bytes:
        facts = {sample: fact for (member, sample), fact in self.known.items() if member == number}
        assert own.source.index is not None
        return source.table(own.source, own.source.index, facts, own.settings.source)

    def publish(self, members: Sequence[Member]) -> None:
        """Puts the list of samples into the cache, which then is a source by itself."""
        for number, own in enumerate(members):
            if not isinstance(own.source, CachedSource):
                told = f"{own.settings.source} {getattr(own.settings, 'path', '')} {getattr(own.settings, 'name', '')}"
                name = xxhash.xxh3_64_hexdigest(told.encode())
                storage_io.write(f"{self.cache.url}/{source.SETS}/{name}.index", self._contents(number, own))


def filled(filling: Filling, each: Sequence[Wanted], barrier: Callable[[], object] = lambda: None) -> Filled:
    """Fills a cache. UserError where it cannot be."""
    known = filling.fill(each, barrier)
    shapes = _shapes(filling, each, known)
    found = Filled(filling.cache, known, filling.encoded, shapes, filling.needed.further, filling.needed.pictured)
    if filling.rank == 0:
        found.publish(filling.members)
    return found


def _shapes(
    filling: Filling, each: Sequence[Wanted], known: Known
) -> tuple[tuple[tuple[int, int], source.Shapes], ...]:
    """Shape and type of features in each bucket, from the first row of it."""
    images, texts = filling.cache.rows("images"), filling.cache.rows("texts")
    of_text = {} if texts is None else _fields(texts, next(iter(filling.needed.captions(each, known)), None), OF_TEXTS)
    found: dict[tuple[int, int], source.Shapes] = {}
    for one in each:
        shape = (one.bucket.height_px, one.bucket.width_px)
        fact = known.get((one.member, one.number))
        crops = {} if shape in found or fact is None else filling.needed.crops(one, fact)
        if crops:
            # Also stand for those of samples that cannot be read, so one of each further image that all have.
            spare = filling.needed.spare
            names = {name: key for key, (name, _) in reversed(crops.items()) if name not in spare}
            of_images = [] if images is None else [_fields(images, key, f"{name}.") for name, key in names.items()]
            found[shape] = {**of_text, **{name: told for each in of_images for name, told in each.items()}}
    return tuple(found.items())


def _fields(held: Rows, key: bytes | None, half: str) -> source.Shapes:
    return {} if key is None else {half + name: told for name, told in held.shapes(key).items()}
