"""Take an entry out of the queue; the folder of its run stays.

usage: daguerre queue remove ID [queue=DIR]
"""

from daguerre import errors
from daguerre.cli.queue import entries


def run(arguments: list[str]) -> int:
    """Exit code 0."""
    queue, (ident,) = entries(arguments, "remove ID")
    queue.remove(ident)
    return errors.DONE
