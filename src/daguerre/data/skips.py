"""What was left out, by reason: the counts that data.json and the report show, and the list in skipped.jsonl."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from daguerre.errors import UserError

SkipReport = Mapping[str, Mapping[str, Any]]
"""{reason: {"count": n, "examples": [a few names], "kept": whether they are trained on all the same}}; also
"damage": False where nothing is broken: there is no picture or no caption to begin with."""
Counts = dict[str, dict[str, Any]]
"""A SkipReport in the making."""
EXAMPLES = 5
SAID = 3
"""Samples a reason that are said at the terminal; after that every tenfold count is."""
FEWEST = 10
"""Damaged samples below which no rate stops a run."""


class Failure(NamedTuple):
    """A sample of a batch that could not be used as it is."""

    row: int
    name: str
    reason: str
    kept: bool = False
    """Whether it is trained on all the same."""


def add(counts: Counts, reason: str, name: str, kept: bool = False, damage: bool = True) -> None:
    """Counts one more `name` under `reason`, left out or (`kept`) only worth a note; the first few names stay."""
    entry = counts.setdefault(
        reason, {"count": 0, "examples": [], "kept": kept} | ({} if damage else {"damage": False})
    )
    entry["count"] += 1
    if len(entry["examples"]) < EXAMPLES:
        entry["examples"].append(name)


def merged(*reports: SkipReport) -> Counts:
    """The sum of several reports; examples of the first come first."""
    total: Counts = {}
    for report in reports:
        for reason, entry in report.items():
            mine = total.setdefault(reason, {**entry, "count": 0, "examples": []})
            mine["count"] += entry["count"]
            mine["examples"] = [*mine["examples"], *entry["examples"]][:EXAMPLES]
    return total


def table(report: SkipReport) -> str:
    """One line a reason: count and examples; for messages."""
    return "\n".join(
        f"  {entry['count']:>7,}  {reason}"
        + (f": {', '.join(entry['examples'])}{', ...' * (entry['count'] > EXAMPLES)}" if entry["examples"] else "")
        for reason, entry in report.items()
    )


def unusable(report: SkipReport) -> int:
    """How many were left out because something is broken."""
    return sum(entry["count"] for entry in report.values() if not entry.get("kept") and entry.get("damage", True))


def refuse_above(limit: float, report: SkipReport, looked: int) -> None:
    """UserError where more than `limit` of `looked` samples were left out, and `FEWEST` at least."""
    count = unusable(report)
    if count >= FEWEST and count > limit * looked:
        raise UserError(
            f"{count:,} of {looked:,} samples cannot be used, more than data.max_skipped={limit:g} allows:\n"
            f"{table(report)}\n"
            "Mend the data (`daguerre data verify` finds all of them), or set data.max_skipped higher to train without "
            "them"
        )


def _nobody(line: str) -> None:
    pass


@dataclass
class Skips:
    """Samples that could not be used as they are; each is counted once, in the first pass over it that met it."""

    limit: float = 1.0
    """Share of damaged samples above which the run stops."""
    file: Path | None = None
    """Gets a line for each: skipped.jsonl."""
    say: Callable[[str], None] = _nobody
    """Gets lines for the person at the terminal, few however many there are."""
    reasons: Counts = field(default_factory=dict)
    """{reason: {"count": n, "examples": [names]}}: as data.json and checkpoints hold it."""
    counted_slots: int = 0
    """Slots of the plan that were looked at: what is seen again after a restart is not counted again."""
    looked: int = 0
    """Different samples that were looked at."""

    def look(self, position: int, keys: np.ndarray, failures: Sequence[Failure]) -> None:
        """Counts what was found in the slots from `position` on, whose keys are [n, 3].

        UserError where damaged samples are more than `limit` of all.
        """
        fresh = np.arange(position, position + len(keys)) >= self.counted_slots
        fresh &= (keys[:, 1] == 0) & (keys[:, 2] == 0)
        new = [failure for failure in failures if fresh[failure.row]]
        for failure in new:
            skips_before = self.reasons.get(failure.reason, {"count": 0})["count"]
            add(self.reasons, failure.reason, failure.name, failure.kept)
            self._say(failure, skips_before + 1)
        self._list(keys, new)
        self.looked += int(fresh.sum())
        self.counted_slots = max(self.counted_slots, position + len(keys))
        if new:
            refuse_above(self.limit, self.reasons, self.looked)

    def _say(self, failure: Failure, count: int) -> None:
        if count <= SAID:
            self.say(f"{'noted' if failure.kept else 'left out'}: {failure.name}: {failure.reason}")
        elif str(count).strip("0") == "1":
            self.say(f"{'noted' if failure.kept else 'left out'} so far: {count:,} x {failure.reason}")

    def _list(self, keys: np.ndarray, failures: Sequence[Failure]) -> None:
        if self.file is None or not failures:
            return
        with self.file.open("a", encoding="utf-8") as file:
            for row, name, reason, kept in failures:
                line = {"name": name, "reason": reason, "kept": kept, "sample_id": int(keys[row, 0])}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def document(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"reasons": copy.deepcopy(self.reasons), "counted_slots": self.counted_slots, "looked": self.looked}

    def restore(self, document: Mapping[str, Any]) -> None:
        """Takes over what `document` gave, and cuts lines of the list that are newer."""
        self.reasons = copy.deepcopy(dict(document["reasons"]))
        self.counted_slots, self.looked = document["counted_slots"], document["looked"]
        if self.file is not None and self.file.exists():
            lines = self.file.read_bytes().splitlines(keepends=True)
            self.file.write_bytes(b"".join(lines[: sum(entry["count"] for entry in self.reasons.values())]))
