"""The recorded results of other codes (record_outside.py)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

DIGEST = "db1351370538f02f42d3c3e9ae28a696057bc5874faa93be3bfe77c4b2310c55"


def recorded() -> dict[str, np.ndarray]:
    file = Path(__file__).parent / "outside.npz"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == DIGEST
    with np.load(file) as found:
        return dict(found)
