"""The table of evaluation results, with the marks that they had to reach.

evaluation.json is `{metric: {"step": n, "count": n, "rows": [{"name", "value", "must", "aim"}]}}`: values and marks are
shares in [0, 1], higher is better; `must`, `aim`, `step` and `count` may be missing.
"""

from typing import Any

from daguerre.report.html import Html, element, join
from daguerre.report.run import Run

_MARKS = (
    "Measured is the share of the images in which this is right. Must is the least that a run of this recipe has to "
    "reach: below it, something went wrong. Aim is what a good run reaches. The lines in a bar stand where Must and "
    "Aim are."
)


def results(run: Run) -> Html | None:
    """The tables of evaluation.json, else of the metrics, and what their marks mean; None if nothing was evaluated."""
    documents = {name: body for name, body in run.evaluation.items() if isinstance(body, dict) and _rows(body)}
    if not documents:
        return _from_metrics(run)
    has_marks = any(_has_marks(row) for body in documents.values() for row in _rows(body))
    note = element("p", _MARKS, class_="note") if has_marks else None
    return join(*(_table(name, body) for name, body in documents.items()), note)


def _from_metrics(run: Run) -> Html | None:
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for name in sorted({n for line in run.lines for n in line if n.startswith("evaluation/")}):
        _, metric, *rest = name.split("/")
        by_metric.setdefault(metric, []).append({"name": "/".join(rest) or metric, "value": run.last(name)})
    return join(*(_table(metric, {"rows": rows}) for metric, rows in by_metric.items())) if by_metric else None


def _rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    listed = body.get("rows")
    return (
        [row for row in listed if isinstance(row, dict) and _is_share(row.get("value"))]
        if isinstance(listed, list)
        else []
    )


def _has_marks(row: dict[str, Any]) -> bool:
    return _is_share(row.get("must")) or _is_share(row.get("aim"))


def _table(name: str, body: dict[str, Any]) -> Html:
    rows = _rows(body)
    notes = [f"{body['count']:,} images"] if isinstance(body.get("count"), int) else []
    notes += [f"step {body['step']:,}"] if isinstance(body.get("step"), int) else []
    has_marks = any(map(_has_marks, rows))
    head = ["", "", "Measured"] + (["Must", "Aim", ""] if has_marks else [])
    header = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head)))
    values = element("tbody", *(_row(row, has_marks) for row in rows))
    caption = element("caption", element("b", name), " ", ", ".join(notes))
    return element("div", element("table", caption, header, values, class_="results"), class_="scroll")


def _row(row: dict[str, Any], has_marks: bool) -> Html:
    value, must, aim = row["value"], row.get("must"), row.get("aim")
    shown = {name: row[name] for name in ("must", "aim") if _is_share(row.get(name))}
    marks = (element("i", class_=f"mark {name}", style=f"left:{100 * at:.1f}%") for name, at in shown.items())
    verdict, kind = _verdict(value, must, aim)
    fill = element("i", class_=f"fill {kind}", style=f"width:{100 * value:.1f}%")
    cells = [
        element("td", row.get("name", ""), class_="name"),
        element("td", element("div", fill, *marks, class_="bar"), class_="share"),
        element("td", element("b", _percent(value))),
    ]
    if has_marks:
        cells += [element("td", _percent(must)), element("td", _percent(aim)), element("td", verdict, class_=kind)]
    return element("tr", *cells)


def _verdict(value: float, must: Any, aim: Any) -> tuple[str, str]:
    if _is_share(aim) and value >= aim:
        return "aim reached", "good"
    if _is_share(must):
        return ("must reached", "fair") if value >= must else ("below must", "poor")
    return ("below aim", "fair") if _is_share(aim) else ("", "good")


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _percent(value: Any) -> str:
    return f"{100 * value:.1f} %" if _is_share(value) else ""
