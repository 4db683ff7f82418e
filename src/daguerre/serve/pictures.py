"""Sample images for a browser: found by save and number, never by a name, and encoded again or sent as they are."""

import io
import threading
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.data.images import headers
from daguerre.data.images.transparency import on_white
from daguerre.errors import UserError
from daguerre.report.html import SMALL_PX, Html, element
from daguerre.report.run import MOST_BYTES, Run, Sample, asked, samples, strengths
from daguerre.serve.bounds import OutOfBounds, check_file, within

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
SMALL = 256
"""Longest side of an image in a strip."""
MOST_PICTURE_BYTES = 16 * MOST_BYTES
_MOST_PIXELS = 100_000_000
_ROWS = 40
DECODING = threading.Semaphore(2)
"""At a time: a large picture takes hundreds of megabytes while it is decoded."""


def of_save(folder: Path, roots: tuple[Path, ...], step: int, number: int) -> Path:
    """The file of an image of a save, by its place in the listing. UserError, OSError for one that is not there."""
    listing = RunFolder(folder).samples_of(step) / "samples.json"
    check_file(listing, roots, MOST_BYTES)
    found = samples(listing.parent.parent, [], listing.parent.name)
    return _at([one.path for one in found if one.step == step], number)


def of_strengths(folder: Path, roots: tuple[Path, ...], number: int) -> Path:
    """The file of an image with adapters at some strength, by its place among all of them. UserError."""
    return _at([one.path for one in strengths(RunFolder(folder).samples, [])], number)


def of_asked(folder: Path, roots: tuple[Path, ...], number: int) -> Path:
    """The file of an image that was asked for, by its place among all of them, oldest first. UserError."""
    return _at([one.path for one in asked(RunFolder(folder).samples, [])], number)


def _at(paths: list[Path], number: int) -> Path:
    if not 0 <= number < len(paths):
        raise UserError("there is no such image", code="missing")
    return paths[number]


def check(path: Path, roots: tuple[Path, ...]) -> None:
    """OutOfBounds for an image that the page must not read; OSError for one that is not there."""
    check_file(path, roots, MOST_PICTURE_BYTES)
    if not within(path, roots):
        raise OutOfBounds(f"{path.name} lies outside the folders that this page may show")


def whole(path: Path) -> tuple[bytes, str]:
    """The bytes of an image and its type, by its content. UserError for anything else."""
    with _opened(path) as image:
        kind = FORMATS[str(image.format)]
    return path.read_bytes(), kind


def small(path: Path) -> tuple[bytes, str]:
    """The image as WebP, its longest side `SMALL` at most, and its type. UserError for anything else."""
    stat = path.stat()
    return _small(path, stat.st_mtime_ns, stat.st_size), FORMATS["WEBP"]


@lru_cache(maxsize=512)
def _small(path: Path, changed_ns: int, size_bytes: int) -> bytes:
    """By time and size, so that a file that changes is read again."""
    stream = io.BytesIO()
    with DECODING, _opened(path) as opened:
        opened.draft("RGB", (SMALL, SMALL))
        try:
            image = on_white(ImageOps.exif_transpose(opened))
        except headers.BROKEN as error:
            raise UserError(f"{path.name} is damaged: it cannot be decoded", code="damaged") from error
    image.thumbnail((SMALL, SMALL), Image.Resampling.LANCZOS)
    image.save(stream, "WEBP", quality=86, lossless=max(image.size) <= SMALL_PX)
    return stream.getvalue()


def _opened(path: Path) -> Image.Image:
    """An image, its pixels not read yet: one that would unfold to gigabytes is refused before."""
    try:
        image = Image.open(path, formats=tuple(FORMATS))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path.name} cannot be read as an image", code="damaged") from error
    if image.width * image.height > _MOST_PIXELS:
        image.close()
        raise UserError(f"{path.name} has {image.width} x {image.height} pixels: too many for this page")
    return image


Picture = tuple[str, str, Sample]
"""Address, caption, and what is known of it."""


def numbered(run: Run) -> dict[tuple[str, int | None], list[Picture]]:
    """The images of each prompt and seed over saves, oldest first; prompts of the newest save first."""
    rows: dict[tuple[str, int | None], list[Picture]] = defaultdict(list)
    counts: dict[int, int] = defaultdict(int)
    for sample in run.samples:
        place = f"image/{sample.step}/{counts[sample.step]}"
        rows[sample.prompt, sample.seed].append((place, f"update {sample.step:,}", sample))
        counts[sample.step] += 1
    newest = max(counts, default=0)
    return dict(sorted(rows.items(), key=lambda row: row[1][-1][2].step != newest))


def evolution(run: Run) -> Html | None:
    """The strips of the report, of every save; an image opens at full size."""
    rows = numbered(run)
    shown = [_row(prompt, seed, images) for (prompt, seed), images in list(rows.items())[:_ROWS]]
    more = element("p", f"{len(rows) - _ROWS} more prompts are not shown.", class_="note")
    return element("div", *shown, more if len(rows) > _ROWS else None, class_="evolution live") if rows else None


def by_strength(run: Run) -> Html | None:
    """A strip for each prompt with the adapter at several strengths; None without such images."""
    rows: dict[tuple[str, int | None], list[Picture]] = defaultdict(list)
    for number, sample in enumerate(run.strengths):
        caption = f"strength {sample.how['strength']:g}"
        rows[sample.prompt, sample.seed].append((f"strength/{number}", caption, sample))
    shown = [_row(prompt, seed, images) for (prompt, seed), images in list(rows.items())[:_ROWS]]
    return element("div", *shown, class_="evolution live") if shown else None


def on_request(run: Run) -> Html | None:
    """Images that were asked for while the run trained, a row for each prompt and seed, the newest first."""
    rows: dict[tuple[str, int | None], list[Picture]] = {}
    for number, sample in enumerate(asked(RunFolder(run.folder).samples, [])):
        row = rows.pop((sample.prompt, sample.seed), [])
        rows[sample.prompt, sample.seed] = [*row, (f"asked/{number}", f"update {sample.step:,}", sample)]
    shown = [_row(prompt, seed, images) for (prompt, seed), images in reversed(rows.items())]
    return element("div", *shown[:_ROWS], class_="evolution live") if shown else None


def _row(prompt: str, seed: int | None, images: list[Picture]) -> Html:
    small_text = None if seed is None else element("small", f"seed {seed}")
    figures = [_figure(*each, newest=i == len(images) - 1) for i, each in enumerate(images)]
    return element(
        "section",
        element("p", prompt or "(empty prompt)", small_text, class_="prompt"),
        element("div", *figures, class_="strip", role="group", aria_label=f"{prompt}: images, oldest first"),
        class_="row",
    )


def _figure(place: str, caption: str, sample: Sample, newest: bool) -> Html:
    width, height = _size(sample.path)
    image = element(
        "img",
        src=f"{place}/small",
        alt=f"{sample.prompt}, {caption}",
        width=width,
        height=height,
        loading="lazy",
        class_="pixels" if max(width, height) <= SMALL_PX else None,
    )
    link = element("a", image, href=place, data_caption=caption, data_how=_how(sample.how))
    text = element("figcaption", caption if newest else caption.removeprefix("update "))
    return element("figure", link, text, class_="newest" if newest else None)


def _how(how: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in how.items() if k not in ("file", "prompt", "step") and v not in ("", None))


def _size(path: Path) -> tuple[int, int]:
    """Width and height, without which a page moves when images come; a square for what cannot be read."""
    try:
        stat = path.stat()
        return _size_of(path, stat.st_mtime_ns)
    except (OSError, UserError):
        return SMALL, SMALL


@lru_cache(maxsize=8192)
def _size_of(path: Path, changed_ns: int) -> tuple[int, int]:
    with _opened(path) as image:
        return image.size
