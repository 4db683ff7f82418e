"""The contract of adapters, over all files of adapters/."""

from __future__ import annotations

import pytest

from daguerre import plugins
from daguerre.contracts.adapters import AdapterContract

NEEDED: dict[str, dict[str, object]] = {"tokens": {"placeholder_token": "<new>", "existing": ["^star</w>$"]}}
"""Settings of adapters that do not work without, by name."""


@pytest.mark.parametrize("name", plugins.names("adapters"))
class TestAdapter(AdapterContract):
    """The contract."""

    @pytest.fixture
    def given(self, name: str) -> dict[str, object]:
        return NEEDED.get(name, {})
