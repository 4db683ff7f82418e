"""Micro-batches of given samples: read, decoded and captioned. Planning and counting is `data/loading/loader.py`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from daguerre import keys
from daguerre.conditions import condition as conditions
from daguerre.conditions.condition import Images
from daguerre.data import captions
from daguerre.data.alternatives import SEVERAL_LINES
from daguerre.data.cached import rows
from daguerre.data.cached.rows import BFLOAT16
from daguerre.data.dataset import Member, ReadRequest, number_of
from daguerre.data.images import decode, references
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.images.kinds import KINDS
from daguerre.data.plan.buckets import Bucket
from daguerre.data.plan.selection import no_number
from daguerre.data.settings import DataSettings
from daguerre.data.skipped import Failure
from daguerre.data.source import FeatureSource, MendingSource
from daguerre.errors import UserError
from daguerre.types import IMAGE, REFERENCES, SEEN, TARGETS, Batch, Features, Record, References

Read = TypeVar("Read")
Row = Mapping[str, np.ndarray]
"""Features of a sample by name."""
Layout = tuple[tuple[int, int], ...]
"""Heights and widths of a sample's reference images, in their order."""
_MASK = "_mask"
ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.2


class Task(NamedTuple):
    """A micro-batch to collate; or, where `largest` is set, the samples of an update, which become several
    (`layouts.py`)."""

    reads: ReadRequest
    bucket: Bucket
    largest: int = 0
    """Most samples of one of several micro-batches."""
    max_pixels: int | None = None
    """Most pixels of one of them with its reference images, if it has more than one sample."""

    def at(self, rows: Sequence[int]) -> "Task":
        """The task of these samples alone."""
        return self._replace(reads=self.reads.at(rows))


Collated = tuple[Batch, list[Failure]]


_REFERENCES = {*REFERENCES, *SEEN.values()}
"""Names of reference images and of their copies."""


class Sample(NamedTuple):
    """One sample as it goes into a batch."""

    frames: Mapping[str, Frame]
    images: Mapping[str, Tensor]
    features: Mapping[str, np.ndarray]
    numbers: Mapping[str, float]


def absent(images: Images, size: int, bucket: Bucket, largest: Bucket | None = None) -> dict[str, Tensor]:
    """The images by name of samples that have none, [B, C, H, W] uint8 each; of reference images the least number that
    the family reads, but one at least, about as large as the bucket; or the most, each of the `largest` picture."""
    scenes = [name for name in images if name not in REFERENCES]
    found = {name: _empty(size, bucket, KINDS[name].channels, KINDS[name].absent or 0) for name in scenes}
    rule = conditions.references(images)
    if rule is None:
        return found
    return found | _blank(rule, rule.most if largest else max(1, rule.least), size, largest or bucket)


def largest_reference(images: Images, data: DataSettings, bucket: Bucket) -> Bucket | None:
    """The largest picture that may be a reference image of a sample of this bucket; None where none is read.
    References keep the size of their pictures, up to the most that the family takes; sources that draw their own draw
    them as large as the image."""
    rule = conditions.references(images)
    if rule is None or all(REFERENCES[0] in own.made for own in data.sources.values()):
        return bucket if rule else None
    side = isqrt(rule.of(rule.most).max_px)
    return Bucket(side, side)


def _blank(rule: References, count: int, size: int, bucket: Bucket) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for rules, names in ((rule.of(count), {name: name for name in REFERENCES}), (rule.seen, SEEN)):
        if rules is not None:
            frame = references.frame((bucket.height_px, bucket.width_px), rules)
            one = Bucket(frame.height_px, frame.width_px)
            found |= {names[name]: _empty(size, one, 3) for name in REFERENCES[:count]}
    return found


def _empty(size: int, bucket: Bucket, channels: int, value: int = 0) -> Tensor:
    # Filled by numpy: a large torch operation here would start a second team of OpenMP threads beside the trainer's,
    # and with more threads than cores OpenMP's waits fall asleep (measured: 1.5 times slower training on two cores).
    # Channels stand last in memory, as decoders give them and networks are fastest with.
    shape = (size, bucket.height_px, bucket.width_px, channels)
    pixels_BHWC = np.full(shape, value, dtype=np.uint8) if value else np.zeros(shape, dtype=np.uint8)
    return torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2)


class _Rows:
    """A micro-batch in the making: each sample is copied to its row as soon as it is cut, as what it was cut from may
    be many times larger."""

    def __init__(self, size: int, bucket: Bucket, images: Images, columns: Sequence[str], lacking: Row) -> None:
        self._cached = {name.partition(".")[0] for name in lacking}  # whose pixels are not read
        pixels = {} if IMAGE in self._cached else {IMAGE: _empty(size, bucket, 3)}
        self._rule, self._lacking, self._bucket = conditions.references(images), lacking, bucket
        scenes = {name: asked for name, asked in images.items() if name not in (*REFERENCES, *self._cached)}
        self.images = pixels | absent(scenes, size, bucket)
        self.features: list[Row] = [{} for _ in range(size)]
        self.texts = [""] * size
        self.sizes = np.zeros((size, 6), dtype=np.int32)
        self.sizes[:, 4:] = bucket.height_px, bucket.width_px
        self.sizes_of = {name: self.sizes.copy() for name in images if name in TARGETS}
        self.columns = {name: np.zeros(size, dtype=np.float32) for name in columns}

    def put(self, row: int, sample: Sample) -> None:
        """Fills a row. Reference images have the sizes of those of the first sample."""
        for name, pixels_CHW in sample.images.items():
            if name in _REFERENCES and name not in self.images:
                _, height, width = pixels_CHW.shape
                self.images[name] = _empty(len(self.texts), Bucket(height, width), 3)
            if name in self.images:
                self.images[name].permute(0, 2, 3, 1).numpy()[row] = pixels_CHW.numpy().transpose(1, 2, 0)
        self.features[row] = sample.features
        self.sizes[row] = sample.frames[IMAGE].sizes
        for name, own in self.sizes_of.items():
            own[row] = sample.frames[name].sizes
        for name, value in sample.numbers.items():
            self.columns[name][row] = value

    def batch(self, reads: ReadRequest, names: list[str], failures: list[Failure], weights_B: Tensor | None) -> Batch:
        """The batch, once all rows are filled that can be."""
        size = len(names)
        # No sample says how many references there are.
        if self._rule is not None and len(failures) == size and REFERENCES[0] not in self._cached:
            self.images |= _blank(self._rule, self._rule.least, size, self._bucket)
        features = {name: tensor_of(array) for name, array in stacked(self.features, self._lacking).items()}
        columns = {name: torch.from_numpy(array) for name, array in self.columns.items()}
        return Batch(
            reads.keys, self.images, self.texts, valid_B(size, failures), names, self.sizes, {}, weights_B, features,
            self.sizes_of, columns,
        )  # fmt: skip


@dataclass(frozen=True)
class Collator:
    """Makes micro-batches from the sources with their settings and the run's seed."""

    members: tuple[Member, ...]
    seed: int
    images: Images = field(default_factory=dict)
    """Further images to have with the one that is trained on, by name; None: the sources store them."""
    columns: tuple[str, ...] = ()
    """Numbers of the metadata to have, by name."""

    def collate(self, task: Task, records: Sequence[Record | Undecodable] | None = None) -> Collated:
        """The micro-batch, and the samples that could not be used. `records` are those that were read before; their
        reference images have the same sizes. UserError if a sample cannot be read."""
        reads, names = task.reads, list[str]()
        failures, notes = list[Failure](), list[Failure]()
        made = _Rows(len(reads.numbers), task.bucket, self.images, self.columns, self._features(task.bucket))
        for row in range(len(reads.numbers)):
            settings, source, _ = self.members[reads.members[row]]
            number = int(reads.numbers[row])
            with _Named(f"number {number} of {settings.source}"):
                names.append(retrying(source.name, number))
            try:
                with _Named(names[row]):
                    record = self.record(task, row) if records is None else records[row]
                    if isinstance(record, Undecodable):
                        raise record
                    made.texts[row] = text = captions.choose(record, settings, self.seed, reads.keys[row])
                    if captions.is_joined_of_lines(record.texts, settings):
                        notes.append(Failure(row, names[row], SEVERAL_LINES, kept=True))
                    made.put(row, self._sample(task, row, record, text))
            except Undecodable as error:
                failures.append(Failure(row, names[row], str(error)))
        return made.batch(reads, names, failures, self.weights_B(reads)), failures + notes

    def record(self, task: Task, row: int) -> Record | Undecodable:
        """A sample of its source, without reference images in a share `reference_dropout` of cases, or the reason
        why it cannot be used. UserError if it cannot be read."""
        settings, source, _ = self.members[task.reads.members[row]]
        try:
            record = retrying(source.record, int(task.reads.numbers[row]))
        except Undecodable as error:
            return error
        if not settings.reference_dropout:
            return record
        (drawn,) = keys.uniforms(self.seed, "reference dropout", *map(int, task.reads.keys[row]), count=1)
        return references.dropped(record) if drawn < settings.reference_dropout else record

    def layout(self, task: Task, row: int, record: Record) -> Layout:
        """Heights and widths of a sample's reference images, in their order. `Undecodable`."""
        rule = conditions.references(self.images)
        if rule is None:
            return ()
        formats = self.members[task.reads.members[row]].settings.formats
        each = references.frames(record.images, rule, formats, record.sizes).values()
        return tuple((frame.height_px, frame.width_px) for frame in each)

    def _sample(self, task: Task, row: int, record: Record, text: str) -> Sample:
        """`Undecodable` where it cannot be used."""
        settings, key = self.members[task.reads.members[row]].settings, task.reads.keys[row]
        frames, images = decode.cut(record.images, settings, task.bucket, self.seed, key, self.images, record.sizes)
        if (rule := conditions.references(self.images)) is not None:
            chosen = references.frames(record.images, rule, settings.formats, record.sizes)
            frames, images = frames | chosen, images | references.cut(record.images, chosen, settings, rule.seen)
        features = {} if record.features is None else _read(record.features, frames, text)
        return Sample(frames, images, features, self._numbers(record))

    def _numbers(self, record: Record) -> dict[str, float]:
        """The numbers of its metadata that are asked for. `Undecodable` where it lacks one."""
        found = {}
        for name in self.columns:
            if (number := number_of(record, name)) is None:
                raise Undecodable(no_number(name))
            found[name] = number
        return found

    def mended(self, task: Task, collated: Collated) -> Collated:
        """The same micro-batch, once cached rows that it lacks are encoded again. In the process that has the encoders.
        UserError where they cannot be."""
        lost = [failure for failure in collated[1] if failure.reason == rows.LOST]
        if not lost:
            return collated
        members = [*self.members]
        for failure in lost:
            which = int(task.reads.members[failure.row])
            source, record = members[which].source, self.record(task, failure.row)
            assert isinstance(source, MendingSource)
            assert isinstance(record, Record), "only its features are lost"
            text = captions.choose(record, members[which].settings, self.seed, task.reads.keys[failure.row])
            sample = self._sample(task, failure.row, replace(record, features=None), text)
            number = int(task.reads.numbers[failure.row])
            whole = source.mended(number, sample.frames, task.bucket, text)
            members[which] = members[which]._replace(source=whole)
        batch, failures = replace(self, members=tuple(members)).collate(task)
        left = {failure.row for failure in failures if not failure.kept}
        told = [failure._replace(reason=rows.MENDED, kept=True) for failure in lost if failure.row not in left]
        return batch, [*failures, *told]

    def _features(self, bucket: Bucket) -> Mapping[str, np.ndarray]:
        """A feature of each name, for its shape and type. UserError if the sources do not have the same ones."""
        sources = [member.source for member in self.members]
        shape = bucket.height_px, bucket.width_px
        each = [source.features(*shape) if isinstance(source, FeatureSource) else {} for source in sources]
        shapes = [{name: (one.shape, one.dtype) for name, one in features.items()} for features in each]
        if any(other != shapes[0] for other in shapes):
            what = "data.sources: all sources of a mix have the same cached features, or none of them has any"
            raise UserError(what, code="conflict", setting="data.sources")
        return each[0]

    def weights_B(self, reads: ReadRequest) -> Tensor | None:
        """The loss weight of each sample; None if all sources weigh 1."""
        weights = [member.settings.loss_weight for member in self.members]
        if all(weight == 1 for weight in weights):
            return None
        return torch.tensor([weights[member] for member in reads.members], dtype=torch.float32)


def stacked(rows: Sequence[Mapping[str, np.ndarray]], absent: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The features of all samples [B, ...] by name, 0 for a sample without any; `absent` has one of each name. Shorter
    ones are padded with 0 along their first dim, which a mask NAME_mask then says of each NAME, as a text encoder says
    it that fills texts up to the longest of a batch."""
    found: dict[str, np.ndarray] = {}
    held = [own for own in rows if own] or [absent]
    names = list({name: None for own in held for name in own})
    ragged = [name for name in names if len({own[name].shape[:1] for own in held if name in own}) > 1]
    for name in dict.fromkeys([*names, *(f"{name}{_MASK}" for name in ragged if not name.endswith(_MASK))]):
        masked = name.removesuffix(_MASK)
        there = [own[name] for own in held if name in own] or [np.ones(len(own[masked]), bool) for own in held]
        longest = max(there, key=lambda one: one.shape[:1])
        found[name] = np.zeros((len(rows), *longest.shape), longest.dtype)
        for row, own in enumerate(rows):
            if name in own:
                place = found[name][row]
                place[tuple(map(slice, own[name].shape[:1]))] = own[name]
            elif masked in own:
                found[name][row, : len(own[masked])] = True
            elif masked != name:  # zeros of a sample without any: attention to nothing is not a number
                found[name][row] = True
    return found


def unpadded(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The features of samples of one length [B, ...], without the padding and the mask that others needed."""
    found = dict(features)
    for name, mask_BT in features.items():
        masked = name.removesuffix(_MASK)
        if masked in features and masked != name and bool((mask_BT == mask_BT[:1]).all()):
            found[masked] = features[masked][:, : int(mask_BT[0].sum())]
            del found[name]
    return found


def tensor_of(array: np.ndarray) -> Tensor:
    """A feature of the cache as a tensor, also of bfloat16, which numpy does not have."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _read(features: Features, frames: Mapping[str, Frame], text: str) -> Mapping[str, np.ndarray]:
    return retrying(lambda _: features.of(frames, text), 0)


def valid_B(size: int, failures: list[Failure]) -> Tensor:
    """1 for each sample of a batch, 0 for those that could not be decoded; float32."""
    valid = torch.ones(size)
    valid[[failure.row for failure in failures]] = 0
    return valid


def retrying(read: Callable[[int], Read], number: int) -> Read:
    """`read(number)`, tried again with a growing pause while it raises OSError; then UserError. Never a skip."""
    for attempt in range(ATTEMPTS):
        try:
            return read(number)
        except OSError as error:
            if attempt == ATTEMPTS - 1:
                raise UserError(
                    f"a sample cannot be read, after {ATTEMPTS} attempts: {error}. No sample was skipped. Fix the disk "
                    "or the connection, then run the same command again",
                    code="unreachable",
                ) from error
            time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    raise AssertionError


class _Named(NamedTuple):
    """A block whose unexpected errors name the sample."""

    name: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"(at the sample {self.name})")
