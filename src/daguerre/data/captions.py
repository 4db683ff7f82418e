"""Which caption a sample is trained on: its text, or none, so that guidance has something to guide from.

What no caption means to a network is the family's business: here it is the empty string.
"""

from __future__ import annotations

import numpy as np

from daguerre import keys
from daguerre.data.settings import SourceSettings
from daguerre.types import Record

FIELD = "text"
"""The field of `Record.texts` that holds the caption."""


def choose(record: Record, settings: SourceSettings, seed: int, key: np.ndarray) -> str:
    """The record's caption; "" in a share `caption_dropout` of cases, drawn by the seed and `key` alone.

    `key` is int64 [3]: sample id, epoch, repeat.
    """
    sample_id, epoch, repeat = map(int, key)
    drawn = keys.uniforms(seed, "caption dropout", sample_id, epoch, repeat, count=1)[0]
    return "" if drawn < settings.caption_dropout else record.texts[FIELD]
