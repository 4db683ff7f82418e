"""The index files of a data set's shards as one `Index`, which reads what it is asked for and no more.

Files are mapped while something is copied from them, so that there may be any number. Of a large set nothing is copied
that was not asked for: ids and sizes are read where a stretch or some samples of it are wanted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from daguerre.data.index.file import Head, ShardIndex, head, load
from daguerre.data.index.index import Column, Index, Large, Stored
from daguerre.errors import UserError

_FACTS = ("c:", "i:")
"""Columns that say what a sample has; without the column no sample has it."""
GROUP_SHARDS = 1000
"""Most shards whose part of a column is mapped at a time."""
LARGE_SAMPLES = 1 << 22
"""Samples from which on a set is large: below, ids and sizes are read when it is opened."""
_TWIN_BITS = 26
"""Most ids that are sorted at a time, as a power of two and about."""
_CHUNK = 1 << 20


def combined(paths: Sequence[Path]) -> Index:
    """The indexes of shards as one; metadata is read when it is asked for. UserError where samples are there twice; of
    a large set that is found when some are chosen."""
    heads = [head(path) for path in paths]
    captions_known = all(not one.count or any(name.startswith("c:") for name in one.columns) for one in heads)
    starts = np.cumsum([0, *(one.count for one in heads)], dtype=np.int64)
    shards = _Shards(paths, heads, starts)
    kinds = {"id": np.int64, "height": np.int32, "width": np.int32}
    columns: dict[str, Column] = {name: _Column(shards, name, np.dtype(kind)) for name, kind in kinds.items()}
    large = Large(shards.digest, partial(check_twins, shards)) if starts[-1] >= LARGE_SAMPLES else None
    if large is None:
        columns = {name: column[:] for name, column in columns.items()}
        check_twins(shards, columns["id"])
    return Index(
        ids=columns["id"],
        shard_starts=starts,
        heights_px=columns["height"],
        widths_px=columns["width"],
        numbers=_Columns(shards, "n:", pa.float64()),
        texts=_Columns(shards, "s:", pa.large_string()),
        images=_Columns(shards, "i:", pa.bool_()),
        captioned=_Columns(shards, "c:", pa.bool_()) if captions_known else {},
        large=large,
    )


def chance_pairs(count: int) -> int:
    """Most pairs of equal 63-bit hashes among `count` that chance explains: one more is there once in 10^6 times."""
    expected = count * count / 2**64
    return 0 if expected < 1e-6 else int(4 + 4 * expected)


@dataclass(frozen=True, eq=False)
class _Shards:
    """Index files, one behind the other."""

    paths: Sequence[Path]
    heads: Sequence[Head]
    starts: np.ndarray
    """[S + 1] int64: the first sample of each, and N."""

    @cached_property
    def digest(self) -> str:
        return blake2b(np.array([one.digest for one in self.heads], "<u8").tobytes(), digest_size=16).hexdigest()

    @cached_property
    def alike(self) -> Sequence[tuple[str, ...]]:
        """The columns that shards have: few different ones, of however many shards."""
        return list(dict.fromkeys(shard.columns for shard in self.heads))

    @cached_property
    def not_kept(self) -> frozenset[str]:
        return frozenset(name for names in {shard.about.not_kept for shard in self.heads} for name in names)

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """The shards of samples."""
        return np.searchsorted(self.starts, numbers, side="right") - 1

    def load(self, shard: int) -> ShardIndex:
        """One of them. UserError where it is not that which was found at first."""
        index = load(self.paths[shard])
        if index.digest != self.heads[shard].digest:
            raise UserError(
                f"{self.paths[shard]}: this index was replaced while the data set was being opened: run the same "
                "command again",
                code="changed",
            )
        return index

    def stretches(self, start: int, stop: int) -> list[tuple[int, slice]]:
        """The shards that hold the samples `start` to `stop`, each with its rows among them."""
        if start >= stop:
            return []
        first, last = self.of(np.array([start, stop - 1])).tolist()
        begins = self.starts[first : last + 2].tolist()
        rows = [slice(max(start, a) - a, min(stop, z) - a) for a, z in pairwise(begins)]
        return list(enumerate(rows, first))


def check_twins(shards: _Shards, ids: Column) -> None:
    """UserError where a sample is there twice. Different ones whose hashes are the same by chance are let be: all they
    share is their random numbers."""
    twins = _twins(ids)
    if not len(twins):
        return
    most = chance_pairs(len(ids))
    wanted, found = twins[: most + 1], dict[tuple[int, int], list[str]]()
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        for place in np.flatnonzero(np.isin(chunk, wanted)).tolist():
            shard = int(shards.of(np.array(start + place)))
            index, row = shards.load(shard), start + place - int(shards.starts[shard])
            contents = int(index.numpy("digest")[row]) if len(twins) <= most else 0  # so many are not there by chance
            found.setdefault((int(chunk[place]), contents), []).append(f"sample {row} of {index.about.shard}")
    for first, second, *_ in (names for names in found.values() if len(names) > 1):
        raise UserError(
            f"data.path: {first} and {second} have the same id, as have {len(twins) - 1:,} more pairs: a shard is "
            "listed twice, or the same samples were packed twice. Each sample must exist only once; to train on it "
            "more often, use data.repeats",
            code="conflict",
            setting="data.path",
        )


def _twins(ids: Column) -> np.ndarray:
    """The ids that are there twice, each once and ascending; sorted in parts, by their lowest bits."""
    parts = 1 << max(0, len(ids).bit_length() - _TWIN_BITS)
    found = [np.empty(0, np.int64)]
    for part in range(parts):
        chunks = (ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK))
        own = np.concatenate([np.empty(0, np.int64), *(chunk[chunk & (parts - 1) == part] for chunk in chunks)])
        own.sort()
        found.append(np.unique(own[1:][own[1:] == own[:-1]]))
    return np.sort(np.concatenate(found))


@dataclass(frozen=True, eq=False)
class _Column:
    """A column of numbers without nulls, read from the files of the samples that are asked for."""

    shards: _Shards
    name: str
    dtype: np.dtype

    def __len__(self) -> int:
        return int(self.shards.starts[-1])

    def __getitem__(self, rows: Any, /) -> Any:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            assert step == 1
            parts = [self._read(shard, own) for shard, own in self.shards.stretches(start, stop)]
            return np.concatenate([np.empty(0, self.dtype), *parts])
        numbers = np.asarray(rows)
        if numbers.dtype == bool:
            numbers = np.flatnonzero(numbers)
        found = np.empty(numbers.size, self.dtype)
        of = self.shards.of(numbers.ravel())
        by_shard = np.argsort(of, kind="stable")
        there, first = np.unique(of[by_shard], return_index=True)
        for shard, places in zip(there.tolist(), np.split(by_shard, first[1:]), strict=False):
            found[places] = self._read(shard, numbers.ravel()[places] - self.shards.starts[shard])
        return found.reshape(numbers.shape)[()]

    def _read(self, shard: int, rows: slice | np.ndarray) -> np.ndarray:
        return self.shards.load(shard).numpy(self.name)[rows]


@dataclass(frozen=True, eq=False)
class _Columns(Stored):
    """Columns of all shards by name, put together when they are asked for; metadata that a shard lacks is null."""

    shards: _Shards
    prefix: str
    kind: pa.DataType
    stretch: tuple[int, int] | None = None
    """The samples that they are of; None: all."""

    def part(self, start: int, stop: int) -> Mapping[str, pa.Array]:
        """The same columns of the samples `start` to `stop`."""
        return replace(self, stretch=(start, stop))

    @cached_property
    def _names(self) -> dict[str, None]:
        dropped = set() if self.prefix in _FACTS else self.shards.not_kept
        columns = [name for columns in self.shards.alike for name in columns if name.startswith(self.prefix)]
        names = [name.removeprefix(self.prefix) for name in columns]
        return dict.fromkeys(name for name in names if name not in dropped)

    def __getitem__(self, name: str) -> pa.Array:
        if name not in self._names:
            raise KeyError(name)
        stretches = self.shards.stretches(*(self.stretch or (0, int(self.shards.starts[-1]))))
        groups = [pa.array([], self.kind)]
        for first in range(0, len(stretches), GROUP_SHARDS):
            parts = [self._part(*shard, self.prefix + name) for shard in stretches[first : first + GROUP_SHARDS]]
            groups.append(pa.concat_arrays(parts))
        return groups[-1] if len(groups) <= 2 else pa.concat_arrays(groups)

    def _part(self, shard: int, rows: slice, column: str) -> pa.Array:
        count = rows.stop - rows.start
        if column in self.shards.heads[shard].columns:
            return self.shards.load(shard).column(column).slice(rows.start, count).cast(self.kind)
        return pa.array(np.zeros(count, bool)) if self.prefix in _FACTS else pa.nulls(count, self.kind)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
