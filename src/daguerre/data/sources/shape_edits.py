"""Procedural pairs of images and an instruction that leads from one to the other: made from sample ids.

The images are those of the source `shapes`. The first is the reference image, the second is trained on, and the caption
says what changes: the colour, the shape or the size. All else stays, the place too.
`daguerre.evaluation.metrics.shape_edits` reads the result.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

import numpy as np
from pydantic import Field

from daguerre import keys
from daguerre.data.images.words import words
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Split
from daguerre.data.sources.shapes import (
    ACTING,
    COLOURS,
    QUICKSTART_SHAPES,
    RADII_PX,
    Combination,
    DrawnSettings,
    Share,
    combinations,
    placed,
    sample_id,
)
from daguerre.settings import FREE, Unused
from daguerre.types import IMAGE, REFERENCES, Record

Attribute = Literal["colour", "shape", "size"]
"""What an instruction changes."""
EDITED: tuple[Attribute, ...] = get_args(Attribute)
PHRASINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "colour": ("make it {to}", "paint it {to}", "change the colour to {to}"),
        "shape": ("turn it into a {to}", "make it a {to}", "change the shape to a {to}"),
        "size": ("make it {to}",),
    }
)
"""Instructions by the attribute that they change; of sizes `{to}` is larger or smaller, by one step."""
JITTER_PX = 2.0
"""Largest distance of a shape's centre from the image's centre, in pixels, along each axis."""


class Settings(DrawnSettings):
    """The built-in pairs: 64 x 64 px, one shape each, endless."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(
            tuple(set(SourceSettings.model_fields) - ACTING - {"reference_dropout"}),
            lambda own: True,
            "no effect on procedural images",
        ),
        Unused(("random_flip",), lambda own: True, "a reference image is not flipped, so the shape would move"),
        Unused(("marks",), lambda own: not own.checked_pairs, "no effect with data.checked_pairs=0"),
    )

    source: Literal["shape_edits"] = "shape_edits"
    """Name of this source."""
    checked_pairs: int = Field(200, ge=0, json_schema_extra=FREE)
    """Held-out pairs whose second image is generated at the end of a run, of the first and the instruction, and read by
    the pixel checker. 0: nothing is checked."""
    marks: dict[Literal["edited", "kept", "all", "colour", "shape", "size"], Share] = Field(
        {"edited": 0.95, "kept": 0.95}, json_schema_extra=FREE
    )
    """Shares, from 0 to 1, below which the table of checked pairs says `missed`; null in place of a share: no mark."""

    @property
    def endless(self) -> bool:
        return True

    @property
    def made(self) -> frozenset[str]:
        return frozenset({REFERENCES[0]})

    def words(self) -> frozenset[str]:
        given = super().words()
        return _words() | self.captions.words() if given is None else given


@dataclass(frozen=True)
class Edit:
    """The contents of an image before and after one of its attributes is changed."""

    before: Combination
    after: Combination
    attribute: Attribute

    def instruction(self, phrasing: float) -> str:
        """The change in words; `phrasing` in [0, 1) chooses one of `PHRASINGS`."""
        options = PHRASINGS[self.attribute]
        to = getattr(self.after, self.attribute)
        if self.attribute == "size":
            to = "larger" if RADII_PX[self.after.size] > RADII_PX[self.before.size] else "smaller"
        return options[int(phrasing * len(options))].format(to=to)


@dataclass(frozen=True)
class Pair:
    """An edit with its instruction and both images, (64, 64, 3) uint8."""

    edit: Edit
    text: str
    reference: np.ndarray
    image: np.ndarray


@dataclass(frozen=True)
class ShapeEditsSource:
    """Endless source: a record is a function of the split and its number alone."""

    settings: Settings
    split: Split
    index: None = None

    @property
    def metric(self) -> str | None:
        return "shape_edits" if self.settings.checked_pairs else None

    def sample_id(self, number: int) -> int:
        """Stable 63-bit id of record `number`; the splits share none."""
        return sample_id(self.split, number)

    def name(self, number: int) -> str:
        return f"shape_edits/{self.split}/{number}"

    def record(self, number: int) -> Record:
        """Record `number`: the image after the edit, the one before as its reference image, the instruction as `text`;
        what the image shows and the attribute that was changed as metadata."""
        made = pair(self.split, self.sample_id(number))
        images = {IMAGE: made.image, REFERENCES[0]: made.reference}
        return Record(
            self.name(number), images, {"text": made.text}, vars(made.edit.after) | {"edited": made.edit.attribute}
        )

    def report(self) -> SkipReport:
        return {}


def open_source(settings: Settings, split: Split) -> ShapeEditsSource:
    """The source of one split; no file is read."""
    return ShapeEditsSource(settings, split)


def pair(split: Split, sample_id: int) -> Pair:
    """The pair of a sample of this split: attributes are changed equally often, and each edit of one is as likely."""
    which, chosen, phrasing, *placing = keys.uniforms(0, "shape edits", sample_id, count=6)
    options = edits(split)[EDITED[int(which * len(EDITED))]]
    edit = options[int(chosen * len(options))]
    before, after = (placed(one, placing, JITTER_PX) for one in (edit.before, edit.after))
    return Pair(edit, edit.instruction(float(phrasing)), before, after)


@functools.cache
def edits(split: Split) -> dict[Attribute, tuple[Edit, ...]]:
    """The edits of a split by what they change. Those that are trained lead from one combination that the source
    `shapes` trains on to another one; those that are held out lead to one that it holds out, so that training shows
    their result neither after an edit nor before one."""
    ends, starts = combinations(split), {*combinations("train")}
    if split == "held_out":
        starts |= {*ends}
    found: dict[Attribute, tuple[Edit, ...]] = {}
    for attribute in EDITED:
        changed = [Edit(start, end, attribute) for end in ends for start in _starts(end, attribute)]
        found[attribute] = tuple(one for one in changed if one.before in starts)
    return found


def _starts(end: Combination, attribute: Attribute) -> list[Combination]:
    """The combinations from which one edit of an attribute leads to this one."""
    if attribute == "colour":
        return [replace(end, colour=name) for name in COLOURS if name not in (end.colour, end.background)]
    if attribute == "shape":
        return [replace(end, shape=name) for name in QUICKSTART_SHAPES if name != end.shape]
    names = [*RADII_PX]
    place = names.index(end.size)
    return [replace(end, size=names[other]) for other in (place - 1, place + 1) if 0 <= other < len(names)]


@functools.cache
def _words() -> frozenset[str]:
    n = max(map(len, PHRASINGS.values()))
    each = {one.instruction((i + 0.5) / n) for own in edits("train").values() for one in own for i in range(n)}
    return frozenset(words(*each))
