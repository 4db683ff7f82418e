"""Processes of this machine that are known by more than a number, which another process may have by now."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


def started(pid: int) -> str:
    """The boot and the moment at which a process was started; empty for one that is gone, or where Linux's /proc is
    not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else f"{boot} {fields[19]}"
    except (OSError, IndexError):
        return ""


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
