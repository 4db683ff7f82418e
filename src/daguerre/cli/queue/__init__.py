"""Train one run after the other on the devices of this machine.

usage: daguerre queue VERB ...

  daguerre queue add sdxl_lora data.path=photos run_name=a     checked as `daguerre train` checks it, then put last
  daguerre queue add sdxl_lora data.path=photos run_name=b
  daguerre queue run                                           starts one after the other, on each GPU one at a time
  daguerre queue list                                          what waits, trains and has ended

Trainings go on when `queue run` ends, and when it comes back it finds them. A run that fails, is killed or runs out of
memory frees its device within 30 seconds, and the next one starts. The queue is in ~/.local/state/daguerre/queue;
`queue=DIR` is another one, for every verb. docs/control.md says more.
"""

from collections.abc import Sequence
from pathlib import Path

from daguerre.credentials import redact
from daguerre.errors import UserError
from daguerre.queue.queue import Queue, usual_folder


def opened(arguments: Sequence[str]) -> tuple[Queue, list[str]]:
    """The queue that the arguments name by `queue=DIR`, else the usual one, and the other arguments."""
    folders = [word.removeprefix("--").partition("=")[2] for word in arguments if _names_queue(word)]
    if len(folders) > 1 or any(not text or "://" in text or redact(text) != text for text in folders):
        raise UserError("queue=DIR: give one folder of this machine", setting="queue")
    folder = Path(folders[0]).expanduser().absolute() if folders else usual_folder()
    return Queue(folder), [word for word in arguments if not _names_queue(word)]


def entries(arguments: Sequence[str], usage: str, most: int = 1, least: int = 1) -> tuple[Queue, list[str]]:
    """The queue and the bare words of a verb. UserError for more or fewer of them, and for what is no option."""
    queue, words = opened(arguments)
    if not least <= len(words) <= most or any(word.startswith("-") or "=" in word for word in words):
        raise UserError(f"write `daguerre queue {usage}`, and queue=DIR for another queue")
    return queue, words


def _names_queue(word: str) -> bool:
    return word.removeprefix("--").startswith("queue=")
