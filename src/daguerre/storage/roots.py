"""Folders and addresses below which a run that others queue reads and writes: the variable ROOTS of the environment.

What its settings name is compared by config/roots.py; what links and cells of its data lead to, where they are read.
"""

import json
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from daguerre.credentials import SEPARATOR, redacted, scheme
from daguerre.settings import ROOTS

AWAY = "link that leads out of the folders that this run may read"


def given() -> tuple[str, ...] | None:
    """The folders and addresses; None where a run may read anything."""
    return _listed(os.environ.get(ROOTS, ""))


def outside(text: str) -> str:
    """The reason why a text names something outside; "" where all that it names is inside, or all may be read."""
    if (roots := given()) is None:
        return ""
    return next((why for part in SEPARATOR.split(text) if (why := _part_outside(part.strip(), roots))), "")


def leads_away(path: str | Path) -> bool:
    """True for a local path that is, or leads by links to, a place outside."""
    return (roots := given()) is not None and not _is_below(Path(path).resolve(), roots)


@lru_cache(maxsize=1)
def _listed(text: str) -> tuple[str, ...] | None:
    return tuple(map(str, json.loads(text))) if text else None


def _is_below(path: Path, roots: Sequence[str]) -> bool:
    return any(path.is_relative_to(Path(root).resolve()) for root in roots if not scheme(root))


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
        if not _is_below(path, roots):
            return f"{path} is outside of the folders that runs may read"
    return ""
