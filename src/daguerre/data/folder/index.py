"""The index of a folder of images, kept in the cache folder: what has not changed is not read again.

Each state of the folder has a file of its own, named by its contents, so that a run that reads one is not disturbed by
a later start that found other images.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from daguerre.data.folder import scan
from daguerre.data.folder.captions import Rules
from daguerre.data.folder.scan import Sample
from daguerre.data.index import cache, file
from daguerre.data.index.cache import SUFFIX
from daguerre.data.index.file import About, BadIndex, ShardIndex
from daguerre.data.skipped import SkipReport
from daguerre.storage.location import Location

_COLUMNS = {
    "height": pa.int32(),
    "width": pa.int32(),
    "path": pa.binary(),
    "stamp": pa.uint64(),
    "texts": pa.string(),
    "metadata": pa.string(),
    "images": pa.string(),
}
KEPT_STATES = 4
"""States of a folder whose indexes are kept, those used last."""


def indexed(folder: Path, rules: Rules, cache_dir: Path) -> tuple[Path, SkipReport]:
    """The index file of a folder as it is now, and what is left out of it. UserError where nothing can be used."""
    made_by = repr(rules).encode()
    kind = f"folder {blake2b(made_by, digest_size=8).hexdigest()}"
    home = cache.home(Location(os.path.abspath(folder)), kind, cache_dir)
    before = _newest(home)
    found = scan.scan(folder, rules, _known(before))
    if before and found.samples == tuple(range(before[1].num_rows)):
        os.utime(before[0])
        return before[0], found.skipped
    index = _index(folder, kind, found.samples, before[1] if before else None)
    return _kept(index, home), found.skipped


def _newest(home: Path) -> tuple[Path, pa.Table] | None:
    """The state of the folder that was used last."""
    for path in _states(home):
        with suppress(FileNotFoundError, BadIndex):
            return path, file.load(path).whole()
    return None


def _states(home: Path) -> list[Path]:
    """Index files of the folder, those used last first."""
    found: list[tuple[int, Path]] = []
    for path in home.parent.glob(f"{home.stem}.*{SUFFIX}"):
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _known(before: tuple[Path, pa.Table] | None) -> dict[str, tuple[int, int]]:
    """{path: (stamp, row)}."""
    if before is None:
        return {}
    paths, stamps = (before[1][name].to_pylist() for name in ("path", "stamp"))
    return {os.fsdecode(path): (stamp, row) for row, (path, stamp) in enumerate(zip(paths, stamps, strict=True))}


def _index(folder: Path, kind: str, samples: tuple[Sample | int, ...], before: pa.Table | None) -> ShardIndex:
    """A row a sample; rows of the state before are taken over."""
    rows = [_row(sample) if isinstance(sample, Sample) else _old_row(before, sample) for sample in samples]
    own = {name: pa.array([row[name] for row in rows], kind) for name, kind in _COLUMNS.items()}
    paths = [os.fsdecode(row["path"]) for row in rows]
    kept, fields, not_kept = file.metadata_columns([json.loads(row["metadata"]) for row in rows])
    table = {
        "id": np.array([scan.sample_id(path) for path in paths], dtype=np.int64),
        "height": own.pop("height"),
        "width": own.pop("width"),
        "digest": np.zeros(len(rows), dtype=np.uint64),
        **own,
        **kept,
        **file.caption_columns([json.loads(row["texts"]).keys() for row in rows]),
        **file.image_columns([json.loads(row["images"]).keys() for row in rows]),
    }
    about = About(kind, folder.name, 0, "0" * 32, fields=fields, not_kept=not_kept)
    return ShardIndex(pa.table(table), about)


def _row(sample: Sample) -> Mapping[str, Any]:
    documents = {name: json.dumps(getattr(sample, name)) for name in ("texts", "metadata", "images")}
    return {**vars(sample), **documents, "path": os.fsencode(sample.path)}


def _old_row(before: pa.Table | None, row: int) -> Mapping[str, Any]:
    assert before is not None
    return {name: before[name][row].as_py() for name in _COLUMNS}


def _kept(index: ShardIndex, home: Path) -> Path:
    """Writes the state, and forgets the oldest ones."""
    digest = blake2b(file.encoded(index), digest_size=8).hexdigest()
    path = home.with_name(f"{home.stem}.{digest}{SUFFIX}")
    try:
        file.save(index, path)
    except OSError as error:
        raise cache.cannot_write(home.parent, error) from error
    for old in _states(home)[KEPT_STATES:]:
        old.unlink(missing_ok=True)
    return path
