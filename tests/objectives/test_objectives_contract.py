"""The contract of objectives, over all files of objectives/."""

from typing import Any

import pytest

from daguerre import plugins
from daguerre.contracts.objectives import DiffusionContract, ObjectiveContract
from daguerre.objectives.settings import DiffusionSettings

SETTINGS = {name: plugins.find("objectives", name).Settings for name in plugins.names("objectives")}
NAMES = [name for name, own in SETTINGS.items() if issubclass(own, DiffusionSettings)]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def given() -> dict[str, Any]:
    return {}


class TestObjective(ObjectiveContract):
    """Settings."""


class TestDiffusion(DiffusionContract):
    """Draws, losses and levels."""
