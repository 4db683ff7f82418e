"""Evolution of the sample images: a row for each prompt, a column for each save, the newest largest.

Images are opened, resized to what is shown, and embedded; none is linked to.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from daguerre.regular import check_regular
from daguerre.report.html import SMALL_PX, Html, data_address, element, is_small
from daguerre.report.run import Run, Sample

ROWS, SAVES = 12, 8
BUDGET_BYTES = 1_900_000
Embedded = Mapping[Path, tuple[str | None, bool]]
"""Images as they are shown: what `_embedded` gives."""
_NEWEST_PX, _OLDER_PX, _STRENGTH_PX = 384, 160, 256


def evolution(run: Run) -> Html | None:
    """The rows of images, or None if the run has generated none."""
    rows: dict[tuple[str, int | None], list[Sample]] = defaultdict(list)
    for sample in run.samples:
        rows[sample.prompt, sample.seed].append(sample)
    latest = max((sample.step for sample in run.samples), default=None)
    now = {key: row for key, row in rows.items() if row[-1].step == latest}
    shown = {key: _spread(row) for key, row in list(now.items())[:ROWS]}
    if not shown:
        return None
    for shrink in (1.0, 0.7, 0.5, 0.35, 0.25, 0.15):
        images = {s.path: _embedded(s.path, _side(s, row, shrink)) for row in shown.values() for s in row}
        for row in shown.values():
            images |= {path: _embedded(path, _side(row[-1], row, shrink)) for path in row[-1].controls.values()}
        if sum(len(address or "") for address, _ in images.values()) <= BUDGET_BYTES:
            break
    return element(
        "div",
        *(_row(row, images, lambda s: f"step {s.step:,}", newest=row[-1]) for row in shown.values()),
        _left_out(len(rows) - len(shown)),
        class_="evolution",
    )


def by_strength(run: Run) -> Html | None:
    """A row for each prompt with the adapter at several strengths, or None if the run has no such images."""
    rows: dict[tuple[str, int | None], list[Sample]] = defaultdict(list)
    for sample in run.strengths:
        rows[sample.prompt, sample.seed].append(sample)
    if not rows:
        return None
    paths = [path for sample in run.strengths for path in (sample.path, *sample.controls.values())]
    images = {path: _embedded(path, _STRENGTH_PX) for path in paths}
    named = [_row(row, images, lambda s: f"strength {s.how['strength']:g}") for row in list(rows.values())[:ROWS]]
    return element("div", *named, class_="evolution")


def _spread(row: list[Sample]) -> list[Sample]:
    """First, last, and evenly spaced ones between, at most SAVES."""
    if len(row) <= SAVES:
        return row
    return [row[round(i * (len(row) - 1) / (SAVES - 1))] for i in range(SAVES)]


def _side(sample: Sample, row: Sequence[Sample], shrink: float) -> int:
    return max(16, int((_NEWEST_PX if sample is row[-1] else _OLDER_PX) * shrink))


def _embedded(path: Path, side_px: int) -> tuple[str | None, bool]:
    """A data address, None for what cannot be read, and whether the image is shown with hard edges."""
    try:
        check_regular(path)
        with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError):  # a broken PNG is a SyntaxError to Pillow
        return None, False
    small = is_small(image)
    if max(image.size) > side_px and not (small and side_px >= SMALL_PX):
        image.thumbnail((side_px, side_px), Image.Resampling.LANCZOS)
    return data_address(image, small, quality=84), small


def _row(
    row: Sequence[Sample], images: Embedded, caption: Callable[[Sample], str], newest: Sample | None = None
) -> Html:
    """The images of one prompt, behind the control images of the last one."""
    last = row[-1]
    seed_text = None if last.seed is None else element("small", f"seed {last.seed}")
    figures = [_figure(last, name.replace("_", " "), False, *images[path]) for name, path in last.controls.items()]
    figures += [_figure(sample, caption(sample), sample is newest, *images[sample.path]) for sample in row]
    return element(
        "section",
        element("p", last.prompt or "(empty prompt)", seed_text, class_="prompt"),
        element("div", *figures, class_="strip"),
        class_="row",
    )


def _figure(sample: Sample, caption: str, newest: bool, address: str | None, hard_edges: bool) -> Html:
    """`title` shows on hover how the image was generated."""
    how = ", ".join(f"{k} {v}" for k, v in sample.how.items() if k not in ("file", "prompt") and v not in ("", None))
    if address is None:
        image = element("span", "cannot be read", class_="lost")
    else:
        alt = f"{sample.prompt}, {caption}"
        image = element("img", src=address, alt=alt, title=how, class_="pixels" if hard_edges else None)
    text = element("figcaption", caption if newest else caption.removeprefix("step "))
    return element("figure", image, text, class_="newest" if newest else None)


def _left_out(rows: int) -> Html | None:
    if rows <= 0:
        return None
    more = f"{rows} more prompts are" if rows > 1 else "One more prompt is"
    return element("p", f"{more} in the folder samples, or not generated any more.", class_="note")
