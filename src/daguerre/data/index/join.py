"""The index files of a data set's shards as one `Index`, which reads what it is asked for and no more.

Files are mapped while something is copied from them, so that there may be any number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from daguerre.data.index.file import Head, ShardIndex, head, load
from daguerre.data.index.index import Index
from daguerre.errors import UserError

_FACTS = ("c:", "i:")
"""Columns that say what a sample has; without the column no sample has it."""
GROUP_SHARDS = 1000
"""Most shards whose part of a column is mapped at a time."""


def combined(paths: Sequence[Path]) -> Index:
    """The indexes of shards as one; metadata is read when it is asked for. UserError where samples are there twice."""
    heads = [head(path) for path in paths]
    captions_known = all(not one.count or any(name.startswith("c:") for name in one.columns) for one in heads)
    starts = np.cumsum([0, *(one.count for one in heads)], dtype=np.int64)
    columns = _filled(paths, starts, {"id": np.int64, "height": np.int32, "width": np.int32})
    _check_twins(columns["id"], starts, paths)
    return Index(
        ids=columns["id"],
        shard_starts=starts,
        heights_px=columns["height"],
        widths_px=columns["width"],
        numbers=_Columns(paths, heads, "n:", pa.float64()),
        texts=_Columns(paths, heads, "s:", pa.large_string()),
        images=_Columns(paths, heads, "i:", pa.bool_()),
        captioned=_Columns(paths, heads, "c:", pa.bool_()) if captions_known else {},
    )


def chance_pairs(count: int) -> int:
    """Most pairs of equal 63-bit hashes among `count` that chance explains: one more is there once in 10^6 times."""
    expected = count * count / 2**64
    return 0 if expected < 1e-6 else int(4 + 4 * expected)


def _filled(paths: Sequence[Path], starts: np.ndarray, kinds: Mapping[str, type]) -> dict[str, np.ndarray]:
    """Columns of all shards, copied shard by shard."""
    whole: dict[str, np.ndarray] = {name: np.empty(int(starts[-1]), kind) for name, kind in kinds.items()}
    for path, start, stop in zip(paths, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        shard = _loaded(path, stop - start)
        for name, column in whole.items():
            column[start:stop] = shard.numpy(name)
    return whole


def _loaded(path: Path, count: int) -> ShardIndex:
    shard = load(path)
    if shard.table.num_rows != count:
        text = f"{path}: this index was replaced while the data set was being opened: run the same command again"
        raise UserError(text, code="changed")
    return shard


def _check_twins(ids: np.ndarray, starts: np.ndarray, paths: Sequence[Path]) -> None:
    """UserError where a sample is there twice. Different ones whose hashes are the same by chance are let be: all they
    share is their random numbers."""
    ordered = np.sort(ids)
    twins = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(twins):
        return
    most = chance_pairs(len(ids))
    found: dict[tuple[int, int], list[str]] = {}
    for number in np.flatnonzero(np.isin(ids, twins[: most + 1])).tolist():
        shard = int(np.searchsorted(starts, number, side="right")) - 1
        index, row = load(paths[shard]), number - int(starts[shard])
        contents = int(index.numpy("digest")[row]) if len(twins) <= most else 0  # so many are not there by chance
        found.setdefault((int(ids[number]), contents), []).append(f"sample {row} of {index.about.shard}")
    for first, second, *_ in (names for names in found.values() if len(names) > 1):
        raise UserError(
            f"data.path: {first} and {second} have the same id, as have {len(twins) - 1:,} more pairs: a shard is "
            "listed twice, or the same samples were packed twice. Each sample must exist only once; to train on it "
            "more often, use data.repeats",
            code="conflict",
            setting="data.path",
        )


@dataclass(frozen=True)
class _Columns(Mapping[str, pa.Array]):
    """Columns of all shards by name, put together when they are asked for; metadata that a shard lacks is null."""

    paths: Sequence[Path]
    heads: Sequence[Head]
    prefix: str
    kind: pa.DataType

    @cached_property
    def _names(self) -> dict[str, None]:
        not_kept = {name for names in {shard.about.not_kept for shard in self.heads} for name in names}
        dropped = set() if self.prefix in _FACTS else not_kept
        alike = dict.fromkeys(shard.columns for shard in self.heads)  # few, of however many shards
        columns = [name for columns in alike for name in columns if name.startswith(self.prefix)]
        names = [name.removeprefix(self.prefix) for name in columns]
        return dict.fromkeys(name for name in names if name not in dropped)

    def __getitem__(self, name: str) -> pa.Array:
        if name not in self._names:
            raise KeyError(name)
        shards = list(zip(self.paths, self.heads, strict=True))
        groups = []
        for first in range(0, len(shards), GROUP_SHARDS):
            parts = [self._part(*shard, self.prefix + name) for shard in shards[first : first + GROUP_SHARDS]]
            groups.append(pa.concat_arrays(parts))
        return groups[0] if len(groups) == 1 else pa.concat_arrays(groups)

    def _part(self, path: Path, shard: Head, column: str) -> pa.Array:
        if column in shard.columns:
            return _loaded(path, shard.count).column(column).cast(self.kind)
        return pa.array(np.zeros(shard.count, bool)) if self.prefix in _FACTS else pa.nulls(shard.count, self.kind)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
