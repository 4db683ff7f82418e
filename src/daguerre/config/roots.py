"""Folders to which a recipe that others queue is bound: what it reads and writes lies below them (`daguerre serve`).

They are in a variable of the environment, so that they hold in every process of such a run, whatever its files say by
the time at which it starts. Without it a recipe may name any place.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel

from daguerre.config.errors import Problem
from daguerre.credentials import SEPARATOR, redacted, scheme
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, ROOTS, Settings

_TEXTS = ("description",)
"""Settings whose addresses are kept without secrets, and which name no place."""


def problems(settings: Settings) -> list[Problem]:
    """Settings that name a place outside; none where no folders are given."""
    if (roots := _given(os.environ.get(ROOTS, ""))) is None:
        return []
    return [
        Problem(path, f"{why}. `daguerre serve --root DIR` lets runs read there", text)
        for path, text in places(settings)
        if path not in _TEXTS and (why := _outside(text, roots))
    ]


def check_recipe(place: str | Path) -> None:
    """UserError for the file or address of a recipe outside; nothing where no folders are given."""
    roots = _given(os.environ.get(ROOTS, ""))
    if roots is not None and (why := _outside(str(place), roots)):
        raise UserError(f"the recipe: {why}")


def places(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    """All texts in settings that name a file, a folder or an address, with the paths of the settings."""
    for name, field in type(settings).model_fields.items():
        value, path = getattr(settings, name), f"{prefix}{name}"
        if ADDRESS in field.metadata:
            yield from ((path, text) for text in _texts(value))
        else:
            for key, inner in _inside(value):
                yield from places(inner, f"{path}.{key}" if key else f"{path}.")


def _inside(value: Any) -> Iterator[tuple[str, BaseModel]]:
    """The settings in a value, with what leads to them."""
    if isinstance(value, BaseModel):
        yield "", value
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((f"{key}.{below}", found) for below, found in _inside(inner))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


@lru_cache(maxsize=1)
def _given(text: str) -> tuple[str, ...] | None:
    return tuple(map(str, json.loads(text))) if text else None


def _outside(text: str, roots: Sequence[str]) -> str:
    """The reason why a text names something outside; "" where all that it names is inside."""
    return next((why for part in SEPARATOR.split(text) if (why := _part_outside(part.strip(), roots))), "")


def _part_outside(text: str, roots: Sequence[str]) -> str:
    local = re.sub(r"^file:(//(localhost)?(?=/))?", "", text, flags=re.IGNORECASE)
    if scheme(local) or local.startswith("pipe:"):
        below = [root for root in roots if scheme(root) and local.startswith(f"{root.rstrip('/')}/")]
        is_below = below and ".." not in local.split("/")
        return "" if is_below else f"{redacted(text)} is an address, and none that runs may read"
    if re.search(r"\{[^}]*/", local):
        return "braces with a slash in them may lead anywhere: name the folders one by one"
    for name in {local, unquote(local)} if local != text else {local}:
        path = Path(name).expanduser().absolute().resolve()
        if not any(path.is_relative_to(Path(root).resolve()) for root in roots if not scheme(root)):
            return f"{path} is outside of the folders that runs may read"
    return ""
