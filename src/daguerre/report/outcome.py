"""The outcome of an adapter's run: the part of a run's page, and the page with the grid of updates and strengths.

compare.json is `{"cells": [{"step", "strength", "numbers": {NAME: {"value", "base", "low", "high"}}, "behind",
"destroyed"}], "best": {"step", "strength"}, "prompts": {...}, "unrelated", "features", ...}`; what is missing or of
another kind is left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from PIL import Image

from daguerre.report.html import Html, data_address, element, is_small, join, render_page, table

_PX = 160
_NUMBERS = {
    "likeness": "Likeness to the pictures",
    "nearest": "Nearest training picture",
    "copies": "Copies, %",
    "drift": "Drift, %",
    "balance": "Balance",
}
_LISTS = {"trained": "A training caption", "new": "A new prompt", "base": "A prompt of the base"}
_PLURAL = {"trained": "Training captions", "new": "New prompts", "base": "Prompts of the base"}
_MEANS = {
    "likeness": "Likeness: cosine of the features of an image of a training caption and of the pictures that have this "
    "caption.",
    "nearest": "Nearest: of an image of a new prompt and the training picture that is nearest.",
    "copies": "Copies: images of new prompts that are nearer to a training picture than this picture is to any other.",
    "drift": "Drift: (1 - cosine) / 2 of an image of the base's own prompts and the base's image, as a share of what "
    "the base's images of two prompts have.",
    "balance": "Balance: harmonic mean of the gain in likeness, as a share of the highest here, and of what was kept, "
    "100 % less drift; 0 where the base is destroyed: where the drift is not clearly below 100 %.",
}
_BRACKETS = "In brackets: 95 % intervals, of the difference from the base where the base has the number."
MUCH = 0.2
"""Share of the way to an unrelated image from which on much of the base is gone."""
_UNRELATED = "images of the base's own prompts are not clearly nearer to the base's images than those of other prompts"
_MILDER = "A lower rate, an earlier update or a lower strength (docs/trouble.md#the-base-is-forgotten)"


class Shown(NamedTuple):
    """An image of the grid."""

    prompts: str
    """Name of its list."""
    step: int
    strength: float
    """0: the base."""
    image: Image.Image
    number: int = 0
    """In its list."""


def section(found: Mapping[str, Any]) -> Html | None:
    """The outcome of a run by its newest comparison; None without one."""
    cells = _cells(found)
    if not cells:
        return None
    return join(element("ul", *(element("li", line) for line in lines(found))), *_table(found))


def _table(found: Mapping[str, Any]) -> list[Html]:
    """All numbers with their intervals, and what they mean."""
    cells = _cells(found)
    best = _best(found, cells)
    names = [name for name in _NUMBERS if any(_number(cell, name) is not None for cell in cells)]
    rows = [_row(cell, found, names, cell is best and len(cells) > 1) for cell in cells]
    meant = " ".join([*(_MEANS[name] for name in names), _BRACKETS])
    notes = (element("p", text, class_="note") for text in (_how(found), meant))
    return [table(["Update and strength", *map(_NUMBERS.__getitem__, names)], rows, "cards outcome"), *notes]


def lines(found: Mapping[str, Any], base: str = "BASE") -> list[str]:
    """The same in sentences, for people: of the best cell, or of the only one. `base` is the place of the base."""
    cells = _cells(found)
    gone, cell = [_where(each) for each in cells if each.get("destroyed") is True], _best(found, cells)
    if gone and len(gone) == len(cells):  # likeness of such images says nothing
        nothing = "no update and strength is to be used: all " if len(cells) > 1 else "it "
        return [f"{nothing}destroyed the base: {_UNRELATED}. {_MILDER}"]
    lost = [f"destroyed the base, and not to be used: {'; '.join(gone)}: {_UNRELATED}"] if gone else []
    if cell is None:
        none = "no update and strength came nearer to the pictures of its captions and kept the base"
        return [none, *lost] if cells else []
    told = [_learnt(cell), _copied(cell), _forgot(cell, found)]
    if (drift := _number(cell, "drift")) is not None and drift.low is None:
        told.append("all this may be chance: below 20 images of each list there are no intervals")
    if len(cells) > 1:
        there = [each for each in cells if each.get("destroyed") is not True]
        much = [each for each in there if _share(each, found) > MUCH]
        close = [each for each in there if each is not cell and each not in much and _low(each.get("behind")) <= 0]
        like = f"; not clearly behind: {'; '.join(map(_where, close))}" if close else ""
        forgot = [f"moved more than {100 * MUCH:.0f} % of the way: {'; '.join(map(_where, much))}"] if much else []
        # Another one may have a higher balance, and not clearly have kept the base.
        of = " of those that clearly kept the base" if _kept(cell, found) else ""
        best = f"best balance of learning and keeping{of}: {_where(cell)}{like}. There:"
        told = [best, *told, *forgot, *lost, _use(cell, found, base)]
    elif _unclear(cell, found):
        told.append(f"other updates and strengths: daguerre compare {found.get('run', 'RUN')} strengths=0.6,0.8,1")
    if found.get("features") == "model":
        told.append(
            "all by the base's own features, to which broken shapes may be like whole ones: look at the images, too; "
            "`daguerre compare` takes networks.dinov2=PATH"
        )
    return [line for line in told if line]


def render(name: str, found: Mapping[str, Any], shown: Sequence[Shown]) -> str:
    """The page with numbers and images of each update and strength."""
    cells = _cells(found)
    steps = sorted({int(cell["step"]) for cell in cells})
    strengths = sorted({float(cell["strength"]) for cell in cells})
    header = join(
        element("p", "Daguerre · updates and strengths", class_="kicker"),
        element("h1", name),
        element("ul", *(element("li", line) for line in lines(found)), class_="summary"),
    )
    by = {(one.prompts, one.step, one.strength): one.image for one in shown if one.number == 0}
    images = {title: _images(which, found, by, steps, strengths) for which, title in _LISTS.items()}
    numbers = (_grid(which, title, found, steps, strengths) for which, title in _NUMBERS.items())
    body = join(
        *_beside_base(found, cells, shown),
        *(element("section", element("h2", title), each) for title, each in images.items() if each is not None),
        element("section", element("h2", "Numbers"), *numbers, element("h3", "With intervals"), *_table(found)),
    )
    return render_page(f"{name} · updates and strengths", header, body, "compare.json and its images", ("style.css",))


def _cells(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = found.get("cells")
    cells = [cell for cell in listed if isinstance(cell, dict)] if isinstance(listed, list) else []
    return [
        one
        for one in cells
        if isinstance(one.get("step"), int) and _is_number(one.get("strength")) and isinstance(one.get("numbers"), dict)
    ]


def _best(found: Mapping[str, Any], cells: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    best = found.get("best")
    own = best if isinstance(best, dict) else {}
    meant = [c for c in cells if (c["step"], c["strength"]) == (own.get("step"), own.get("strength"))]
    return next(iter(meant or (cells if len(cells) == 1 else [])), None)


def _where(cell: Mapping[str, Any]) -> str:
    return f"update {cell['step']:,}, strength {cell['strength']:g}"


def _use(cell: Mapping[str, Any], found: Mapping[str, Any], base: str) -> str:
    """Returns the commands that generate by a saved update at a strength."""
    saved = f"{found.get('run', 'RUN')} checkpoint=step-{cell['step']:08d}"
    export = f"daguerre convert export {saved} format=adapters out=ADAPTER"
    return f"to use it: {export}, then daguerre generate {base} use='{{ADAPTER: {cell['strength']:g}}}' prompt=..."


def _unclear(cell: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """True unless it clearly learnt and kept the base."""
    learnt = _number(cell, "likeness")
    return learnt is not None and (learnt.sign < 1 or not _kept(cell, found))


def _kept(cell: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """True where it clearly kept the base."""
    moved, scale = _number(cell, "drift"), _unrelated(found)
    if moved is None or scale is None:
        return False
    return (moved.value if moved.high is None else moved.high) <= MUCH * scale


def _learnt(cell: Mapping[str, Any]) -> str:
    own = _number(cell, "likeness")
    if own is None:
        return ""
    word = {1: "it learnt", -1: "it went away from the pictures", 0: "whether it learnt is not clear"}[own.sign]
    near, copies = _number(cell, "nearest"), _number(cell, "copies")
    # Where the base draws these things already, a style changes no likeness to each picture, but brings new ones nearer
    # to all.
    if own.sign == 0 and near is not None and near.sign == 1 and copies is not None and copies.sign < 1:
        word = "it learnt what the pictures have in common, such as a style: new prompts come nearer to them. Of each"
    return (
        f"{word}: images of training captions have a likeness of {own.value:.3f} to their pictures, the base's "
        f"{own.of_base:.3f}{own.difference()}"
    )


def _copied(cell: Mapping[str, Any]) -> str:
    own, near = _number(cell, "copies"), _number(cell, "nearest")
    if own is None or near is None:
        return ""
    word = {1: "it memorised", -1: "it copies less than the base", 0: "no clear copies"}[own.sign]
    return (
        f"{word}: of its images of new prompts {100 * own.value:.0f} % are nearer to a training picture than that "
        f"picture is to all others, of the base's {100 * own.of_base:.0f} %{own.difference(100, ' %')}; their likeness "
        f"to the nearest picture is {near.value:.3f}, the base's {near.of_base:.3f}{near.difference()}"
    )


def _forgot(cell: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    own, scale = _number(cell, "drift"), _unrelated(found)
    if own is None or scale is None:
        return ""
    low, high = (own.value if end is None else end for end in (own.low, own.high))
    word, way_out = "whether it kept the base is not clear", f". Where its images are broken: {_MILDER.lower()}"
    if _kept(cell, found):
        word, way_out = "it kept the base", ""
    elif low / scale > MUCH:
        word, way_out = "it forgot much", f". {_MILDER}"
    interval = "" if own.low is None else f" ({100 * low / scale:.1f} to {100 * high / scale:.1f} %)"
    return (
        f"{word}: of the base's own prompts its images moved {100 * own.value / scale:.1f} % of the way to an "
        f"unrelated image{interval}: drift {own.value:.4f} of {scale:.3f}{way_out}"
    )


def _share(cell: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Of the way to an unrelated image; 0 where it is not known."""
    own, scale = _number(cell, "drift"), _unrelated(found)
    return 0.0 if own is None or scale is None else own.value / scale


def _unrelated(found: Mapping[str, Any]) -> float | None:
    """The drift of images of two prompts; None where it is not known."""
    scale = found.get("unrelated")
    return scale if _is_number(scale) and scale > 0 else None


class _Number(NamedTuple):
    value: float
    of_base: float
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """Of the difference from the base, 0 where its interval holds 0 or is unknown."""
        return 0 if self.low is None or self.high is None else (self.low > 0) - (self.high < 0)

    def difference(self, factor: float = 1.0, unit: str = "") -> str:
        if self.low is None or self.high is None:
            return ""
        digits = 0 if factor > 1 else 3
        low, high = (f"{factor * each:+.{digits}f}" for each in (self.low, self.high))
        return f" (difference {low} to {high}{unit})"


def _number(cell: Mapping[str, Any], name: str) -> _Number | None:
    own = cell["numbers"].get(name)
    if not isinstance(own, dict) or not _is_number(own.get("value")):
        return None
    base, low, high = (own.get(key) if _is_number(own.get(key)) else None for key in ("base", "low", "high"))
    both = (low, high) if low is not None and high is not None else (None, None)
    return _Number(float(own["value"]), float(base or 0.0), *both)


def _row(cell: Mapping[str, Any], found: Mapping[str, Any], names: Sequence[str], is_best: bool) -> list[object]:
    word = ", best" * is_best + ", destroyed the base" * (cell.get("destroyed") is True)
    return [_where(cell) + word, *(_cell(cell, found, name) for name in names)]


def _unit(name: str, found: Mapping[str, Any]) -> tuple[float, int]:
    """The factor and the decimals that a number is shown with."""
    if name == "copies":
        return 100, 0
    scale = _unrelated(found)
    return (100 / scale, 1) if name == "drift" and scale is not None else (1, 3)


def _cell(cell: Mapping[str, Any], found: Mapping[str, Any], name: str) -> Html:
    own = _number(cell, name)
    if own is None:
        return Html("")
    factor, digits = _unit(name, found)
    interval = "" if own.low is None else f" ({factor * own.low:.{digits}f} to {factor * (own.high or 0):.{digits}f})"
    base = cell["numbers"][name].get("base")
    beside = f", base {factor * base:.{digits}f}" if _is_number(base) else ""
    value = f"{factor * own.value:.{digits}f}{beside}{interval}"
    return join(element("span", f"{_NUMBERS[name]} ", class_="label"), value)


def _grid(
    name: str, title: str, found: Mapping[str, Any], steps: Sequence[int], strengths: Sequence[float]
) -> Html | None:
    """A number by update and strength."""
    cells = _cells(found)
    values = {(cell["step"], cell["strength"]): own for cell in cells if (own := _number(cell, name)) is not None}
    if not values:
        return None
    factor, digits = _unit(name, found)

    def text(step: int, strength: float) -> str:
        own = values.get((step, strength))
        return "" if own is None else f"{factor * own.value:.{digits}f}"

    base = cells[0]["numbers"][name].get("base") if isinstance(cells[0]["numbers"].get(name), dict) else None
    of_base = f"; the base's: {factor * base:.{digits}f}" if _is_number(base) else ""
    rows: list[list[object]] = [[f"{step:,}", *(text(step, each) for each in strengths)] for step in steps]
    head = ["Update", *(f"strength {each:g}" for each in strengths)]
    return join(element("h3", title + of_base), table(head, rows, "numbers"))


def _images(
    which: str,
    found: Mapping[str, Any],
    by: Mapping[tuple[str, int, float], Image.Image],
    steps: Sequence[int],
    strengths: Sequence[float],
) -> Html | None:
    """The first prompt of a list: a row for each update, a column for each strength."""
    texts = _of_list(found, which).get("texts")
    prompt = str(texts[0]) if isinstance(texts, list) and texts else ""
    columns: list[tuple[str, Callable[[int], int], float]] = [("base", lambda step: 0, 0.0)]
    columns += [(f"strength {each:g}", lambda step: step, each) for each in strengths]
    rows: list[list[object]] = [
        [f"{step:,}", *(_image(by.get((which, at(step), each)), f"{prompt}, {name}") for name, at, each in columns)]
        for step in steps
    ]
    if all(cell == "" for row in rows for cell in row[1:]):
        return None
    return join(
        element("p", prompt, class_="prompt"), table(["Update", *(name for name, _, _ in columns)], rows, "pictures")
    )


def _beside_base(found: Mapping[str, Any], cells: Sequence[dict[str, Any]], shown: Sequence[Shown]) -> list[Html]:
    """Images of several prompts of each list by the base, and by the best cell: here broken shapes are seen."""
    cell = _best(found, cells)
    if cell is None:
        return []
    sections = []
    for which, title in _PLURAL.items():
        texts = _of_list(found, which).get("texts")
        by = {(one.number, one.strength == 0): one.image for one in shown if one.prompts == which and _of(one, cell)}
        numbers = sorted({number for number, _ in by})
        if not isinstance(texts, list) or len(numbers) < 2 or numbers[-1] >= len(texts):
            continue
        rows: list[list[object]] = [
            [name, *(_image(by.get((number, is_base)), f"{texts[number]}, {name}") for number in numbers)]
            for name, is_base in (("base", True), (_where(cell), False))
        ]
        head = ["", *(str(texts[number]) for number in numbers)]
        sections.append(element("section", element("h2", title), table(head, rows, "pictures")))
    return sections


def _of(one: Shown, cell: Mapping[str, Any]) -> bool:
    """True for an image of the base, or of this cell."""
    return one.strength == 0 or (one.step, one.strength) == (cell["step"], cell["strength"])


def _image(image: Image.Image | None, alt: str) -> Html | str:
    if image is None:
        return ""
    small = is_small(image)
    if not small:
        image = image.copy()
        image.thumbnail((_PX, _PX), Image.Resampling.LANCZOS)
    return element("img", src=data_address(image, small, quality=84), alt=alt, class_="pixels" if small else None)


def _how(found: Mapping[str, Any]) -> str:
    origins = {name: _of_list(found, name).get("origin") for name in _LISTS}
    count = found.get("images")
    what = f"{count} images" if isinstance(count, int) else "Images"
    told = [f"{what} of each list by each set of weights, and by the base from the same seeds"]
    texts = _of_list(found, "new").get("texts")
    few = f" ({len({*map(str, texts)})} different ones)" if isinstance(texts, list) else ""
    told += [f"training captions: {origins.get('trained')}", f"new prompts: {origins.get('new')}{few}"]
    about = found.get("features_about")
    network = about.get("network") if isinstance(about, dict) else None
    told += [f"the base's: {origins.get('base')}", f"features: {network or found.get('features')}"]
    return "; ".join(told) + "."


def _of_list(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The prompts of a list, and where they are from."""
    prompts = found.get("prompts")
    own = prompts.get(name) if isinstance(prompts, dict) else None
    return own if isinstance(own, dict) else {}


def _low(interval: Any) -> float:
    """The lower end of an interval; infinite without one."""
    return float(interval[0]) if isinstance(interval, list) and interval and _is_number(interval[0]) else math.inf


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
