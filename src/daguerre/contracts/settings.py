"""The contract of plug-ins of whose kind only the settings have a contract here."""

from typing import Any

import pytest

from daguerre import plugins
from daguerre.contracts import contract


class AnyContract(contract.SettingsContract):
    """Settings of any kind."""

    @pytest.fixture
    def plugin(self, kind: str, name: str) -> Any:
        """The plug-in's module."""
        return plugins.find(kind, name)
