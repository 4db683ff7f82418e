"""Captions of the pictures of a folder, written next to them: fields of NAME.json, or NAME.txt.

A picture that has the caption already is left alone, so that the same command goes on where it was stopped.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from PIL import Image, ImageOps

from daguerre import documents
from daguerre.captioning.captioner import Captioner
from daguerre.checkpoint.atomic import locked, write_bytes_atomically
from daguerre.data.folder import scan
from daguerre.data.folder.captions import Rules
from daguerre.data.skipped import SkipReport
from daguerre.errors import UserError

FORMATS = ("jpeg", "png", "webp")
Write = Literal["json", "txt"]


@dataclass
class Counts:
    """Counts of what became of the pictures."""

    written: int = 0
    known: int = 0
    """They had the caption."""
    empty: int = 0
    """The captioner said nothing."""
    unreadable: list[str] = field(default_factory=list)
    """Names of pictures that cannot be read."""
    left_out: SkipReport = field(default_factory=dict)
    """Those that data sets leave out, such as pictures with a damaged file next to them, by reason."""


def pictures(folder: Path, counts: Counts) -> list[Path]:
    """The pictures of a folder as data sets see them: without masks, control images and the like."""
    found = scan.scan(folder, Rules(FORMATS, fields=()), {})
    counts.left_out = found.skipped
    return [folder / sample.path for sample in found.samples if isinstance(sample, scan.Sample)]


def caption(
    folder: Path, load: Callable[[], Captioner], name: str, write: Write, again: bool, batch_size: int,
    tell: Callable[[int, int], None],
) -> Counts:  # fmt: skip
    """Captions the pictures that have no field `name` in NAME.json (or no NAME.txt) yet, or all of them `again`. The
    captioner is loaded if there are some. `tell` gets how many are done, and of how many."""
    counts, todo = Counts(), []
    for picture in pictures(folder, counts):
        if not again and _has(picture, name, write):
            counts.known += 1
        else:
            todo.append(picture)
    captioner = load() if todo else None
    for start in range(0, len(todo), batch_size):
        some = [*_opened(todo[start : start + batch_size], counts)]
        if some and captioner is not None:
            found = captioner.captions([image for _, image in some])
            with locked(folder):  # a page may change captions of the same files
                for (picture, _), captions in zip(some, found, strict=True):
                    _write(picture, captions, name, write, counts)
        tell(min(start + batch_size, len(todo)), len(todo))
    return counts


def _opened(paths: list[Path], counts: Counts) -> Iterator[tuple[Path, Image.Image]]:
    for path in paths:
        try:
            with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as opened:
                image = ImageOps.exif_transpose(opened)
                yield path, image.convert("RGBA" if "transparency" in image.info or "A" in image.mode else "RGB")
        except (OSError, SyntaxError, ValueError):  # a broken PNG is a SyntaxError to Pillow
            counts.unreadable.append(path.name)


def _has(picture: Path, name: str, write: Write) -> bool:
    return picture.with_suffix(".txt").exists() if write == "txt" else bool(_document(picture).get(name))


def _document(picture: Path) -> dict[str, object]:
    path = picture.with_suffix(".json")
    try:
        return documents.read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # it has changed since the folder was read, or is of another picture
        raise UserError(f"{path} is no JSON object: {error}", code="damaged") from error


def _write(picture: Path, captions: dict[str, str], name: str, write: Write, counts: Counts) -> None:
    first = next(iter(captions))
    named = {name if key == first else key.replace(first, name, 1): text for key, text in captions.items() if text}
    if name not in named:
        counts.empty += 1
        return
    if write == "txt":
        write_bytes_atomically(picture.with_suffix(".txt"), f"{named[name]}\n".encode())
    else:
        document = {**_document(picture), **named}
        text = json.dumps(document, ensure_ascii=False, indent=1)
        write_bytes_atomically(picture.with_suffix(".json"), text.encode(errors="backslashreplace") + b"\n")
    counts.written += 1
