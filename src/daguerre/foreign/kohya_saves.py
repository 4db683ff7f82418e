"""Lengths and saves of sd-scripts and musubi-tuner: what is given in epochs, what is kept, and sample images."""

from collections.abc import Callable, Sequence
from typing import Any

from daguerre.foreign import peers
from daguerre.foreign.peers import Folder
from daguerre.foreign.reader import REQUIRED, Reading


def lengths(reading: Reading, folders: Sequence[Folder], sizes: tuple[Any, Any]) -> None:
    """Carries lengths in epochs, and how many saves are kept: all of them, unless a number is given."""
    for key, path in {"max_train_epochs": "training.duration", "save_every_n_epochs": "checkpoint.every"}.items():
        if peers.asks(reading.get(key)):
            peers.length(reading, key, path, folders, sizes)
    reading.alias("save_every_n_steps")
    every = reading.values.get("checkpoint.every")
    for key, count in _counts(reading).items():
        few = "" if count > 1 else "the fewest, so that one is left if the other is damaged"
        reading.carry(key, "checkpoint.keep", max(2, count), few)
    if peers.asks(every) and every != REQUIRED and "checkpoint.keep" not in reading.values:
        reading.assume({"checkpoint.backup_every": every})
    samples(reading, reading.get)


def _counts(reading: Reading) -> dict[str, int]:
    """The number of saves that is kept, by the key that says so."""
    for unit in ("epochs", "steps"):
        last, every = (reading.get(name) for name in (f"save_last_n_{unit}", f"save_every_n_{unit}"))
        if peers.asks(last) and peers.asks(every) and REQUIRED not in (last, every):
            count = peers.number(last)  # of saves, but for steps: these are updates before the last save
            return {f"save_last_n_{unit}": int(count if unit == "epochs" else count // peers.number(every) + 1)}
    return {}


def samples(reading: Reading, get: Callable[[str], Any]) -> None:
    """Refuses an interval of sample images that is not that of the saves; `get` finds the value of a key."""
    if not peers.asks(get("sample_prompts")):
        return
    for unit in ("epochs", "steps"):
        if peers.asks(own := get(f"sample_every_n_{unit}")):
            if own != get(f"save_every_n_{unit}"):
                reading.refuse(
                    f"sample_every_n_{unit}",
                    "another interval than that of the saves: images are generated at each save, and at no other "
                    "time; a smaller checkpoint.every makes more of both",
                )
            return  # updates count only where no epochs are given
