"""What was left out, by reason: the counts that data.json and the report show, and the list in skipped.jsonl.

Samples that are trained on all the same, such as those with a cut caption, are counted likewise, but not listed.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from daguerre.errors import UserError
from daguerre.unicode import printable

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
RECENT = 10_000
"""Slots that the recent rate is of, where a pass over the data is not shorter."""
RECENT_LIMIT = 0.25
"""Least share of the recent slots that stops a run: something has broken down. One bad shard among many lanes has
less."""
DOUBT, RECENT_DOUBT = 3, 5
"""Standard deviations of a count by which it must be above the limit at any moment: so often looked at, a rate below it
would be above it some time by chance. More for the recent rate, which is looked at as long as a run lasts."""


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
        entry["examples"].append(printable(name))


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
    if count >= FEWEST and _above(limit, count, looked):
        raise _too_many(limit, f"{count:,} of {looked:,}", report)


def _above(limit: float, count: int, looked: int, doubt: int = 0) -> bool:
    return count - doubt * math.sqrt(count) > limit * looked


def _too_many(limit: float, share: str, report: SkipReport) -> UserError:
    return UserError(
        f"{share} samples cannot be used, more than data.max_skipped={limit:g} allows:\n{table(report)}\n"
        "Mend the data (`daguerre data verify` finds all of them), or set data.max_skipped higher to train without them"
    )


def _nobody(line: str) -> None:
    pass


class Look(NamedTuple):
    """What one rank found in a stretch of slots; JSON."""

    position: int
    """The first slot."""
    slots: int
    looked: int
    """Samples among them that were not looked at before."""
    first: int
    """Rows before this one were counted before a restart."""
    failures: Sequence[tuple[int, str, str, bool, int]]
    """Row, name, reason, whether the sample is kept, id."""


@dataclass
class Skips:
    """Samples that could not be used as they are; each is counted once for a reason, when it is first found."""

    limit: float = 1.0
    """Share of damaged samples above which the run stops."""
    file: Path | None = None
    """Gets a line for each that is left out: skipped.jsonl."""
    say: Callable[[str], None] = _nobody
    """Gets lines for the person at the terminal, few however many there are."""
    reasons: Counts = field(default_factory=dict)
    """{reason: {"count": n, "examples": [names]}}: as data.json and checkpoints hold it."""
    found: dict[str, set[int]] = field(default_factory=dict)
    """{reason: ids of the samples that are counted under it}."""
    counted_slots: int = 0
    """Slots of the plan up to which was looked: what is seen again after a restart is not counted again."""
    slots: int = 0
    """How many of them were looked at here."""
    looked: int = 0
    """Different samples that were looked at."""
    recent: deque[int] = field(default_factory=deque)
    """Which of the last `slots` were left empty, ascending."""

    def look(
        self, position: int, keys: np.ndarray, failures: Sequence[Failure], pass_samples: int | None = None
    ) -> None:
        """Counts what was found in the slots from `position` on, whose keys are [n, 3]; see `take`."""
        self.take(self.seen(position, keys, failures), pass_samples)

    def seen(self, position: int, keys: np.ndarray, failures: Sequence[Failure]) -> Look:
        """What was found in the slots from `position` on, whose keys are [n, 3], to be counted by `take`: here, or on
        all ranks. A rank knows of the slots that were counted before a restart."""
        first = min(max(self.counted_slots - position, 0), len(keys))
        looked = int(((keys[first:, 1] == 0) & (keys[first:, 2] == 0)).sum())
        found = [(*failure, int(keys[failure.row, 0])) for failure in failures]
        return Look(position, len(keys), looked, first, found)

    def take(self, look: Look, pass_samples: int | None = None) -> None:
        """Counts what was found; `pass_samples` slots are a pass over the data (None: it has no end).

        UserError where damaged samples are more than `limit`: of all after a pass, of all or of the recent slots beyond
        doubt at any time.
        """
        failures = [(Failure(row, name, reason, kept), number) for row, name, reason, kept, number in look.failures]
        new = [(failure, sample_id) for failure, sample_id in failures if self._remember(sample_id, failure.reason)]
        self._note([failure for failure, _ in new if failure.kept])
        for failure, _ in new:
            add(self.reasons, failure.reason, failure.name, failure.kept)
            if not failure.kept:
                self._say(failure, self.reasons[failure.reason]["count"])
        self._list([(failure, sample_id) for failure, sample_id in new if not failure.kept])
        before, recent_slots = self.counted_slots, min(RECENT, pass_samples or RECENT)
        self._move(look, {failure.row for failure, _ in failures if not failure.kept}, recent_slots)
        whole = pass_samples is not None and before // pass_samples < self.counted_slots // pass_samples
        if failures or whole:
            self._refuse(recent_slots, 0 if whole else DOUBT)

    def _remember(self, sample_id: int, reason: str) -> bool:
        """Whether this was not known."""
        known = self.found.setdefault(reason, set())
        before = len(known)
        known.add(sample_id)
        return len(known) > before

    def _move(self, look: Look, empty: set[int], recent_slots: int) -> None:
        """Takes in the slots that were not looked at before; the rows `empty` have no sample."""
        self.looked += look.looked
        self.recent.extend(self.slots + row - look.first for row in range(look.first, look.slots) if row in empty)
        self.slots += look.slots - look.first
        while self.recent and self.recent[0] < self.slots - recent_slots:
            self.recent.popleft()
        self.counted_slots = max(self.counted_slots, look.position + look.slots)

    def _refuse(self, recent_slots: int, doubt: int) -> None:
        count, slots = unusable(self.reasons), min(self.slots, recent_slots)
        if count >= FEWEST and _above(self.limit, count, self.looked, doubt):
            raise _too_many(self.limit, f"{count:,} of {self.looked:,}", self.reasons)
        if count >= FEWEST and _above(max(self.limit, RECENT_LIMIT), len(self.recent), slots, RECENT_DOUBT):
            raise _too_many(self.limit, f"{len(self.recent):,} of the last {slots:,}", self.reasons)

    def _note(self, kept: Sequence[Failure]) -> None:
        """Says a reason once, when it first comes up; how many there are is in data.json and in the report."""
        for reason in dict.fromkeys(failure.reason for failure in kept if failure.reason not in self.reasons):
            names = [failure.name for failure in kept if failure.reason == reason]
            shown = ", ".join(names[:SAID]) + ", ..." * (len(names) > SAID)
            self.say(f"noted: {reason}: {shown} (others are counted, not said)")

    def _say(self, failure: Failure, count: int) -> None:
        if count <= SAID:
            self.say(f"left out: {failure.name}: {failure.reason}")
        elif str(count).strip("0") == "1":
            self.say(f"left out so far: {count:,} x {failure.reason}")

    def _list(self, failures: Sequence[tuple[Failure, int]]) -> None:
        if self.file is None or not failures:
            return
        # Half a character (of a name that is no UTF-8) becomes its JSON escape.
        with self.file.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for (_, name, reason, _), sample_id in failures:
                line = {"name": name, "reason": reason, "sample_id": sample_id}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def document(self) -> dict[str, Any]:
        """What a checkpoint holds; 11 bytes for each sample that was found."""
        return {
            "reasons": copy.deepcopy(self.reasons),
            "found": {reason: _packed(ids) for reason, ids in self.found.items()},
            "counted_slots": self.counted_slots,
            "slots": self.slots,
            "looked": self.looked,
            "recent": list(self.recent),
        }

    def restore(self, document: Mapping[str, Any]) -> None:
        """Takes over what `document` gave, and cuts lines of the list that are newer."""
        self.reasons = copy.deepcopy(dict(document["reasons"]))
        self.found = {reason: _unpacked(text) for reason, text in document["found"].items()}
        self.counted_slots, self.slots = document["counted_slots"], document["slots"]
        self.looked, self.recent = document["looked"], deque(document["recent"])
        self._cut_list(sum(entry["count"] for entry in self.reasons.values() if not entry.get("kept")))

    def begin(self) -> None:
        """For a run without a checkpoint: what a start that was killed has listed is found again."""
        self._cut_list(0)

    def _cut_list(self, number: int) -> None:
        """Keeps the first lines of the list: a kill leaves the old file or the new one."""
        if self.file is None or not self.file.exists():
            return
        lines = self.file.read_bytes().splitlines(keepends=True)
        # An older version listed what was trained on all the same, too.
        kept = [line for line in lines if line.endswith(b"\n") and b'"kept": true' not in line][:number]
        if len(kept) == len(lines):
            return
        temporary = self.file.with_name(f".{self.file.name}.tmp")
        with temporary.open("wb") as file:
            file.write(b"".join(kept))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.file)


def _packed(ids: set[int]) -> str:
    return base64.b64encode(np.sort(np.array(list(ids), dtype="<i8")).tobytes()).decode("ascii")


def _unpacked(text: str) -> set[int]:
    return set(np.frombuffer(base64.b64decode(text), dtype="<i8").tolist())
