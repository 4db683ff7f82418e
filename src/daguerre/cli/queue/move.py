"""Move an entry of the queue.

usage: daguerre queue move ID first|last|OTHER_ID [queue=DIR]

OTHER_ID: before that entry.
"""

from daguerre import errors
from daguerre.cli.queue import entries


def run(arguments: list[str]) -> int:
    """Exit code 0."""
    queue, (ident, where) = entries(arguments, "move ID first|last|OTHER_ID", most=2, least=2)
    queue.move(ident, where)
    return errors.DONE
