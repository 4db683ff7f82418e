"""The failure that ends a run on several devices: its message, the ranks at fault, and the exit code."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from daguerre.distributed.watchdog.processes import Peer
from daguerre.errors import LOST, STUCK

Kind = Literal["failed", "gone", "silent", "stuck", "orphaned"]


@dataclass(frozen=True)
class Failure:
    """The root cause, the same on every rank that is left."""

    kind: Kind
    ranks: tuple[int, ...]
    """The ranks at fault; empty where nobody can say."""
    text: str
    """For people, in one line or more."""
    size: int
    """Processes of the run."""

    @property
    def code(self) -> int:
        """Exit code of the other processes."""
        return STUCK if self.kind == "stuck" else LOST

    @property
    def stacks(self) -> bool:
        """True if every rank writes where its threads stand."""
        return self.kind in ("stuck", "silent")

    @property
    def writer(self) -> int:
        """The rank that writes the status: the first one that is not at fault, as one at fault may be gone."""
        return next((rank for rank in range(self.size) if rank not in self.ranks), 0)


def from_document(document: dict[str, Any]) -> Failure:
    """A failure that another rank sent."""
    return Failure(**{**document, "ranks": tuple(document["ranks"])})


@dataclass(frozen=True)
class Limits:
    """Longest times without progress, and without a sign of life."""

    stuck_seconds: float
    silent_seconds: float


@dataclass(frozen=True)
class Report:
    """A rank's state, sent with each beat."""

    count: int
    """Grows with every sign that it got further."""
    step: int
    doing: str
    """For people: the phase it is in."""
    allowed_seconds: float | None
    """Longest time of the phase; None for as long as it likes."""
    place: str
    """Position of its main thread in the code."""
    waits: bool
    """True if it waits for other ranks there."""

    def __str__(self) -> str:
        return f"step {self.step:,}, {self.doing}, in {self.place}{', waiting for others' if self.waits else ''}"


def failed(peer: Peer, why: str, size: int) -> Failure:
    """A rank that said so."""
    return Failure("failed", (peer.rank,), f"{peer} failed: {why}", size)


def gone(peers: Mapping[int, Peer], ranks: Collection[int], size: int) -> Failure:
    """Ranks that ended without a word."""
    ended = "its process" if len(ranks) == 1 else "their processes"
    why = f"{ended} ended without a message, as after a kill (often by the system, out of memory)"
    return Failure(
        "gone", tuple(ranks), f"{_listed(peers, ranks)} {'is' if len(ranks) == 1 else 'are'} gone: {why}", size
    )


def silent(peers: Mapping[int, Peer], ranks: Collection[int], size: int, limits: Limits) -> Failure:
    """Ranks of which nothing is heard."""
    stopped = [rank for rank in ranks if rank in peers and peers[rank].state == "T"]
    why = f"{named(stopped)} stopped by a signal (SIGSTOP)" if stopped else "stopped, swapping, or out of reach"
    text = f"{_listed(peers, ranks)} did not respond for {limits.silent_seconds:g} s (silent_seconds): {why}"
    return Failure("silent", tuple(ranks), text, size)


def stuck(
    peers: Mapping[int, Peer], reports: Mapping[int, Report], quiet: Collection[int], size: int, seconds: float
) -> Failure:
    """No rank got any further: at fault is who is not heard; else who stands elsewhere than in a wait for others; else
    who is behind."""
    suspects = _suspects(reports, quiet)
    who = _listed(peers, suspects) if suspects else "which rank is not known"
    lines = [f"stuck: no rank made a step for {seconds:.3g} s (stuck_seconds): {who}"]
    for text, count in Counter(str(reports[rank]) for rank in sorted(reports)).most_common():
        at = [rank for rank in reports if str(reports[rank]) == text]
        lines.append(f"  {named(at)}: {text}" + (" (when last heard)" if set(at) & set(quiet) and count else ""))
    return Failure("stuck", tuple(suspects), "\n".join(lines), size)


def _suspects(reports: Mapping[int, Report], quiet: Collection[int]) -> list[int]:
    if quiet:
        return sorted(quiet)
    least = min(report.step for report in reports.values())
    groups = (
        [rank for rank, report in reports.items() if not report.waits],
        [rank for rank, report in reports.items() if report.step == least],
    )
    return next((sorted(ranks) for ranks in groups if 0 < len(ranks) < len(reports) or len(reports) == 1), [])


def _listed(peers: Mapping[int, Peer], ranks: Collection[int]) -> str:
    if len(ranks) > 1:
        hosts = sorted({peers[rank].host for rank in ranks if rank in peers})
        return f"{named(ranks)} ({', '.join(hosts)})" if hosts else named(ranks)
    (rank,) = ranks
    return str(peers[rank]) if rank in peers else named(ranks)


def named(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-3, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
