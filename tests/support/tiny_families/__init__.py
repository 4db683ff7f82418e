"""Every family with tiny networks: one file a family, found by its name, so that contract tests list none by hand."""

from importlib import import_module
from pathlib import Path
from typing import Any

from daguerre import plugins
from daguerre.models.family import Family

NAMES = plugins.names("families")


def settings(name: str, folder: Path) -> dict[str, Any]:
    """The settings of the section `model`, which the family's file here writes what it needs in `folder` for."""
    found: dict[str, Any] = import_module(f"tiny_families.{name}").settings(folder)
    return {"family": name, **found}


def load(name: str, folder: Path, seed: int = 1) -> Family:
    """The family of these settings."""
    module = plugins.find("families", name)
    family: Family = module.load(module.Settings.model_validate(settings(name, folder)), seed)
    return family
