"""Settings that every family shares. No torch here."""

from __future__ import annotations

from daguerre.settings import Settings


class FamilySettings(Settings):
    """What every family's `Settings` starts from. A family's file adds its own fields and narrows `family`."""

    family: str
    """Name of the family: a file in families."""
