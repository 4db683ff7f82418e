"""What a run looks at before its first update, and how much of it in tests: all would be a quarter of a short run."""

from __future__ import annotations

import sys
from collections.abc import Callable

LOOKED_AT = {
    "daguerre.run.reconstruction": {"_IMAGES": 2},
    "daguerre.run.summary": {"_CAPTIONS": 20},
    "daguerre.run.preflight": {"_PASSES": 1},
    "daguerre.run.probe": {"IMAGES": 4},
}


def look_at_few(put: Callable[[object, str, object], None] = setattr) -> None:
    """In modules that are there already: nothing is imported for it."""
    for name, numbers in LOOKED_AT.items():
        for constant, number in numbers.items() if name in sys.modules else ():
            put(sys.modules[name], constant, number)
