"""What stays in memory of every index file that was opened: a few words a shard, while its columns come and go.

Opening a data set asks each file several times, and a system does not allow a memory map for every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from daguerre.data.index.file import About, load


@dataclass(frozen=True, slots=True)
class Head:
    """An index file without its columns."""

    about: About
    count: int
    """Samples."""
    columns: tuple[str, ...]
    """Their names."""


def head(path: Path) -> Head:
    """Of an index file, which is read the first time and when it has changed. BadIndex and OSError as `load`."""
    stat = path.stat()
    return _head(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1 << 20)
def _head(path: Path, inode: int, mtime_ns: int, size_bytes: int) -> Head:
    index = load(path)
    about = replace(index.about, fields=_same(index.about.fields), not_kept=_same(index.about.not_kept))
    return Head(about, index.table.num_rows, _same(tuple(index.table.column_names)))


@lru_cache(maxsize=1024)
def _same(names: tuple[str, ...]) -> tuple[str, ...]:
    """Equal names of many shards as one object."""
    return names
