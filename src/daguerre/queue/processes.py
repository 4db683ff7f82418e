"""Processes of this machine that are known by more than a number, which another process may have by now."""

import os
import signal
from contextlib import suppress
from typing import Any

from daguerre import system


def started(pid: int) -> str:
    """The boot and the moment at which a process was started; empty for one that is gone, or where Linux's /proc is
    not."""
    found, boot = system.process(pid), system.boot()
    if found is None or found.state in system.ENDED or not boot:
        return ""
    return f"{boot} {found.started}"


def lives(pid: Any, when: Any) -> bool:
    """True of the process of that number which was started then."""
    if not isinstance(pid, int) or pid <= 1:
        return False
    if when:
        return started(pid) == when
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def send(pid: Any, when: Any, number: signal.Signals) -> None:
    """Signals a process that leads a group: SIGKILL to all of the group, also where the leader is gone and others have
    stayed; what is another's by now is left alone."""
    if not isinstance(pid, int) or pid <= 1:
        return
    with suppress(ProcessLookupError, PermissionError):
        if number != signal.SIGKILL:
            if lives(pid, when):
                os.kill(pid, number)
        elif lives(pid, when) or not started(pid):  # the kernel gives no number to a process while a group has it
            os.killpg(pid, number)
