"""The toy problem as a fixture, so that no test depends on the import path of tests."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("toy_problem", Path(__file__).with_name("toy_problem.py"))
_toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_toy)


@pytest.fixture
def toy():
    return _toy
