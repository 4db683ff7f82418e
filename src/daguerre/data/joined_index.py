"""The index files of a data set's shards as one `Index`, which reads what it is asked for and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from daguerre.data.index import Index
from daguerre.data.index_file import ShardIndex, load
from daguerre.errors import UserError


def combined(paths: Sequence[Path]) -> Index:
    """The indexes of shards as one; metadata is read when it is asked for. UserError where two ids are the same."""
    shards = [load(path) for path in paths]
    counts = [shard.table.num_rows for shard in shards]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ids = _joined(shards, "id", np.int64)
    _refuse_twins(ids, starts, shards)
    return Index(
        ids=ids,
        shard_starts=starts,
        heights_px=_joined(shards, "height", np.int32),
        widths_px=_joined(shards, "width", np.int32),
        numbers=_Columns(shards, "n:", pa.float64()),
        texts=_Columns(shards, "s:", pa.string()),
        captioned=_Columns(shards, "c:", pa.bool_()) if all(map(_knows_captions, shards)) else {},
    )


def _knows_captions(shard: ShardIndex) -> bool:
    return not shard.table.num_rows or any(name.startswith("c:") for name in shard.table.column_names)


def _joined(shards: Sequence[ShardIndex], name: str, kind: type) -> np.ndarray:
    return np.concatenate([shard.numpy(name) for shard in shards]) if shards else np.empty(0, kind)


def _refuse_twins(ids: np.ndarray, starts: np.ndarray, shards: Sequence[ShardIndex]) -> None:
    ordered = np.sort(ids)
    twins = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twins):
        first, second = np.flatnonzero(ids == twins[0])[:2].tolist()
        names = []
        for number in (first, second):
            shard = int(np.searchsorted(starts, number, side="right")) - 1
            names.append(f"sample {number - starts[shard]} of {shards[shard].about.shard}")
        raise UserError(
            f"data.path: {names[0]} and {names[1]} have the same id, as have {len(np.unique(twins)) - 1:,} more pairs: "
            "a shard is there twice, or the same samples were packed twice. Each sample must be there once; to train "
            "on it more often, use data.repeats"
        )


@dataclass(frozen=True)
class _Columns(Mapping[str, pa.Array]):
    """Columns of all shards by name, put together when they are asked for; metadata that a shard lacks is null."""

    shards: Sequence[ShardIndex]
    prefix: str
    kind: pa.DataType

    @cached_property
    def _names(self) -> tuple[str, ...]:
        not_kept = {name for shard in self.shards for name in shard.about.not_kept}
        dropped = not_kept if self.prefix != "c:" else set()
        columns = dict.fromkeys(name for shard in self.shards for name in shard.table.column_names)
        names = [name.removeprefix(self.prefix) for name in columns if name.startswith(self.prefix)]
        return tuple(name for name in names if name not in dropped)

    def __getitem__(self, name: str) -> pa.Array:
        if name not in self._names:
            raise KeyError(name)
        column = self.prefix + name
        return pa.concat_arrays([self._part(shard, column) for shard in self.shards])

    def _part(self, shard: ShardIndex, column: str) -> pa.Array:
        if column in shard.table.column_names:
            return shard.column(column).cast(self.kind)
        count = shard.table.num_rows
        return pa.array(np.zeros(count, bool)) if self.prefix == "c:" else pa.nulls(count, self.kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
