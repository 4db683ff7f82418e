"""Pause the queue, or hold an entry back.

usage: daguerre queue pause [ID] [queue=DIR]

Without an ID no further entry is started; those that train go on. With one, that entry waits until it is resumed; if it
trains, it saves, frees its device and ends.
"""

from daguerre import errors
from daguerre.cli.queue import entries


def run(arguments: list[str]) -> int:
    """Exit code 0."""
    queue, words = entries(arguments, "pause [ID]", least=0)
    if words:
        print(f"{words[0]}: {queue.pause(words[0])}")
    else:
        queue.pause_all(True)
        print("no further entry is started until `daguerre queue resume`")
    return errors.DONE
