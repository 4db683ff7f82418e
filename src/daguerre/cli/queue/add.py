"""Put a training into the queue, once it is checked.

usage: daguerre queue add RECIPE [key=value ...] [devices=N] [queue=DIR]

Takes what `daguerre train` takes, checks it as `daguerre train --dry-run` does, and puts it last. `devices=N` trains on
N GPUs together (`daguerre launch local`).
"""

from pathlib import Path

from daguerre import credentials, errors
from daguerre.cli.queue import opened
from daguerre.config import overrides, place
from daguerre.errors import UserError
from daguerre.queue.check import check


def run(arguments: list[str]) -> int:
    """Exit code 0; UserError for what cannot be trained."""
    queue, words = opened(arguments)
    given = [word for word in words if not word.removeprefix("--").startswith("devices=")]
    devices = [word.partition("=")[2] for word in words if word not in given]
    if len(devices) > 1 or not all(text.isdecimal() and int(text) for text in devices):
        raise UserError("devices=N: give one whole number from 1")
    if any(credentials.CUT in word or credentials.scrub(word) != word for word in given):
        raise UserError(
            "an entry of the queue is a file, and no secret is written into one: give addresses without a password or "
            "signature, and credentials where the store's own tools keep them (docs/stores.md)"
        )
    found = overrides.split(given)
    (where, works_in), here = place.of(found.recipe, found.overrides), Path.cwd()
    check(given, here)
    ident = queue.add(given, where, works_in, here, int(devices[0]) if devices else 1)
    print(f"{ident}: {where}")
    return errors.DONE
