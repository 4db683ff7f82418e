"""A report on sizes, shapes, captions, filters and cropping.

usage: daguerre data stats DATA [-o stats.html] [key=value ...]

Prints how many samples there are, what is left out and how much is cropped. Writes one page that needs no other file:
histograms of sizes, aspect ratios and caption lengths, which bucket takes how many images and how much of them it
crops, what each filter passes, what is left out and why, the metadata that filters can use, and example images. Sizes
and metadata come from the index, of all samples; captions from random samples.

  daguerre data stats my_images
  daguerre data stats "shards/{000..099}.tar" data.buckets.aspects=auto data.filters="pwatermark < 0.5"
  daguerre data stats quickstart -o shapes.html open=true

  -o FILE or out=FILE   the page (data-stats.html)
  read=N                samples that are read for captions (2000)
  images=N              how many of them are shown (24)
  open=true             show the page in the browser
  seed=N                which samples are drawn (0, or the recipe's)
  data.KEY=VALUE        settings of the data, as in training
"""

import io
import webbrowser
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import yaml
from PIL import Image
from pydantic import Field

from daguerre import errors
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.cli.data import figures, samples
from daguerre.cli.data.opened import Opened, opened
from daguerre.cli.data.samples import Lost, Seen
from daguerre.cli.parts import out_file
from daguerre.config import options
from daguerre.config.options import Request
from daguerre.data import captions, skipped
from daguerre.data.alternatives import SEVERAL_LINES
from daguerre.data.images import decode
from daguerre.data.images.headers import Undecodable
from daguerre.data.index.index import Index
from daguerre.data.plan import selection
from daguerre.data.settings import SourceSettings
from daguerre.report import dataset_page
from daguerre.report.dataset_page import Example, Part
from daguerre.settings import ADDRESS, Settings
from daguerre.tracking.progress import Counter, skip_summary

_THUMB_PX = 320
_LETTERS = 1000
"""Longest caption below an image."""


class Options(Settings):
    """Options of `stats`, as the help has them."""

    out: Annotated[str, ADDRESS] = Field("data-stats.html", min_length=1)
    read: int = Field(2000, ge=1)
    images: int = Field(24, ge=0, le=400)
    open: bool = False


@dataclass
class Inspection:
    """Findings in the samples that were read."""

    captions: list[str] = field(default_factory=list)
    without: int = 0
    """Samples without a caption in the caption fields."""
    sizes_px: list[tuple[int, int]] = field(default_factory=list)
    """Heights and widths, of a source without an index."""
    ids: list[int] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    lost: skipped.Counts = field(default_factory=dict)


def run(arguments: list[str]) -> int:
    """Exit code 0; UserError where there is nothing to measure."""
    request = options.read(arguments, Options)
    for notice in request.notices:
        print(notice)
    path = out_file.place(request.options.out)
    parts = [_part(name, settings, request) for name, settings in request.settings.named().items()]
    given = request.settings.model_dump(mode="json", exclude_unset=True)
    title = request.what.rstrip("/").rpartition("/")[2] or request.what
    page = dataset_page.render(title, request.what, parts, yaml.safe_dump(given, sort_keys=False))
    write_bytes_atomically(path, page.encode())
    for part in parts:
        print(_summary(part))
    print(path)
    if request.options.open:
        webbrowser.open(path.resolve().as_uri())
    return errors.DONE


def _summary(part: Part) -> str:
    """The page's key figures and what is left out, for the terminal."""
    width = max(len(fact.name) for fact in part.facts)
    values = max(len(fact.value) for fact in part.facts)
    facts = [f"  {fact.name:<{width}}  {fact.value:>{values}}  {fact.note}".rstrip() for fact in part.facts]
    head = f"{part.name}: {part.summary}" if part.name else part.summary
    lines = [head, *part.notes, *facts, skip_summary(part.left_out)]
    return "\n".join(line for line in lines if line).replace("\N{NO-BREAK SPACE}", " ")


def _part(name: str, settings: SourceSettings, request: Request[Options]) -> Part:
    data = _captioned(opened(settings))
    found = _inspected(data, request)
    if data.index is None:  # endless: the samples that were read stand for all
        heights_px, widths_px = np.array(found.sizes_px, dtype=np.int32).T
        index = Index(np.array(found.ids), np.array([0, len(found.ids)]), heights_px, widths_px)
        data = replace(data, index=index, passes=np.ones(index.count, bool))
    return figures.part(name, data, found.captions, found.without, found.lost, found.examples)


def _captioned(data: Opened) -> Opened:
    """Leaves out the samples without a caption in the fields in use, as training does."""
    if data.index is None:
        return data
    has = selection.captioned(data.index, data.settings)
    without = skipped.counted({selection.no_caption(data.settings): int((data.passes & ~has).sum())})
    return replace(data, passes=data.passes & has, left_out=skipped.merged(data.left_out, without))


def _inspected(data: Opened, request: Request[Options]) -> Inspection:
    found = Inspection()
    numbers = samples.usable(data).drawn(request.options.read, request.seed, "stats")
    shown = np.linspace(0, len(numbers) - 1, min(len(numbers), request.options.images)).astype(int)
    with Counter("reading", len(numbers)) as counter:
        for i, sample in enumerate(samples.seen(data, numbers, request.seed)):
            counter.add(1)
            if isinstance(sample, Lost):
                skipped.add(found.lost, sample.reason, sample.name)
            else:
                _inspect(sample, data, found, i in shown, request.seed)
    return found


def _inspect(sample: Seen, data: Opened, found: Inspection, shown: bool, seed: int) -> None:
    found.ids.append(int(sample.key[0]))
    if captions.is_joined_of_lines(sample.record.texts, data.settings):
        skipped.add(found.lost, SEVERAL_LINES, sample.record.key, kept=True)
    if sample.caption is None:
        found.without += 1
    else:
        found.captions.append(sample.caption)
    try:
        if data.index is None:
            found.sizes_px.append(decode.upright_px(sample.record.image, data.settings.formats))
        if shown:
            found.examples.append(_example(sample, data.settings, seed))
    except Undecodable as error:
        skipped.add(found.lost, str(error), sample.record.key)


def _example(sample: Seen, settings: SourceSettings, seed: int) -> Example:
    """A small copy of the whole image, and the part that is trained on. Raises `Undecodable`."""
    upright = settings.model_copy(update={"random_flip": False})
    height, width, top, left, tall, wide = samples.framed(sample, upright, seed)[0].sizes.tolist()
    scale = max(tall / height, wide / width)
    box = (left / (width * scale), top / (height * scale), wide / (width * scale), tall / (height * scale))
    image = Image.fromarray(decode.sized(sample.record.image, settings, None)[0])
    image.thumbnail((_THUMB_PX * 2, _THUMB_PX))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    trained = "" if (height, width) == (tall, wide) else f" \N{RIGHTWARDS ARROW} {wide} x {tall}"
    caption = sample.caption or ""
    caption = caption if len(caption) <= _LETTERS else f"{caption[:_LETTERS]} ..."
    return Example(buffer.getvalue(), image.size, box, caption, f"{width} x {height}{trained}")
