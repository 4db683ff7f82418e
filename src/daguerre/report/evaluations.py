"""The page's part on what `daguerre evaluate` has measured: tables over checkpoints, curves, and the protocol of each.

result.json is `{"protocol": {...}, "tables": {NAME: {"count", "rows": [{"name", "value", "share", ...}], "note",
"made_with"}}}`; whatever is missing or of another kind is left out.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, TypeGuard

from daguerre.report.charts import between
from daguerre.report.html import Html, element, join, table, when
from daguerre.report.run import Run
from daguerre.report.svg import Series, chart, format_number

_SHOWN = ("checkpoint", "weights", "images", "height", "width", "sampler", "num_inference_steps", "seed", "precision")
_CURVES = ("fid-", "fd_dinov2-", "cmmd-")
_OF_ONE = ("run", "checkpoint", "step")
"""Entries of a protocol by which its results over steps and runs differ."""


class Point(NamedTuple):
    """A table of one result."""

    name: str
    step: int
    document: dict[str, Any]
    """The whole result."""
    body: dict[str, Any]

    @property
    def protocol(self) -> dict[str, Any]:
        found = self.document.get("protocol")
        return found if isinstance(found, dict) else {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        listed = self.body.get("rows")
        rows = listed if isinstance(listed, list) else []
        return [row for row in rows if isinstance(row, dict) and _is_number(row.get("value"))]


def protocol_name(protocol: Mapping[str, Any]) -> str:
    """A short name that evaluations of other images, guidance, sampler, prompts and the like do not have: equal for all
    checkpoints, and for runs that are measured in the same way."""
    shared = {name: value for name, value in protocol.items() if name not in _OF_ONE}
    digest = sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:4]
    guidance = f"-guidance-{scale}" if (scale := _guidance(protocol)) else ""
    return f"{protocol.get('images', 0)}-images{guidance}-{digest}"


def tables(run: Run) -> Html | None:
    """A table for each metric with a row for each checkpoint and protocol; None if nothing was measured."""
    by_name: dict[str, list[Point]] = {}
    for point in _points(run):
        by_name.setdefault(point.name, []).append(point)
    shown = [_table(name, points) for name, points in by_name.items()]
    return join(*shown, _protocols(run)) if shown else None


def charts(run: Run) -> list[Html]:
    """The first number of each metric over steps, and the curve of a sweep over guidance scales."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in _points(run):
        if point.rows:
            unit = "per cent" if point.rows[0].get("share", True) else str(point.rows[0].get("name"))
            value = point.rows[0]["value"] * (100 if unit == "per cent" else 1)
            lines = found.setdefault(f"{point.name}\n{unit}", {})
            lines.setdefault(protocol_name(point.protocol), []).append((point.step, value))
    drawn = []
    for key, lines in found.items():
        name, _, unit = key.partition("\n")
        series = [_series(line, sorted(points), i, len(lines)) for i, (line, points) in enumerate(lines.items())]
        if any(len({*one.xs}) > 1 for one in series):
            drawn.append(chart(name, unit, series))
    return [one for one in [*drawn, *_sweeps(run)] if one is not None]


def _sweeps(run: Run) -> Iterator[Html | None]:
    """Distance over CLIP score, from one guidance scale to the next, of each checkpoint and protocol."""
    sweeps: dict[tuple[int, str], dict[float, dict[str, float]]] = {}
    for point in _points(run):
        scale = point.protocol.get("guidance_scale")
        if _is_number(scale) and point.rows:
            rest = protocol_name({name: value for name, value in point.protocol.items() if name != "guidance_scale"})
            scales = sweeps.setdefault((point.step, rest), {})
            scales.setdefault(float(scale), {})[point.name] = point.rows[0]["value"]
    names = sorted({point.name for point in _points(run)})
    for distance in [name for name in names if name.startswith(_CURVES)]:
        for score in [name for name in names if name.startswith("clip_score-")]:
            curves = []
            for i, ((step, rest), scales) in enumerate(sorted(sweeps.items())):
                both = {scale: v for scale, v in sorted(scales.items()) if {score, distance} <= v.keys()}
                if len(both) > 1:
                    points = [(v[score], v[distance]) for v in both.values()]
                    labels = [f"{scale:g}" for scale in both]
                    curves.append(_series(f"step {step:,}, {rest}", points, i, len(sweeps), labels))
            yield chart(f"{distance} over CLIP score", "labels: guidance scale", curves, over="CLIP score")


def _series(
    name: str, points: Sequence[tuple[float, float]], number: int, count: int, labels: Sequence[str] = ()
) -> Series:
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    return Series(name, xs, ys, between(number, count), dots=True, labels=labels)


def _points(run: Run) -> Iterator[Point]:
    for document in run.evaluations:
        protocol, found = document.get("protocol"), document.get("tables")
        step = protocol.get("step", 0) if isinstance(protocol, dict) else 0
        for name, body in found.items() if isinstance(found, dict) else ():
            if isinstance(body, dict) and isinstance(step, int):
                yield Point(str(name), step, document, body)


def _table(name: str, points: list[Point]) -> Html:
    names = list(dict.fromkeys(str(row.get("name")) for point in points for row in point.rows))
    several = len({protocol_name(point.protocol) for point in points}) > 1
    rows: list[list[object]] = []
    for point in points:
        values = {str(row.get("name")): _value(row) for row in point.rows}
        # Numbers of two protocols are of different things; where they stand in one table, each says which.
        own = [protocol_name(point.protocol)] if several else []
        rows.append([f"{point.step:,}", *own, _images(point.body), *(values.get(each, "") for each in names)])
    shown = (each.replace("_", " ") for each in names)
    head = ["Step", *(["Protocol"] * several), "Images", *shown]
    notes = dict.fromkeys(str(point.body.get(kind) or "") for kind in ("note", "warning") for point in points)
    return join(
        element("h3", name),
        table(head, rows, f"numbers{' by-protocol' * several}"),
        *(element("p", note, class_="note") for note in notes if note),
    )


def _images(body: Mapping[str, Any]) -> str:
    count, asked = body.get("count"), body.get("asked")
    if not isinstance(count, int):
        return ""
    return f"{count:,} (asked: {asked:,})" if isinstance(asked, int) else f"{count:,}"


def _guidance(protocol: Mapping[str, Any]) -> str:
    scale = protocol.get("guidance_scale")
    return f"{scale:g}" if _is_number(scale) else ""


def _value(row: dict[str, Any]) -> str:
    factor, unit = (100, " %") if row.get("share", True) else (1, "")
    value = f"{factor * row['value']:.1f}{unit}" if unit else format_number(row["value"])
    low, high = row.get("low"), row.get("high")
    return f"{value} ({format_number(low)} to {format_number(high)})" if _is_number(low) and _is_number(high) else value


def _protocols(run: Run) -> Html:
    """The protocol that each result belongs to."""
    rows: list[list[object]] = []
    for document in run.evaluations:
        protocol = document.get("protocol")
        protocol = protocol if isinstance(protocol, dict) else {}
        facts = ", ".join(f"{name} {protocol[name]}" for name in _SHOWN if name in protocol)
        prompts = f"{protocol.get('prompts', '')} {str(protocol.get('prompts_sha256', ''))[:12]}"
        software = document.get("software")
        versions = ", ".join(f"{k} {v}" for k, v in software.items()) if isinstance(software, dict) else ""
        guidance = _guidance(protocol)
        name = protocol_name(protocol)
        rows.append([name, facts, guidance, prompts, _made_with(document), versions, when(document.get("time"))])
    head = ["Name", "Protocol", "Guidance", "Prompts (SHA-256)", "Networks and reference", "Software", "Measured"]
    return element("details", element("summary", "Protocols"), table(head, rows, "plain cards protocols"))


def _made_with(document: dict[str, Any]) -> str:
    """Networks with their digests, and references with theirs, of all tables."""
    found: dict[str, None] = {}
    tables_ = document.get("tables")
    for body in tables_.values() if isinstance(tables_, dict) else ():
        made = body.get("made_with") if isinstance(body, dict) else None
        if isinstance(made, dict) and "network" in made:
            found[f"{made['network']} {str(made.get('digest'))[:12]} ({made.get('resize')})"] = None
        reference = made.get("reference") if isinstance(made, dict) else None
        if isinstance(reference, dict):
            found[f"reference {reference.get('file')} {str(reference.get('sha256'))[:12]}"] = None
    return "; ".join(found)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
