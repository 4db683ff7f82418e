"""Stop an entry that trains: it saves and ends. A second time: it is killed.

usage: daguerre queue stop ID [queue=DIR]
"""

from daguerre import errors
from daguerre.cli.queue import entries


def run(arguments: list[str]) -> int:
    """Exit code 0."""
    queue, (ident,) = entries(arguments, "stop ID")
    print(f"{ident}: {queue.stop(ident)}")
    return errors.DONE
