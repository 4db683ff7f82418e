"""The contract of every family, found by its file: settings, `load`, and a whole set of methods."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

from daguerre import plugins
from daguerre.families.family import Family, TextToImage
from daguerre.families.settings import FamilySettings


@pytest.mark.parametrize("name", plugins.names("families"))
class TestFamily:
    def test_settings_are_named_after_the_file_and_documented(self, name):
        settings = plugins.find("families", name).Settings
        assert issubclass(settings, FamilySettings)
        assert settings.model_fields["family"].default == name
        assert [field for field, info in settings.model_fields.items() if not info.description] == []

    def test_load_takes_settings_and_seed_and_gives_a_whole_family(self, name):
        module = plugins.find("families", name)
        assert list(inspect.signature(module.load).parameters) == ["settings", "seed"]
        made = get_type_hints(module.load)["return"]
        assert issubclass(made, Family)
        assert made not in (Family, TextToImage)
        assert not inspect.isabstract(made)

    def test_a_family_inherits_from_no_other(self, name):
        made = get_type_hints(plugins.find("families", name).load)["return"]
        assert made.__bases__ in ((Family,), (TextToImage,))
