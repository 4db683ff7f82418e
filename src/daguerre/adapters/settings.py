"""Settings that every adapter shares. No torch here."""

from __future__ import annotations

from daguerre.settings import Settings


class AdapterSettings(Settings):
    """What every adapter's `Settings` starts from."""

    name: str
    """Name of the adapter: a file in adapters."""
