"""Put a training into the queue, once it is checked.

usage: daguerre queue add RECIPE [key=value ...] [devices=N] [queue=DIR]

Takes what `daguerre train` takes, checks it as `daguerre train --dry-run` does, and puts it last. `devices=N` trains on
N GPUs together (`daguerre launch local`).
"""

from pathlib import Path

from daguerre import errors
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
    found = overrides.split(given)
    here = Path.cwd()
    check(given, here)
    where, works_in = place.of(found.recipe, found.overrides)
    ident = queue.add(given, where, works_in, here, int(devices[0]) if devices else 1)
    print(f"{ident}: {where}")
    return errors.DONE
