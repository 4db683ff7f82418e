"""Go on with the queue, or with an entry that is paused, stopped, interrupted or has failed.

usage: daguerre queue resume [ID] [queue=DIR]
"""

from daguerre import errors
from daguerre.cli.queue import entries


def run(arguments: list[str]) -> int:
    """Exit code 0."""
    queue, words = entries(arguments, "resume [ID]", least=0)
    if words:
        queue.resume(words[0])
    else:
        queue.pause_all(False)
    return errors.DONE
