"""Several runs next to each other: their curves in one chart each, what their configs have otherwise, their images."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from daguerre.formatting import counted
from daguerre.report.html import Html, element, join, json_script
from daguerre.report.run import Run
from daguerre.serve import figures, pages, pictures, settings_shown

MOST = 8
_COLORS = tuple(f"var(--run-{number})" for number in range(MOST))
_SHOWN = {
    "learning/loss": ("Loss", "smoothed", True),
    "validation/loss": ("Validation loss", "held-out samples", True),
    "validation/loss_raw": ("Validation loss, raw weights", "held-out samples", True),
    "perf/samples_per_second": ("Speed", "samples per second", False),
    "learning/gradient_norm": ("Gradient norm", "before clipping", True),
    "learning/current_learning_rate": ("Learning rate", "per update", False),
    "memory/peak_bytes": ("Memory of the device", "GiB", False),
}
"""Charts by metric: title, unit, and whether they may be logarithmic."""


class Chosen(NamedTuple):
    """A run of the comparison."""

    id: str
    name: str
    run: Run


def document(runs: Sequence[Chosen]) -> dict[str, Any]:
    """Charts and numbers of runs, as the curves of one run are (`figures.document`); metrics and clocks stand under
    `RUN NUMBER:`."""
    drawn = [{line.metric for chart in figures.charts(one.run) for line in chart.lines} for one in runs]
    evaluations = sorted({name for one in runs for name in one.run.curves.names("evaluation/")})
    charts: list[dict[str, Any]] = []
    metrics: dict[str, Any] = {}
    for metric in [*_SHOWN, *evaluations]:
        title, unit, log = _SHOWN.get(metric, (metric.removeprefix("evaluation/"), "", False))
        holders = [number for number, names in enumerate(drawn) if metric in names]
        if holders:
            lines = [_line(number, runs[number].name, metric) for number in holders]
            factor = 2.0**-30 if metric.startswith("memory/") else 1.0
            charts.append({"title": title, "unit": unit, "lines": lines, "log": log, "zero": not log, "factor": factor})
            curves = {number: runs[number].run.curves.curves[metric] for number in holders}
            metrics |= {f"{number}:{metric}": figures.numbers(curve) for number, curve in curves.items()}
    return {
        "version": "",
        "step": max((one.run.curves.step for one in runs), default=0),
        "charts": charts,
        "metrics": metrics,
        "clocks": [figures.clock(one.run.curves) for one in runs],
    }


def _line(number: int, name: str, metric: str) -> dict[str, Any]:
    few = metric.startswith(("validation/", "evaluation/"))
    smoothed = metric in ("learning/loss", "learning/gradient_norm")
    own = {"metric": f"{number}:{metric}", "label": name, "color": _COLORS[number % len(_COLORS)], "clock": number}
    return {**own, "dots": few, "smoothed": smoothed, "raw": False}


def render(runs: Sequence[Chosen]) -> str:
    """The page."""
    heads = (
        element("li", element("i", style=f"background:{_COLORS[i]}"), element("a", one.name, href=f"run/{one.id}/"))
        for i, one in enumerate(runs)
    )
    header = element(
        "header",
        element("p", "Daguerre · comparison of runs", class_="kicker"),
        element("h1", " and ".join(one.name for one in runs) if len(runs) == 2 else counted(len(runs), "run")),
        element("ul", *heads, class_="chosen"),
    )
    body = join(
        element("nav", element("a", "All runs", href="./"), class_="bar-top"),
        header,
        element(
            "main",
            element("section", element("h2", "Images"), _images(runs)),
            element(
                "section", element("h2", "Curves"), figures.tools(60), element("div", class_="charts", id="charts")
            ),
            element(
                "section",
                element("h2", "Settings that differ"),
                settings_shown.differences(_configs(runs)),
            ),
        ),
    )
    return pages.page("Comparison · Daguerre", body, "", ("uplot.css", "photoswipe.css", "live.css"), ("compare.js",))


def _configs(runs: Sequence[Chosen]) -> dict[str, dict[str, Any]]:
    """The configs of the runs, under names that no two of them share."""
    names = [one.name for one in runs]
    return {
        f"{one.name} ({i + 1})" if names.count(one.name) > 1 else one.name: one.run.config for i, one in enumerate(runs)
    }


def _images(runs: Sequence[Chosen]) -> Html:
    """A place for an image of each run, the prompts that they have, and a slider over updates."""
    by_prompt: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for one in runs:
        for (prompt, seed), images in pictures.numbered(one.run).items():
            of = by_prompt.setdefault(f"{prompt or '(empty prompt)'} · seed {seed}", {})
            of[one.id] = [{"step": sample.step, "src": f"run/{one.id}/{place}"} for place, _, sample in images]
    if not by_prompt:
        return element("p", "None of them has images.", class_="note")
    shared = sorted(by_prompt, key=lambda prompt: -len(by_prompt[prompt]))
    steps = np.unique([image["step"] for of in by_prompt.values() for images in of.values() for image in images])
    data = {"prompts": {prompt: by_prompt[prompt] for prompt in shared}, "steps": steps.tolist()}
    boxes = (
        element("figure", element("div", class_="frame"), element("figcaption", one.name), data_run=one.id)
        for one in runs
    )
    return join(
        element(
            "div",
            element(
                "label", "Prompt ", element("select", *(element("option", prompt) for prompt in shared), id="prompt")
            ),
            element(
                "label",
                "Update ",
                element("input", type="range", id="at", min=0, max=len(steps) - 1, value=len(steps) - 1, step=1),
                element("output", id="at-text", for_="at"),
            ),
            class_="tools",
        ),
        element("div", *boxes, class_="side-by-side", id="images"),
        json_script(data, id="image-data"),
    )
