"""A process that runs a queue with the training that is none: `queue_runner.py QUEUE`."""

import sys
import threading
from pathlib import Path

from daguerre.queue import runner
from daguerre.queue.queue import Queue

if __name__ == "__main__":
    runner.LOOK_SECONDS = 0.01
    fake = Path(__file__).with_name("fake_training.py")
    program = (sys.executable, "-S", "-E", str(fake))
    runner.Runner(Queue(Path(sys.argv[1])), [""], program).run(threading.Event(), until_empty=True)
