"""Prompts: from the command line, a recipe, or a file that is read row by row and never held.

A row is one prompt with the columns of its file; generation/requests.py makes image requests of rows.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from daguerre.errors import UserError
from daguerre.storage import local_files
from daguerre.types import CONTROLS, IMAGE, IMAGE_PROMPT, MASK, REFERENCES
from daguerre.unicode import is_text, mended

TABLES: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}
LINES = (".jsonl", ".ndjson")
CONTROL_FROM = "control_from"
IMAGES = (IMAGE, MASK, *CONTROLS, CONTROL_FROM, *REFERENCES, IMAGE_PROMPT)
"""Columns of image files; the first of them that a row has decides the size of what is generated, but for the last."""
_PLAIN = ("prompt", "negative_prompt", "seed", "num_images", "guidance_scale", "height", "width", "file_name")
BETWEEN = "interpolate_to"
KNOWN = (*_PLAIN, BETWEEN, "strength", *IMAGES)
"""Columns that decide an image; others are kept in its JSON."""
STAND_IN = {"caption": "prompt", "uid": "file_name"}
"""Columns of open-diffusion's lists of captions, and what they are here if there is no column `prompt`."""
_LEAST = {"seed": 0, "num_images": 1, "height": 1, "width": 1}
"""Columns of whole numbers, and their least values."""
_FILE = "sampling.prompts_file"
_EXAMPLE = '{"prompt": "a cat", "seed": 7}'
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt; fields that are None are as the command says."""

    prompt: str
    where: str = ""
    """Its line in the file, for messages."""
    negative_prompt: str | None = None
    seed: int | None = None
    num_images: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    width: int | None = None
    file_name: str | None = None
    """Name of the image without its suffix; may hold folders."""
    strength: float | None = None
    interpolate_to: str | None = None
    """A prompt to which its images go in equal steps."""
    images: Mapping[str, Path] = field(default_factory=dict)
    """Files by name."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns."""


@dataclass(frozen=True)
class Prompts:
    """A source of prompts."""

    name: str
    """For people, and for the folder of the images."""
    digest: str
    """SHA-256 of the prompts or their file, hex."""
    rows: Callable[[], Iterator[Row]]
    """All of them, from the start."""


def inline(prompts: list[str], interpolate_to: str | None = None) -> Prompts:
    digest = sha256(json.dumps(prompts if interpolate_to is None else [prompts, interpolate_to]).encode()).hexdigest()
    return Prompts(prompts[0], digest, lambda: (Row(text, interpolate_to=interpolate_to) for text in prompts))


def of_file(name: str) -> Prompts:
    """The prompts of a file, whose suffix says its format. UserError if it cannot be read."""
    path = Path(name).expanduser()
    try:
        with local_files.opened(path) as file:
            digest = sha256()
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        raise UserError(
            f"prompts_file={name} cannot be read: {error.strerror or error}", code="missing", setting=_FILE
        ) from error
    return Prompts(path.stem, digest.hexdigest(), lambda: rows(path))


def rows(path: Path) -> Iterator[Row]:
    """The rows of a file of prompts, read as they are asked for. UserError names the line that cannot be used."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise UserError(
            f"prompts_file={path}: give JSONL, one object per line such as {_EXAMPLE}, in a .jsonl file", setting=_FILE
        )
    read = _table if suffix in TABLES else _lines_of_json if suffix in LINES else _text
    empty = True
    try:
        with path.open(encoding="utf-8-sig", newline="" if suffix in TABLES else None) as file:
            for row in read(path, file):
                empty = False
                yield row
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"prompts_file={path} cannot be read as UTF-8 text: {error}", code="damaged", setting=_FILE
        ) from error
    except csv.Error as error:
        raise UserError(
            f"prompts_file={path} is not a table of the type its extension names: {error}",
            code="damaged",
            setting=_FILE,
        ) from error
    if empty:
        raise UserError(f"prompts_file={path} has no prompt: write one per line", code="empty", setting=_FILE)


def _text(path: Path, file: TextIO) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield Row(line.strip(), f"line {number}")


def _lines_of_json(path: Path, file: TextIO) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            found = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: {error}. Write one object per line, such as {_EXAMPLE}") from error
        if not isinstance(found, dict):
            raise UserError(f"{where} is not an object: write one per line, such as {_EXAMPLE}")
        yield _row(dict(zip(_columns(list(found), where), found.values(), strict=True)), where, path.parent)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _table(path: Path, file: TextIO) -> Iterator[Row]:
    reader = csv.reader(file, delimiter=TABLES[path.suffix.lower()], strict=True)
    header = _columns([name.strip() for name in next(reader, [])], path.name)
    if twins := sorted({name for name in header if header.count(name) > 1}):
        raise UserError(f"{path.name} has the column {', '.join(twins)} twice: rename one", code="conflict")
    for cells in reader:
        if not cells:
            continue
        where = f"{path.name} line {reader.line_num}"
        if len(cells) != len(header):
            raise UserError(
                f"{where} has {len(cells)} cells and the header {len(header)}: put quotes around text with a comma"
            )
        yield _row(dict(zip(header, cells, strict=True)), where, path.parent)


def _columns(columns: list[str], where: str) -> list[str]:
    """The columns by our own names. UserError if none holds prompts."""
    if "prompt" in columns:
        return columns
    if "caption" in columns:
        return [STAND_IN.get(name, name) for name in columns]
    shown = ", ".join(repr(name) for name in columns) or "none"
    raise UserError(
        f"{where}: there is no column 'prompt' among its columns ({shown}): give this name to the column of prompts. "
        f"Known columns: {', '.join(KNOWN)}",
        code="missing",
    )


def _row(cells: Mapping[str, Any], where: str, folder: Path) -> Row:
    """The row of these columns of a file in `folder`; an empty cell, and null, mean that nothing is given."""
    given = {name: cells.get(name) for name in KNOWN}
    metadata = mended({name: value for name, value in cells.items() if name not in KNOWN and name.strip()})
    prompt, negative, toward = given["prompt"], given["negative_prompt"] or "", given[BETWEEN] or ""
    for name, value in (("prompt", prompt), ("negative_prompt", negative), (BETWEEN, toward)):
        if not isinstance(value, str) or "\0" in value or not is_text(value):
            raise UserError(f"{where}: {name} is {value!r}: write text")
    numbers = {name: _whole(given[name], name, where, least) for name, least in _LEAST.items()}
    scale, file_name = _scale(given["guidance_scale"], where), _file_name(given["file_name"], where)
    images = {name: place for name in IMAGES if (place := _place(given[name], name, where, folder))}
    strength = _number(given["strength"], "strength", where)
    text, negative, toward = str(prompt).strip(), str(negative).strip() or None, str(toward).strip() or None
    return Row(
        text, where, negative, **numbers,
        guidance_scale=scale, file_name=file_name, strength=strength, interpolate_to=toward,
        images=images, metadata=metadata,
    )  # fmt: skip


def _number(value: Any, name: str, where: str) -> float | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        if isinstance(value, bool):
            raise ValueError
        return int(value) if isinstance(value, int) or str(value).strip().isdecimal() else float(value)
    except (TypeError, ValueError):
        raise UserError(f"{where}: {name} is {value!r}: write a number, or nothing") from None


def _whole(value: Any, name: str, where: str, least: int) -> int | None:
    number = _number(value, name, where)
    if number is None:
        return None
    if number != number // 1 or number < least or number >= 1 << 62:  # not so for NaN either
        raise UserError(f"{where}: {name} is {value!r}: write a whole number from {least}")
    return int(number)


def _scale(value: Any, where: str) -> float | None:
    number = _number(value, "guidance_scale", where)
    if number is not None and not 0 <= number < float("inf"):
        raise UserError(f"{where}: guidance_scale is {value!r}: write a number from 0")
    return None if number is None else float(number)


def _place(value: Any, name: str, where: str, folder: Path) -> Path | None:
    """The place of an image file; a relative one is looked for next to the file of prompts."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or "\0" in value or not is_text(value):
        raise UserError(f"{where}: {name} is {value!r}: write the place of an image file")
    return folder / Path(value.strip()).expanduser()


def _file_name(value: Any, where: str) -> str | None:
    """A name inside the folder, without the suffix of an image."""
    if value is None or value == "":
        return None
    text = str(value).strip()
    path = PurePosixPath(text)
    inside = path.parts and not path.is_absolute() and not {".", ".."} & set(text.split("/"))
    odd = set(text) & set("\\\0") or not is_text(text)
    if not isinstance(value, str | int) or not inside or odd or path.name.startswith("."):
        raise UserError(f"{where}: file_name is {value!r}: write a name such as cat-7 or animals/cat-7, without ..")
    return str(path.with_suffix("")) if path.suffix.lower() in _SUFFIXES else str(path)
