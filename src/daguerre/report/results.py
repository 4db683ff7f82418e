"""The table of evaluation results, with the marks that they had to reach.

evaluation.json is `{metric: {"step": n, "count": n, "rows": [{"name", "value", "must", "aim"}]}}`: values and marks are
shares in [0, 1], higher is better; `must`, `aim`, `step` and `count` may be missing.
"""

from typing import Any

from daguerre.report.html import Html, element, join, wide
from daguerre.report.run import Run

_NOTES = {
    "must": "Must is the least that a run of this recipe has to reach: below it, something went wrong.",
    "aim": "Aim is what a good run reaches.",
}
"""What each kind of mark means, by its key in a row."""


def results(run: Run) -> Html | None:
    """The tables of evaluation.json, else of the metrics, and what their marks mean; None if nothing was evaluated."""
    documents = {name: body for name, body in run.evaluation.items() if isinstance(body, dict) and _rows(body)}
    if not documents:
        return _from_metrics(run)
    kinds = _kinds([row for body in documents.values() for row in _rows(body)])
    note = element("p", _note(kinds), class_="note") if kinds else None
    return join(*(_table(name, body) for name, body in documents.items()), note)


def _note(kinds: list[str]) -> str:
    first, last = "Measured is the share of the images in which this is right.", "Lines in a bar stand at these marks."
    return " ".join([first, *(_NOTES[kind] for kind in kinds), last])


def _from_metrics(run: Run) -> Html | None:
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for name in run.curves.names("evaluation/"):
        _, metric, *rest = name.split("/")
        by_metric.setdefault(metric, []).append({"name": "/".join(rest) or metric, "value": run.curves.last(name)})
    return join(*(_table(metric, {"rows": rows}) for metric, rows in by_metric.items())) if by_metric else None


def _rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    listed = body.get("rows")
    return (
        [row for row in listed if isinstance(row, dict) and _is_share(row.get("value"))]
        if isinstance(listed, list)
        else []
    )


def _kinds(rows: list[dict[str, Any]]) -> list[str]:
    """The kinds of marks that some row has."""
    return [kind for kind in _NOTES if any(_is_share(row.get(kind)) for row in rows)]


def _table(name: str, body: dict[str, Any]) -> Html:
    rows = _rows(body)
    notes = [f"{body['count']:,} images"] if isinstance(body.get("count"), int) else []
    notes += [f"step {body['step']:,}"] if isinstance(body.get("step"), int) else []
    kinds = _kinds(rows)
    head = ["", "", "Measured", *map(str.capitalize, kinds), *([""] if kinds else [])]
    header = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head)))
    values = element("tbody", *(_row(row, kinds) for row in rows))
    caption = element("caption", element("b", name), " ", ", ".join(notes))
    return wide(element("table", caption, header, values, class_="results"))


def _row(row: dict[str, Any], kinds: list[str]) -> Html:
    value = row["value"]
    shown = {kind: row[kind] for kind in kinds if _is_share(row.get(kind))}
    marks = (element("i", class_=f"mark {name}", style=f"left:{100 * at:.1f}%") for name, at in shown.items())
    verdict, kind = _verdict(value, row.get("must"), row.get("aim"))
    fill = element("i", class_=f"fill {kind}", style=f"width:{100 * value:.1f}%")
    cells = [
        element("td", row.get("name", ""), class_="name"),
        element("td", element("div", fill, *marks, class_="bar"), class_="share"),
        element("td", element("b", _percent(value))),
    ]
    if kinds:
        cells += [element("td", _percent(row.get(each))) for each in kinds]
        cells += [element("td", verdict, class_=kind)]
    return element("tr", *cells)


def _verdict(value: float, must: Any, aim: Any) -> tuple[str, str]:
    if _is_share(aim) and value >= aim:
        return "aim reached", "good"
    if _is_share(must) and value < must:
        return "below must", "poor"
    if _is_share(must):
        return "must reached", "fair" if _is_share(aim) else "good"
    return ("below aim", "fair") if _is_share(aim) else ("", "good")


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _percent(value: Any) -> str:
    return f"{100 * value:.1f} %" if _is_share(value) else ""
