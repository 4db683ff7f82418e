"""Counts of what was left out, by reason, with a few examples: what data.json and the report show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SkipReport = Mapping[str, Mapping[str, Any]]
"""{reason: {"count": n, "examples": [a few names], "kept": whether they are trained on all the same}}."""
Counts = dict[str, dict[str, Any]]
"""A SkipReport in the making."""
EXAMPLES = 5


def add(counts: Counts, reason: str, name: str, kept: bool = False) -> None:
    """Counts one more `name` under `reason`, left out or (`kept`) only worth a note; the first few names stay."""
    entry = counts.setdefault(reason, {"count": 0, "examples": [], "kept": kept})
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
        f"  {entry['count']:>7,}  {reason}: {', '.join(entry['examples'])}{', ...' * (entry['count'] > EXAMPLES)}"
        for reason, entry in report.items()
    )
