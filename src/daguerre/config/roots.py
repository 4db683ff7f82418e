"""Folders to which a recipe that others queue is bound: what it reads and writes lies below them (`daguerre serve`).

They are in a variable of the environment, so that they hold in every process of such a run, whatever its files say by
the time at which it starts. Without it a recipe may name any place.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from daguerre.config.errors import Problem
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, Settings
from daguerre.storage import roots

_TEXTS = ("description",)
"""Settings whose addresses are kept without secrets, and which name no place."""


def problems(settings: Settings) -> list[Problem]:
    """Settings that name a place outside; none where no folders are given."""
    if roots.given() is None:
        return []
    return [
        Problem(path, f"{why}. `daguerre serve --root DIR` lets runs read there", text)
        for path, text in places(settings)
        if path not in _TEXTS and (why := roots.outside(text))
    ]


def check_recipe(place: str | Path) -> None:
    """UserError for the file or address of a recipe outside; nothing where no folders are given."""
    if why := roots.outside(str(place)):
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
