"""The page's part on the loss ledger: the pictures at both ends."""

from typing import Any

from daguerre import documents
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.report.html import Html, element, join, table
from daguerre.report.run import Run

_SHOWN = 10


def ledger(run: Run) -> Html | None:
    """Tables of the newest ledger; None without one."""
    newest: tuple[int, list[dict[str, Any]], str] | None = None
    for path in RunFolder(run.folder).evaluations.glob("ledger-*/ledger.json"):
        try:
            found = documents.read_object(path)
        except (OSError, ValueError):  # of somebody else, or damaged
            continue
        step = found.get("step")
        pictures = [one for one in _list(found.get("pictures")) if isinstance(one, dict)]
        if isinstance(step, int) and pictures and (newest is None or step > newest[0]):
            newest = step, pictures, str(found.get("by"))
    if newest is None:
        return None
    step, pictures, by = newest
    about = (
        f"Loss of each trained picture at fixed noise, minus the mean of all {len(pictures):,} at that noise, by the "
        f"{by} weights at step {step:,}. High: hard, or wrongly captioned. Low: memorized."
    )
    ends = [("Highest", pictures[:_SHOWN]), ("Lowest", pictures[-_SHOWN:][::-1])]
    return join(
        element("p", about, class_="note"),
        *(
            join(element("h3", title), table(["loss", "picture", "caption"], [*map(_row, some)]))
            for title, some in ends
        ),
    )


def _row(one: dict[str, Any]) -> list[object]:
    score = one.get("score")
    return [f"{score:+.4f}" if isinstance(score, int | float) else "", str(one.get("name")), str(one.get("caption"))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
