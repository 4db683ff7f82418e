"""What tests of adapters share."""

from pathlib import Path

import pytest
from tiny_models import write_sd


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion; read it, never write into it."""
    return write_sd(tmp_path_factory.mktemp("base") / "sd")
