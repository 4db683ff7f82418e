"""The parts that all contracts share. pytest gives them `name`, the plug-in's, and `given`, its settings."""

from typing import Any, ClassVar

import pytest

from daguerre import plugins
from daguerre.settings import Settings, documentation


class Contract:
    """A contract of one kind of plug-ins."""

    kind: ClassVar[str]
    """The kind, as in `plugins.FOLDERS`."""

    @pytest.fixture
    def plugin(self, name: str) -> Any:
        """The plug-in's module."""
        return plugins.find(self.kind, name)


class SettingsContract(Contract):
    """The part of a contract that is about `Settings`."""

    start: ClassVar[type[Settings]] = Settings
    """The class that the settings of all plug-ins of the kind start from."""

    def test_settings_are_named_after_the_plug_in_and_documented(self, plugin: Any, name: str) -> None:
        assert issubclass(plugin.Settings, self.start)
        # A source may have another `name`.
        key = next(key for key in ("source", "family", "name") if key in plugin.Settings.model_fields)
        assert plugin.Settings.model_fields[key].default == name
        assert plugin.Settings.model_fields.keys() - documentation(plugin.Settings) == set()

    def test_settings_survive_being_dumped(self, plugin: Any, given: Any) -> None:
        settings = plugin.Settings(**given)
        assert plugin.Settings.model_validate(settings.model_dump()) == settings
