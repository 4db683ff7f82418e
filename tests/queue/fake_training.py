"""Stands for `daguerre train` in tests of the queue: `train NAME WHAT PLACE`. No import that takes time."""

import json
import os
import signal
import sys
import time

_, name, what, place = sys.argv[1:]
with open(os.path.join(os.path.dirname(place), "ran"), "a") as file:
    file.write(f"{name}\n")


def status(state, reason=""):
    os.makedirs(place, exist_ok=True)
    with open(os.path.join(place, ".new"), "w") as file:
        json.dump({"state": state, "reason": reason, "pid": os.getpid(), "updated": str(time.time())}, file)
    os.replace(os.path.join(place, ".new"), os.path.join(place, "status.json"))


def stopped(number, frame):
    status("saved", f"stopped by {signal.Signals(number).name}")
    sys.exit(128 + number)


if what != "deaf":
    signal.signal(signal.SIGTERM, stopped)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
status("running")
if what == "fails":
    status("failed", "out of memory")
    sys.exit(1)
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep({"waits": 60.0, "deaf": 60.0}.get(what, 0.05))
status("finished")
if what == "hangs":
    time.sleep(60)
