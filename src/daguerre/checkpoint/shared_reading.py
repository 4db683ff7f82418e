"""The reading of a checkpoint's files shared among ranks, and waiting for files that other nodes wrote."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from daguerre.checkpoint import manifest
from daguerre.checkpoint.manifest import CheckpointError, Damaged, Entry

_APPEARS_SECONDS = 10.0
"""How long a file that another node wrote may take to be seen here."""


def share(entries: Mapping[str, Entry], rank: int, count: int) -> set[str]:
    """The files that a rank reads when all verify: the largest first, to whom has least."""
    load, mine = [0] * count, set()
    for path, entry in sorted(entries.items(), key=lambda item: (-item[1].size_bytes, item[0])):
        reader = min(range(count), key=lambda candidate: (load[candidate], candidate))
        load[reader] += entry.size_bytes
        if reader == rank:
            mine.add(path)
    return mine


def verified(folder: Path, rank: int, count: int) -> dict[str, Any]:
    """What a rank finds in its share, as JSON for `judge`."""
    try:
        manifest.verify(folder, share(manifest.read(folder), rank, count))
    except Damaged as damage:
        return {"damaged": str(damage)}
    except CheckpointError as error:
        return {"refused": str(error)}
    except OSError as error:
        return {"os": refusal(error, folder)}
    return {}


def judge(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise what `manifest.verify` would have raised for the findings of all ranks."""
    for report in reports:
        if "os" in report:
            raise OSError(*report["os"])
        if "damaged" in report:
            raise Damaged(report["damaged"])
        if "refused" in report:
            raise CheckpointError(report["refused"])


def refusal(error: OSError, where: Path) -> list[Any]:
    """The arguments that make an OSError anew."""
    return [error.errno, error.strerror or str(error), str(error.filename or where)]


def wait_for(folder: Path, entries: Mapping[str, Entry]) -> None:
    """OSError unless this process, too, sees the files of all ranks: on a network a moment may pass."""
    deadline = time.monotonic() + _APPEARS_SECONDS
    for path, entry in entries.items():
        while (seen := _size(folder / path)) != entry.size_bytes:
            if time.monotonic() > deadline:
                raise OSError(
                    errno.ENOENT,
                    f"another rank wrote {entry.size_bytes} bytes, rank 0 sees {seen}: output_dir has to be a folder "
                    "that all nodes share",
                    str(folder / path),
                )
            time.sleep(0.05)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
