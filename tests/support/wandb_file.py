"""Reads the offline file of Weights & Biases: a LevelDB log of protobuf records, as wandb writes it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEAD = b":W&B"
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[bytes]:
    """The whole records of a file; a torn last one, which a kill leaves, is left out."""
    data = path.read_bytes()
    assert data[:4] == _HEAD, path
    at, parts = 7, b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7 : at + 7 + length]
        if kind == 0 or len(body) < length:
            return
        at += 7 + length
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts


def parsed(path: Path) -> list[Any]:
    """The records as wandb's protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(record) for record in records(path)]


def history(path: Path) -> list[dict[str, Any]]:
    """The rows of numbers: names and values."""
    rows = []
    for record in parsed(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows
