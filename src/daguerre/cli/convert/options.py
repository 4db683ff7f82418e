"""The arguments of the `convert` verbs and of `fetch`: one thing that is meant, and options of the verb."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from daguerre.config import overrides
from daguerre.config.options import own_options
from daguerre.errors import UserError
from daguerre.formatting import format_size
from daguerre.settings import Settings

Options = TypeVar("Options", bound=Settings)
Dtype = Literal["float16", "bfloat16", "float32"]


def read(
    arguments: Sequence[str], verb: str, options_class: type[Options], settings: Sequence[str] = ()
) -> tuple[str, Options, list[str]]:
    """The bare word (empty without one), the options, and overrides of these settings of a recipe. UserError for
    other keys."""
    given = overrides.split(arguments)
    options, rest = own_options(given.overrides, options_class)
    if unknown := sorted({overrides.pair(each)[0] for each in rest} - {*settings}):
        allowed = ", ".join((*options_class.model_fields, *settings))
        raise UserError(f"{', '.join(unknown)}: {verb} takes {allowed}", code="unknown")
    return given.recipe, options, rest


def new_place(out: str | None, example: str) -> Path:
    """The place `out`, which must be given and must not exist: nothing is overwritten."""
    if out is None:
        raise UserError(f"no output given. Set out={example}", code="missing", setting="out")
    place = Path(out).expanduser()
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise UserError(f"out={out} exists: choose another name, or remove it first", setting="out")
    return place


def size_of(path: Path) -> str:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return format_size(sum(file.stat().st_size for file in files))
