"""Metric of the `shape_edits` source: whether an instruction changed what it names, and nothing else.

Images are read by the checker of `daguerre.evaluation.metrics.shapes`, and the pairs are those of
`daguerre.data.sources.shape_edits`.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from daguerre.data.sources.shape_edits import EDITED, Edit, open_source, pair
from daguerre.data.sources.shape_edits import Settings as SourceSettings
from daguerre.evaluation.metric import Inputs, MetricSettings, source_of
from daguerre.evaluation.metrics.shapes import ATTRIBUTES, check
from daguerre.evaluation.result import Result, Row


class Settings(MetricSettings):
    """The checker of the `shape_edits` source."""

    own_samples: ClassVar[bool] = True

    name: Literal["shape_edits"] = "shape_edits"
    """Reads background, colour, shape and size off edited images; pairs and their number are those of the source."""


def shares(asked: Sequence[Edit], images: Sequence[np.ndarray]) -> dict[str, float]:
    """Shares in [0, 1] of images (64, 64, 3) uint8: `edited`, those in which the attribute that the instruction names
    is right; `kept`, those in which all three others are as before; `all`, both. Each attribute's name has the share
    that is right of the edits of this attribute, where there are some."""
    seen = [check(image) for image in images]
    right = np.array(
        [
            [getattr(edit.after, name) == getattr(one, name) for name in ATTRIBUTES]
            for edit, one in zip(asked, seen, strict=True)
        ]
    )
    named = np.array([[name == edit.attribute for name in ATTRIBUTES] for edit in asked])
    edited, kept = (right & named).any(axis=1), (right | named).all(axis=1)
    table = {"edited": edited, "kept": kept, "all": edited & kept}
    for name in EDITED:
        table[name] = edited[[edit.attribute == name for edit in asked]]
    return {name: float(each.mean()) for name, each in table.items() if len(each)}


def evaluate(settings: Settings, inputs: Inputs) -> dict[str, Result]:
    """Generates the second image of held-out pairs, of the first one and the instruction, and reads it."""
    source = source_of(inputs, SourceSettings, "metric shape_edits reads images of the source `shape_edits`")
    held_out = open_source(source, "held_out")
    pairs = [pair("held_out", held_out.sample_id(number)) for number in range(source.checked_pairs)]
    texts = [source.captions.text or one.text for one in pairs]
    images = list(inputs.draw(texts, [one.reference for one in pairs]))
    found = shares([one.edit for one in pairs], images)
    marks: dict[str, float | None] = {str(name): share for name, share in source.marks.items()}
    return {"shape_edits": Result(len(pairs), tuple(Row(name, v, marks.get(name)) for name, v in found.items()))}
