"""JSON of files: a file that was damaged or forged never ends in anything but ValueError."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import ValidationError

from daguerre import formatting, regular
from daguerre.errors import UserError

Made = TypeVar("Made")

MISREAD = (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What libraries raise that take the files of a network for what they should be, and find JSON of another form."""

_MOST_DIGITS = 300
_COUNTS = re.compile(r"layers|depth|num_blocks")
_MOST_LAYERS = 10_000


def parse(text: bytes | str) -> Any:
    """The content of a JSON text. ValueError for a text that is not JSON, also for one that is nested so deeply that
    Python's parser gives up (with a RecursionError, which nobody would expect of a file), and for whole numbers beyond
    the range of floats, with which no arithmetic is possible (an OverflowError, as unexpected)."""
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits):,} digits")
    return int(digits)


class Bare(AbstractContextManager[None]):
    """Turns an Exception of no class of its own into a ValueError: tokenizers, a library in Rust, raises them."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is Exception:
            raise ValueError(str(error)) from error


def first_fault(error: ValidationError) -> str:
    """The first entry of a document that has another form than it should, and what is wrong with it."""
    found = error.errors()[0]
    return ": ".join([*filter(None, [".".join(map(str, found["loc"]))]), found["msg"].lower()])


def sent(read: Callable[[bytes], Made], given: bytes, fault: str) -> Made:
    """The message that `read` makes of what a page sent. UserError with `fault`, and the first entry that has another
    form, for something else."""
    try:
        return read(given)
    except ValueError as error:
        why = first_fault(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{fault}: {why}") from error


def check_counts(config: Any, name: str = "") -> None:
    """Checks that no number of layers in a network's config is beyond all networks: libraries build one after the
    other, without an end. ValueError names its key."""
    below = config.items() if isinstance(config, dict) else [(name, one) for one in config]
    for key, value in below:
        if isinstance(value, dict | list):
            check_counts(value, str(key))
        elif _COUNTS.search(str(key)) and isinstance(value, int | float) and value > _MOST_LAYERS:
            raise ValueError(f"{key} is {value:g}, more layers than any network has")


def digested(document: Any) -> dict[str, Any]:
    """A document with its digest, for a file of a cache: `undigested` gives it back."""
    return {"is": document, "xxh3_128": _digest(document)}


def undigested(path: Path) -> Any:
    """The document of a file that `digested` made. OSError; ValueError for one that is not as it was written."""
    found = read_object(path)
    if found.get("xxh3_128") != _digest(found.get("is")):
        raise ValueError("it is not as it was written")
    return found["is"]


def _digest(document: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file. OSError; ValueError for a file that holds anything else."""
    found = parse(regular.content(path))
    if not isinstance(found, dict):
        raise ValueError(f"it holds {formatting.called(found)}, not a JSON object")
    return found
