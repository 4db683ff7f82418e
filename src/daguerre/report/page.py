"""The report of a run: one HTML page that needs nothing else, and asks nothing of any network.

Puts together what the other modules make. All text from the run is escaped.
"""

import re
from pathlib import Path

from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.report import evaluations, facts, outcome
from daguerre.report.charts import charts
from daguerre.report.html import Html, element, join, render_page
from daguerre.report.ledger import ledger
from daguerre.report.results import results
from daguerre.report.run import Run, read_run
from daguerre.report.sample_images import by_strength, evolution
from daguerre.tracking.curves import Curves


def write(folder: Path) -> Path:
    """Write the report of a run folder into it; returns its path. UserError if the folder is no run's."""
    path = RunFolder(folder).report
    write_bytes_atomically(path, render(folder).encode())
    return path


def render(folder: Path, curves: Curves | None = None) -> str:
    """The page about a run folder, from its files alone, and from its metrics if they were read already. UserError if
    the folder is no run's."""
    run = read_run(folder, curves)
    body = join(*_sections(run))
    return render_page(
        f"{run.name} · Daguerre", _header(run), body, "the files of the run folder", ("style.css",), "hover.js"
    )


def _header(run: Run) -> Html:
    state = element("span", facts.STATES.get(run.state, run.state), class_=f"state {run.state}")
    described = run.setting("description")
    return join(
        element("p", "Daguerre · training report", class_="kicker"),
        element("h1", run.name, " ", state),
        element("p", described, class_="description") if described else None,
        facts.summary(run),
        element("p", facts.times(run), class_="note"),
        *facts.notices(run),
        facts.facts(run),
    )


def _sections(run: Run) -> list[Html]:
    drawn = [*charts(run), *evaluations.charts(run)]
    none = "No numbers yet: the first come with the first logging interval."
    curves = element("div", *drawn, class_="charts") if drawn else element("p", none, class_="note")
    unmeasured = "Nothing was evaluated yet: daguerre evaluate measures a run."
    measured, nothing = evaluations.tables(run), element("p", unmeasured, class_="note")
    none_drawn = element("p", "No images yet: they come with the first save.", class_="note")
    came = outcome.section(run.compared)
    found = [
        ("Result", results(run) or (nothing if measured is None and came is None else None)),
        ("Measured by daguerre evaluate", measured),
        ("What came of it", came),
        ("Loss ledger", ledger(run)),
        ("Images", evolution(run) or (none_drawn if run.setting("sampling.num_images") != 0 else None)),
        ("With the adapter at other strengths", by_strength(run)),
        ("Curves", curves),
        ("Skipped", facts.skipped(run)),
        ("Details", join(*_details(run))),
    ]
    return [element("section", element("h2", title), content) for title, content in found if content is not None]


def _details(run: Run) -> list[Html]:
    folds = [
        ("All numbers, newest values", facts.last_numbers(run)),
        ("Config", element("pre", config_text(run.config_text), tabindex=0) if run.config_text else None),
        ("Environment", facts.environment(run)),
    ]
    return [element("details", element("summary", title), inner) for title, inner in folds if inner is not None]


def config_text(text: str) -> Html:
    """YAML with its keys and comments set apart."""
    return join(*(_yaml_line(line) for line in text.splitlines(keepends=True)))


def _yaml_line(line: str) -> Html:
    if line.lstrip().startswith("#"):
        return element("i", line)
    match = re.match(r"(\s*(?:- )?[\w.-]+:)(.*)", line, re.DOTALL)
    return join(line) if match is None else join(element("b", match[1]), match[2])
