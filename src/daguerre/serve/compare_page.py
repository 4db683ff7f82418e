"""Several runs next to each other: their curves in one chart each, what their configs have otherwise, their images."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from daguerre.report.html import Html, element, join
from daguerre.report.run import Run
from daguerre.serve import figures, pages, pictures, settings_shown

MOST = 8
_COLORS = ("#8a5a2b", "#2f6f8f", "#7a3b8f", "#2f7d4f", "#b23a3a", "#a67c1a", "#2a8f8a", "#5b6470")
_SHOWN = {
    "learning/loss": ("Loss", "smoothed", True),
    "validation/loss": ("Validation loss", "held-out samples", True),
    "perf/samples_per_second": ("Speed", "samples per second", False),
    "learning/gradient_norm": ("Gradient norm", "before clipping", True),
    "learning/current_learning_rate": ("Learning rate", "per update", False),
    "memory/peak_bytes": ("Memory of the device", "GiB", False),
}
"""Charts by metric: title, unit, and whether they may be logarithmic."""


def document(runs: Sequence[tuple[str, Run]]) -> dict[str, Any]:
    """Charts and numbers of named runs, as the curves of one run are (`figures.document`); metrics and clocks stand
    under `RUN NUMBER:`."""
    evaluations = sorted({name for _, run in runs for name in run.curves.names("evaluation/")})
    found: list[dict[str, Any]] = []
    metrics: dict[str, Any] = {}
    clocks: list[dict[str, Any]] = []
    for number, (_, run) in enumerate(runs):
        own = figures.document(run, "")
        metrics |= {f"{number}:{metric}": points for metric, points in own["metrics"].items()}
        clocks.append(own["clock"])
    for metric in [*_SHOWN, *evaluations]:
        title, unit, log = _SHOWN.get(metric, (metric.removeprefix("evaluation/"), "", False))
        lines = [
            _line(number, name, metric)
            for number, (name, run) in enumerate(runs)
            if metric in run.curves.curves and f"{number}:{metric}" in metrics
        ]
        if lines:
            factor = 2.0**-30 if metric.startswith("memory/") else 1.0
            chart = {"title": title, "unit": unit, "lines": lines, "log": log, "zero": not log, "factor": factor}
            found.append(chart)
    return {"version": "", "step": max(run.curves.step for _, run in runs), "charts": found, "metrics": metrics,
            "clocks": clocks}  # fmt: skip


def _line(number: int, name: str, metric: str) -> dict[str, Any]:
    few = metric.startswith(("validation/", "evaluation/"))
    smoothed = metric in ("learning/loss", "learning/gradient_norm")
    own = {"metric": f"{number}:{metric}", "label": name, "color": _COLORS[number % len(_COLORS)], "clock": number}
    return {**own, "dots": few, "smoothed": smoothed, "raw": False}


def render(ids: Sequence[str], runs: Sequence[tuple[str, Run]]) -> str:
    """The page."""
    named = dict(zip(ids, runs, strict=True))
    heads = (
        element("li", element("i", style=f"background:{_COLORS[i]}"), element("a", name, href=f"run/{id}/"))
        for i, (id, (name, _)) in enumerate(named.items())
    )
    header = element(
        "header",
        element("p", "Daguerre · comparison of runs", class_="kicker"),
        element("h1", " and ".join(name for name, _ in runs) if len(runs) == 2 else f"{len(runs)} runs"),
        element("ul", *heads, class_="chosen"),
    )
    body = join(
        element("nav", element("a", "All runs", href="./"), class_="bar-top"),
        header,
        element(
            "main",
            element("section", element("h2", "Images"), _images(ids, runs)),
            element("section", element("h2", "Curves"), _tools(), element("div", class_="charts", id="charts")),
            element(
                "section",
                element("h2", "Settings that differ"),
                settings_shown.differences({f"{name}": run.config for name, run in _distinct(runs)}),
            ),
        ),
    )
    return pages.page("Comparison · Daguerre", body, "", ("uplot.css", "photoswipe.css", "live.css"), ("compare.js",))


def _distinct(runs: Sequence[tuple[str, Run]]) -> list[tuple[str, Run]]:
    """The runs under names that no two of them share."""
    names = [name for name, _ in runs]
    return [(f"{name} ({i + 1})" if names.count(name) > 1 else name, run) for i, (name, run) in enumerate(runs)]


def _tools() -> Html:
    return element(
        "div",
        element("label", "smooth ", element("input", type="range", id="smooth", min=0, max=100, value=60, step=1)),
        element("label", element("input", type="checkbox", id="log-axis"), " log axis"),
        element("label", element("input", type="checkbox", id="outliers"), " without outliers"),
        element("button", "Whole range", type="button", id="whole", hidden=True),
        class_="tools",
    )


def _images(ids: Sequence[str], runs: Sequence[tuple[str, Run]]) -> Html:
    """A place for an image of each run, the prompts that they have, and a slider over updates."""
    by_prompt: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for id, (_, run) in zip(ids, runs, strict=True):
        for (prompt, seed), images in pictures.numbered(run).items():
            of = by_prompt.setdefault(f"{prompt or '(empty prompt)'} · seed {seed}", {})
            of[id] = [{"step": sample.step, "src": f"run/{id}/{place}"} for place, _, sample in images]
    if not by_prompt:
        return element("p", "None of them has images.", class_="note")
    shared = sorted(by_prompt, key=lambda prompt: -len(by_prompt[prompt]))
    steps = np.unique([one["step"] for of in by_prompt.values() for images in of.values() for one in images])
    data = json.dumps({"prompts": {prompt: by_prompt[prompt] for prompt in shared}, "steps": steps.tolist()})
    boxes = (
        element("figure", element("div", class_="frame"), element("figcaption", name), data_run=id)
        for id, (name, _) in zip(ids, runs, strict=True)
    )
    return join(
        element(
            "div",
            element("label", "Prompt ", element("select", *(element("option", one) for one in shared), id="prompt")),
            element(
                "label",
                "Update ",
                element("input", type="range", id="at", min=0, max=len(steps) - 1, value=len(steps) - 1, step=1),
                element("output", id="at-text", for_="at"),
            ),
            class_="tools",
        ),
        element("div", *boxes, class_="side-by-side", id="images"),
        element("script", Html(data.replace("<", "\\u003c")), type="application/json", id="image-data"),
    )
