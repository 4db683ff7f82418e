"""Calls that not every system has, in one place: locks of files, cores, processes, and the memory of this one.

They are POSIX's, and run on Linux and macOS. On Windows locks of this kind do not exist: run under WSL.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
    import resource
except ImportError:  # pragma: no cover - Windows
    print("daguerre: this system has no POSIX locks. On Windows, run it under WSL (wsl --install)", file=sys.stderr)
    raise SystemExit(2) from None

_CPU_FACTS = Path("/proc/cpuinfo")
ENDED = ("Z", "X")
"""States of a process that has ended, and whose exit code nobody has asked for."""
_MAPPED_FROM, _KEPT_FREE = -3, -1
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's mallopt."""
_NO_LONGER_NEEDED = 4
"""MADV_DONTNEED on Linux, where `mappings` finds some."""


def lock(descriptor: int) -> None:
    """Holds an open file among all processes of this machine; waits for it. The kernel lets go when the file is closed,
    also of a process that is killed. OSError where its file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """The same at once, or not at all: False where another process holds it. `shared`: together with others that only
    look."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_bytes(descriptor: int, start: int, length: int) -> bool:
    """Holds a range of the bytes of an open file, or returns False where another process holds one of them."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except (BlockingIOError, PermissionError):
        return False
    return True


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_facts() -> str:
    """The kernel's description of the processor; empty where it gives none."""
    return _CPU_FACTS.read_text(errors="replace") if _CPU_FACTS.exists() else ""


class Process(NamedTuple):
    """A process as the kernel has it. Another one that gets its number later has another start."""

    state: str
    """The kernel's letter for what it does; `T` is stopped."""
    started: str
    """The moment of its start, in ticks since the machine's."""


def process(pid: int) -> Process | None:
    """A process of this machine, by Linux's /proc; None for one that is gone, and on other systems."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # behind the name, which may hold anything
        return Process(fields[0], fields[19])
    except (OSError, IndexError):
        return None


def boot() -> str:
    """The kernel's name for this start of the machine; empty where it gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Gpu(NamedTuple):
    """One GPU, as its driver sees it."""

    busy_percent: int | None
    """None of a card that is cut into parts (MIG), of which the driver does not say it."""
    used_bytes: int
    total_bytes: int


def gpus() -> list[Gpu]:
    """The GPUs of this machine by nvidia-smi, with what all programs do on them; [] without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = [program, "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in said.splitlines()]
    return [
        Gpu(int(busy) if busy.isdecimal() else None, int(used) << 20, int(total) << 20)
        for busy, used, total in (row for row in rows if len(row) == 3)
        if used.isdecimal() and total.isdecimal()
    ]


def load() -> float:
    """Processes that wait for a core or have one, by the mean of the last minute."""
    return os.getloadavg()[0]


def peak_resident_bytes() -> int:
    """The most memory that this process has had in use."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


@contextmanager
def large_pieces_apart() -> Iterator[None]:
    """Within the block large pieces of memory are the system's again as soon as they are freed, where the C library
    has a call for it (glibc). Else a wide weight leaves a hole between the narrow ones that were made of others, which
    later passes fill. Afterwards only those from 32 MiB on are, as where a program has freed one of these."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    if tell is None:
        yield
        return
    tell(_MAPPED_FROM, 1 << 20)
    try:
        yield
    finally:
        tell(_MAPPED_FROM, 32 << 20)  # what glibc itself arrives at; faulting pages in takes time
        tell(_KEPT_FREE, 64 << 20)


def mappings(path: Path) -> list[tuple[int, int]]:
    """Addresses, from and to, at which this process has mapped a file; [] where the system does not tell."""
    table, own = Path("/proc/self/maps"), str(path.resolve())
    lines = table.read_text().splitlines() if table.exists() else []
    found = [line.split(maxsplit=5) for line in lines]
    spans = [each[0].split("-") for each in found if len(each) == 6 and each[5] == own]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def give_back(spans: list[tuple[int, int]], address: int, length: int) -> None:
    """Takes bytes that were read from a file mapped at `spans` out of memory; whoever reads them again gets them from
    the file. Nothing may have been written to them. Bytes elsewhere stay."""
    if not any(start <= address and address + length <= end for start, end in spans):
        return
    page = os.sysconf("SC_PAGESIZE")
    start, end = -(-address // page) * page, (address + length) // page * page
    if end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _NO_LONGER_NEEDED)
