"""Start what waits in the queue, as devices become free.

usage: daguerre queue run [queue=DIR] [--until-empty]

Uses all GPUs that CUDA_VISIBLE_DEVICES names, else all there are, one entry on each; without a GPU one entry at a time.
Runs until Ctrl-C, or with --until-empty until nothing waits or trains. Trainings go on without it.
"""

import signal
import threading
from types import FrameType

from daguerre import errors
from daguerre.cli.queue import entries
from daguerre.queue.runner import Runner, devices_of_this_machine


def run(arguments: list[str]) -> int:
    """Exit code 0 when nothing is left, 130 after Ctrl-C or SIGTERM; Held if another process runs the queue."""
    flag = "--until-empty"
    queue, _ = entries([word for word in arguments if word != flag], "run", most=0, least=0)
    over = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        over.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        Runner(queue, devices_of_this_machine()).run(over, until_empty=flag in arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if over.is_set():
        print("no further entry is started; those that train go on (`daguerre queue list`)")
    return errors.INTERRUPTED if over.is_set() else errors.DONE
