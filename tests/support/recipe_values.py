"""The values of a recipe file by their shortest paths."""

from pathlib import Path
from typing import Any

from daguerre import trees
from daguerre.config import recipe, short_forms


def values(path: Path | str) -> dict[str, Any]:
    """Settings of the only source as `data.path`, all others by their own paths."""
    tree = recipe.read(Path(path))
    return {short_forms.short(setting, tree): value for setting, value in trees.paths(tree)}
