"""Starts the entries of a queue, as many as there are devices, one after the other. No torch here.

One process of a machine does this for a queue: `daguerre queue run`, or a server, in a thread. Trainings are in
sessions of their own and go on without it; whoever comes next finds them by their locks (queue/queue.py).
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from daguerre import system
from daguerre.checkpoint.atomic import locked, make_folder, write_json_atomically
from daguerre.errors import Held
from daguerre.queue import keeper, processes
from daguerre.queue.queue import RUNNER, Listed, Queue

LOOK_SECONDS = 1.0
"""Between two looks."""
AGAIN_SECONDS = 5.0
"""After which one that could not start entries tries it again."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that says which devices a process sees."""


@dataclass
class Runner:
    """Starts what waits in a queue."""

    queue: Queue
    devices: Sequence[str]
    """Names of the devices, as CUDA_VISIBLE_DEVICES has them; one without a name where there is no GPU."""
    program: Sequence[str] = (sys.executable, "-m", "daguerre")
    """What trains, before the words of its command line."""
    say: Callable[[str], None] = print
    """Tells what begins and ends."""
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    _known: dict[str, str] = field(default_factory=dict, init=False)

    def run(self, over: threading.Event, until_empty: bool = False) -> None:
        """Starts entries until `over` is set, or nothing is left to start. Held if another process does."""
        with self.alone():
            while not over.is_set():
                listed = self.step()
                if until_empty and not any(each.state in ("waiting", "running") for each in listed):
                    return
                over.wait(LOOK_SECONDS)

    def keep_running(self, over: threading.Event) -> None:
        """Starts entries until `over` is set, whenever no other process does; for a thread that must not end before."""
        while not over.is_set():
            try:
                self.run(over)
            except (Held, OSError) as error:
                if not isinstance(error, Held):  # such as a full disk: it may pass
                    self.say(f"daguerre: the queue: {error}")
                over.wait(AGAIN_SECONDS)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the context no other process starts entries of this queue. Held if one does."""
        make_folder(self.queue.path)
        with locked(self.queue.path / RUNNER, wait=False) as free:
            if not free:
                raise Held(f"another process runs the queue in {self.queue.path}")
            yield

    def step(self) -> list[Listed]:
        """One look: frees what processes have left, and starts what has a device. The entries as they were found."""
        self._children = [child for child in self._children if child.poll() is None]
        listed = self.queue.entries()
        taken, ended = set[str](), list[str]()
        for each in listed:
            if each.state == "running":
                taken |= self._held(each)
            elif each.state not in ("waiting", self._known.get(each.ident)):
                ended.append(each.ident)
            if each.state != self._known.get(each.ident, each.state):
                self.say(f"{each.ident} {each.entry.place}: {each.state}{each.why and f' ({each.why})'}")
            self._known[each.ident] = each.state
        if not self.queue.is_paused:
            free = [device for device in self.devices if device not in taken]
            for each in listed:
                if each.state == "waiting":
                    if each.entry.devices > len(free):
                        break  # in order: what needs many devices is not passed by for ever
                    self._start(each, free[: each.entry.devices])
                    free = free[each.entry.devices :]
        for ident in ended:  # last: a message may take seconds
            keeper.tell_end(self.queue, ident)
        return listed

    def _held(self, each: Listed) -> set[str]:
        """Devices of an entry that has processes; those without their training are ended."""
        begun = self.queue.document(each.ident, "begun")
        started = [(begun.get(name), begun.get(f"{name}_started")) for name in ("training", "keeper")]
        there = begun.get("attempt") == each.entry.attempt and begun.get("training")
        if there and not any(processes.lives(*one) for one in started):
            self.queue.kill(each)
        given = self.queue.document(each.ident, "devices").get("devices")
        return {str(device) for device in given} if isinstance(given, list) else set(self.devices)

    def _start(self, each: Listed, devices: Sequence[str]) -> None:
        """Begins the present attempt of an entry, unless a process of it lives."""
        path, ident = self.queue.path, each.ident
        lock = os.open(path / f"{ident}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not system.try_lock(lock):
                return
            write_json_atomically(path / f"{ident}.devices.json", {"devices": list(devices)})
            visible = {VISIBLE: ",".join(devices)} if any(devices) else {}
            command = [sys.executable, "-m", "daguerre.queue.keeper", str(path), ident, str(each.entry.attempt)]
            with (path / f"{ident}.log").open("ab") as log:
                # The lock goes with the processes: it is theirs from the moment at which they exist.
                child = subprocess.Popen(
                    [*command, str(lock), *self.program], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, **visible}, start_new_session=True, pass_fds=(lock,),
                )  # fmt: skip
        finally:
            os.close(lock)
        self._children.append(child)
        self._known[ident] = "running"
        on = f" on {', '.join(devices)}" if any(devices) else ""
        self.say(f"{ident} {each.entry.place}: started{on}")


def devices_of_this_machine() -> list[str]:
    """Names of the GPUs that a process may see; one without a name on a machine without GPUs."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()] or [""]
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return [str(number) for number in range(count)] or [""]
