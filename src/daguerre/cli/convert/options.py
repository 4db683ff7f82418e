"""The arguments of the `convert` verbs and of `fetch`: one thing that is meant, and settings from a closed list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from daguerre.config import overrides
from daguerre.errors import UserError

DTYPES = ("float16", "bfloat16", "float32")


def read(arguments: Sequence[str], verb: str, allowed: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What the bare word names (empty if there is none) and the settings. UserError for one that is not allowed."""
    given = overrides.split(arguments)
    values = dict(overrides.pair(override) for override in given.overrides)
    if unknown := sorted(values.keys() - set(allowed)):
        raise UserError(f"{', '.join(unknown)}: {verb} takes {', '.join(allowed)}")
    return given.recipe, values


def one_of(values: dict[str, str], name: str, allowed: Sequence[str]) -> str | None:
    """The value of a setting with a closed list; None where it is not given."""
    value = values.get(name)
    if value is not None and value not in allowed:
        raise UserError(f"{name}={value}: choose one of {', '.join(allowed)}")
    return value


def switch(values: dict[str, str], name: str) -> bool:
    """Of a setting that is true or false."""
    return one_of(values, name, ("true", "false")) == "true"


def new_place(values: dict[str, str], example: str) -> Path:
    """`out`, which must be given and must not exist: nothing is overwritten."""
    if "out" not in values:
        raise UserError(f"where to? Give out={example}")
    out = Path(values["out"]).expanduser()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"out={out} exists: choose another name, or remove it first")
    return out


def gigabytes(path: Path) -> str:
    """How large a file or a folder is."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return size_text(sum(file.stat().st_size for file in files))


def size_text(size_bytes: int) -> str:
    """In GB, or in MB below one."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
