"""Skipped samples by reason: the counts in data.json and the report, and the list in skipped.jsonl.

Samples that are trained on all the same, such as those with a truncated caption, are counted but not listed.
"""

import base64
import copy
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.errors import UserError
from daguerre.unicode import printable

SkipReport = Mapping[str, Mapping[str, Any]]
"""{reason: {"count": n, "examples": [a few names], "kept": whether they are trained on all the same}}; also
"damage": False if nothing is broken: there is no image or no caption to begin with."""
Counts = dict[str, dict[str, Any]]
"""A SkipReport in the making."""
EXAMPLES = 5
EXAMPLES_SHOWN = 3
"""Samples a reason that are named at the terminal; after that every tenfold count is."""
FEWEST = 10
"""Damaged samples below which no rate stops a run."""
RECENT = 10_000
"""Slots that the recent rate is of, if a pass over the data is not shorter."""
RECENT_LIMIT = 0.25
"""Least share of the recent slots that stops a run. One bad shard among many lanes has less."""
DOUBT, RECENT_DOUBT = 3, 5
"""Standard deviations by which a count must be above the limit between passes, as it is checked so often; more for the
recent rate, which is checked as long as a run lasts."""


class Failure(NamedTuple):
    """A sample of a batch that could not be used as it is."""

    row: int
    name: str
    reason: str
    kept: bool = False
    """True if it is trained on all the same."""


def add(counts: Counts, reason: str, name: str, kept: bool = False, damage: bool = True) -> None:
    """Counts one more `name` under `reason`, left out or (`kept`) only worth a note; the first few names stay."""
    flags = {"kept": kept} if damage else {"kept": kept, "damage": False}
    entry = counts.setdefault(reason, {"count": 0, "examples": [], **flags})
    entry["count"] += 1
    if len(entry["examples"]) < EXAMPLES:
        entry["examples"].append(printable(name))


def counted(counts: Mapping[str, int], kept: bool = False) -> Counts:
    """A report of counts by reason, without examples; without what was found 0 times."""
    return {reason: {"count": count, "examples": [], "kept": kept} for reason, count in counts.items() if count}


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
    lines = []
    for reason, entry in report.items():
        more = ", ..." * (entry["count"] > EXAMPLES)
        examples = f": {', '.join(entry['examples'])}{more}" if entry["examples"] else ""
        lines.append(f"  {entry['count']:>7,}  {reason}{examples}")
    return "\n".join(lines)


def unusable(report: SkipReport) -> int:
    """The number left out because something is broken."""
    return sum(entry["count"] for entry in report.values() if not entry.get("kept") and entry.get("damage", True))


def check_share(limit: float, report: SkipReport, examined: int) -> None:
    """UserError if more than `limit` of `examined` samples were left out, and `FEWEST` at least."""
    count = unusable(report)
    if count >= FEWEST and _above(limit, count, examined):
        raise _too_many(limit, f"{count:,} of {examined:,}", report)


def _above(limit: float, count: int, examined: int, doubt: int = 0) -> bool:
    return count - doubt * math.sqrt(count) > limit * examined


def _too_many(limit: float, share: str, report: SkipReport) -> UserError:
    return UserError(
        f"{share} samples cannot be used, more than data.max_skipped={limit:g} allows:\n{table(report)}\n"
        "Repair the data (`daguerre data verify` finds all of them), or raise data.max_skipped to train without them",
        code="damaged",
        setting="data.max_skipped",
    )


class SkipEvent(NamedTuple):
    """Findings of one rank in consecutive slots; JSON."""

    position: int
    """The first slot."""
    slots: int
    examined: int
    """Samples among them that were not looked at before."""
    first: int
    """Rows before this one were counted before a restart."""
    failures: Sequence[tuple[int, str, str, bool, int]]
    """Row, name, reason, kept, sample id."""


@dataclass
class Skips:
    """Samples that could not be used as they are; each is counted once a reason, when it is first found."""

    limit: float = 1.0
    """Share of damaged samples above which the run stops."""
    file: Path | None = None
    """skipped.jsonl: gets a line for each that is left out."""
    say: Callable[[str], None] = lambda line: None
    """Gets messages for the terminal, few however many samples there are."""
    reasons: Counts = field(default_factory=dict)
    """As data.json and checkpoints hold it."""
    found: dict[str, set[int]] = field(default_factory=dict)
    """{reason: ids of the samples that are counted under it}."""
    counted_slots: int = 0
    """Slots of the plan that were counted, also before a restart: they are not counted again."""
    slots: int = 0
    """Slots that were counted here."""
    examined: int = 0
    """Different samples that were looked at."""
    recent: deque[int] = field(default_factory=deque)
    """The empty ones of the last `slots`, ascending."""

    def seen(self, position: int, keys: np.ndarray, failures: Sequence[Failure]) -> SkipEvent:
        """Findings in the slots from `position` on, whose keys are [n, 3], to be counted by `take`, here or on all
        ranks."""
        first = min(max(self.counted_slots - position, 0), len(keys))
        examined = int(((keys[first:, 1] == 0) & (keys[first:, 2] == 0)).sum())
        found = [(*failure, int(keys[failure.row, 0])) for failure in failures]
        return SkipEvent(position, len(keys), examined, first, found)

    def take(self, look: SkipEvent, pass_samples: int | None = None) -> None:
        """Counts the findings; `pass_samples` slots are a pass over the data (None: it is endless).

        UserError if damaged samples are more than `limit`: of all after a pass, of all or of the recent slots beyond
        doubt at any time.
        """
        failures = [(Failure(*each[:4]), each[4]) for each in look.failures]
        new = []
        for failure, sample_id in failures:
            known = self.found.setdefault(failure.reason, set())
            if sample_id not in known:
                known.add(sample_id)
                new.append((failure, sample_id))
        self._say_kept([failure for failure, _ in new if failure.kept])
        for failure, _ in new:
            add(self.reasons, failure.reason, failure.name, failure.kept)
            if not failure.kept:
                self._say_left_out(failure, self.reasons[failure.reason]["count"])
        self._list([(failure, sample_id) for failure, sample_id in new if not failure.kept])
        before, recent_slots = self.counted_slots, min(RECENT, pass_samples or RECENT)
        self._advance(look, {failure.row for failure, _ in failures if not failure.kept}, recent_slots)
        whole = pass_samples is not None and before // pass_samples < self.counted_slots // pass_samples
        if failures or whole:
            self._check_limits(recent_slots, 0 if whole else DOUBT)

    def _advance(self, look: SkipEvent, empty: set[int], recent_slots: int) -> None:
        """Moves on over the slots that were not counted before; the rows `empty` have no sample."""
        self.examined += look.examined
        self.recent.extend(self.slots + row - look.first for row in range(look.first, look.slots) if row in empty)
        self.slots += look.slots - look.first
        while self.recent and self.recent[0] < self.slots - recent_slots:
            self.recent.popleft()
        self.counted_slots = max(self.counted_slots, look.position + look.slots)

    def _check_limits(self, recent_slots: int, doubt: int) -> None:
        count, slots = unusable(self.reasons), min(self.slots, recent_slots)
        if count >= FEWEST and _above(self.limit, count, self.examined, doubt):
            raise _too_many(self.limit, f"{count:,} of {self.examined:,}", self.reasons)
        if count >= FEWEST and _above(max(self.limit, RECENT_LIMIT), len(self.recent), slots, RECENT_DOUBT):
            raise _too_many(self.limit, f"{len(self.recent):,} of the last {slots:,}", self.reasons)

    def _say_kept(self, kept: Sequence[Failure]) -> None:
        """Names a reason once, when it first comes up; its count is in data.json and in the report."""
        for reason in dict.fromkeys(failure.reason for failure in kept if failure.reason not in self.reasons):
            names = [failure.name for failure in kept if failure.reason == reason]
            shown = ", ".join(names[:EXAMPLES_SHOWN]) + ", ..." * (len(names) > EXAMPLES_SHOWN)
            self.say(f"noted: {reason}: {shown} (the others are counted but not listed)")

    def _say_left_out(self, failure: Failure, count: int) -> None:
        if count <= EXAMPLES_SHOWN:
            self.say(f"left out: {failure.name}: {failure.reason}")
        elif str(count).strip("0") == "1":
            self.say(f"left out so far: {count:,} x {failure.reason}")

    def _list(self, failures: Sequence[tuple[Failure, int]]) -> None:
        if self.file is None or not failures:
            return
        # Lone surrogates (of a name that is no UTF-8) become JSON escapes.
        with self.file.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for (_, name, reason, _), sample_id in failures:
                line = {"name": name, "reason": reason, "sample_id": sample_id}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def document(self) -> dict[str, Any]:
        """The document for a checkpoint; 11 bytes for each sample that was found."""
        return {
            "reasons": copy.deepcopy(self.reasons),
            "found": {reason: _base64(ids) for reason, ids in self.found.items()},
            "counted_slots": self.counted_slots,
            "slots": self.slots,
            "looked": self.examined,
            "recent": list(self.recent),
        }

    def restore(self, document: Mapping[str, Any]) -> None:
        """Restores a `document`, and removes newer lines from the list."""
        self.reasons = copy.deepcopy(dict(document["reasons"]))
        for reason, text in document["found"].items():
            self.found[reason] = set(np.frombuffer(base64.b64decode(text), dtype="<i8").tolist())
        self.counted_slots, self.slots = document["counted_slots"], document["slots"]
        self.examined, self.recent = document["looked"], deque(document["recent"])
        self._truncate_list(sum(entry["count"] for entry in self.reasons.values() if not entry.get("kept")))

    def begin(self) -> None:
        """Empties the list of a run without a checkpoint: what a killed start has listed is found again."""
        self._truncate_list(0)

    def _truncate_list(self, count: int) -> None:
        """Keeps the first `count` lines of the list, atomically."""
        if self.file is None or not self.file.exists():
            return
        lines = self.file.read_bytes().splitlines(keepends=True)
        # Older versions also listed samples that were kept.
        kept = [line for line in lines if line.endswith(b"\n") and b'"kept": true' not in line][:count]
        if len(kept) < len(lines):
            write_bytes_atomically(self.file, b"".join(kept))


def _base64(ids: set[int]) -> str:
    return base64.b64encode(np.sort(np.array(list(ids), dtype="<i8")).tobytes()).decode("ascii")
