"""Every diffusion objective with its defaults, by fixture: a new file in objectives/ needs no edit here."""

from __future__ import annotations

import pytest

from daguerre import plugins
from daguerre.objectives.algebra import Diffusion
from daguerre.objectives.settings import DiffusionSettings


@pytest.fixture(params=plugins.names("objectives"))
def plugin(request: pytest.FixtureRequest):
    module = plugins.find("objectives", request.param)
    if not issubclass(module.Settings, DiffusionSettings):
        pytest.skip("not a diffusion objective")
    return module


@pytest.fixture
def objective(plugin) -> Diffusion:
    return plugin.build(plugin.Settings())
