"""Micro-batches of given samples: read, decoded and captioned. Planning and counting is `data/loading/loader.py`."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from daguerre.conditions.condition import Images
from daguerre.data import captions
from daguerre.data.alternatives import SEVERAL_LINES
from daguerre.data.cached import rows
from daguerre.data.cached.rows import BFLOAT16
from daguerre.data.dataset import Member, ReadRequest, number_of
from daguerre.data.images import decode
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.images.kinds import KINDS
from daguerre.data.plan.buckets import Bucket
from daguerre.data.plan.selection import no_number
from daguerre.data.skipped import Failure
from daguerre.data.source import FeatureSource, MendingSource
from daguerre.errors import UserError
from daguerre.types import IMAGE, OF_IMAGES, Batch, Features, Record

Read = TypeVar("Read")
_MASK = "_mask"
ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.2


class Task(NamedTuple):
    """A micro-batch to collate."""

    reads: ReadRequest
    bucket: Bucket


Collated = tuple[Batch, list[Failure]]


def absent(names: Iterable[str], size: int, bucket: Bucket) -> dict[str, Tensor]:
    """The images by name of samples that have none, [B, C, H, W] uint8 each."""
    return {name: _empty(size, bucket, KINDS[name].channels, KINDS[name].absent or 0) for name in names}


def _empty(size: int, bucket: Bucket, channels: int, value: int = 0) -> Tensor:
    shape = (size, bucket.height_px, bucket.width_px, channels)
    pixels_BHWC = np.full(shape, value, dtype=np.uint8) if value else np.zeros(shape, dtype=np.uint8)
    return torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Collator:
    """Makes micro-batches from the sources with their settings and the run's seed."""

    members: tuple[Member, ...]
    seed: int
    images: Images = field(default_factory=dict)
    """Further images to have with the one that is trained on, by name; None: the sources store them."""
    columns: tuple[str, ...] = ()
    """Numbers of the metadata to have, by name."""

    def collate(self, task: Task) -> Collated:
        """The micro-batch, and the samples that could not be used. UserError if a sample cannot be read."""
        reads, bucket = task
        size = len(reads.numbers)
        # Filled by numpy: a large torch operation here would start a second team of OpenMP threads beside the
        # trainer's, and with more threads than cores OpenMP's waits fall asleep (measured: 1.5 times slower training on
        # two cores).
        # Channels stand last in memory, as decoders give them and networks are fastest with.
        lacking = self._features(bucket)
        pixels = {} if any(name.startswith(OF_IMAGES) for name in lacking) else {IMAGE: _empty(size, bucket, 3)}
        tensors = pixels | absent(self.images, size, bucket)
        images = {name: tensor.permute(0, 2, 3, 1).numpy() for name, tensor in tensors.items()}
        features: list[Mapping[str, np.ndarray]] = [{} for _ in range(size)]
        sizes = np.zeros((size, 6), dtype=np.int32)
        sizes[:, 4:] = bucket.height_px, bucket.width_px
        sizes_of = {name: sizes.copy() for name in self.images if KINDS[name].is_scene}
        columns = {name: np.zeros(size, dtype=np.float32) for name in self.columns}
        texts, names, failures, notes = [""] * size, [], [], []
        for row in range(size):
            settings, source, _ = self.members[reads.members[row]]
            number = int(reads.numbers[row])
            with _Named(f"number {number} of {settings.source}"):
                names.append(retrying(source.name, number))
            try:
                with _Named(names[row]):
                    record, texts[row] = self._said(task, row)
                    if captions.is_joined_of_lines(record.texts, settings):
                        notes.append(Failure(row, names[row], SEVERAL_LINES, kept=True))
                    frames, cut = self._cut(task, row, record)
                    numbers = self._numbers(record)
                    if record.features is not None:
                        features[row] = _read(record.features, frames[IMAGE], texts[row])
            except Undecodable as error:
                failures.append(Failure(row, names[row], str(error)))
                continue
            for name in images.keys() & cut.keys():
                images[name][row] = cut[name].numpy().transpose(1, 2, 0)
            sizes[row] = frames[IMAGE].sizes
            for name, own in sizes_of.items():
                own[row] = frames[name].sizes
            for name, value in numbers.items():
                columns[name][row] = value
        cached = {name: _tensor(array) for name, array in stacked(features, lacking).items()}
        valid, weights_B = valid_B(size, failures), self.weights_B(reads)
        batch = Batch(reads.keys, tensors, texts, valid, names, sizes, {}, weights_B, cached, sizes_of)
        batch = replace(batch, columns={name: torch.from_numpy(own) for name, own in columns.items()})
        return batch, failures + notes

    def _said(self, task: Task, row: int) -> tuple[Record, str]:
        """A sample of a micro-batch, and its caption. `Undecodable`."""
        settings, source, _ = self.members[task.reads.members[row]]
        record = retrying(source.record, int(task.reads.numbers[row]))
        return record, captions.choose(record, settings, self.seed, task.reads.keys[row])

    def _cut(self, task: Task, row: int, record: Record) -> tuple[dict[str, Frame], dict[str, Tensor]]:
        """The parts of its images that are taken, and these. `Undecodable`."""
        settings = self.members[task.reads.members[row]].settings
        key = task.reads.keys[row]
        return decode.cut(record.images, settings, task.bucket, self.seed, key, self.images, record.size)

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
            source, (record, text) = members[which].source, self._said(task, failure.row)
            frames, _ = self._cut(task, failure.row, record)
            assert isinstance(source, MendingSource)
            whole = source.mended(int(task.reads.numbers[failure.row]), frames[IMAGE], task.bucket, text)
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


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _read(features: Features, frame: Frame, text: str) -> Mapping[str, np.ndarray]:
    return retrying(lambda _: features.of(frame, text), 0)


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
