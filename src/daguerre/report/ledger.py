"""The page's part on the loss ledger: the pictures at both ends."""

from typing import Any

from daguerre.report.html import Html, element, join, table
from daguerre.report.run import Run

_SHOWN = 10


def ledger(run: Run) -> Html | None:
    """Tables of the newest ledger; None without one."""
    if not (pictures := run.ledger.get("pictures", [])):
        return None
    count = run.ledger.get("count")  # older files have all pictures, and no count
    about = (
        "Loss of each trained picture at fixed noise, minus the mean of all "
        f"{count if isinstance(count, int) else len(pictures):,} at that noise, by the {run.ledger.get('by')} weights "
        f"at step {run.ledger['step']:,}. High: hard, or wrongly captioned. Low: memorized."
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
