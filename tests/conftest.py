"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Stable Diffusion folder with tiny random networks; read it, never write into it."""
    from tiny_models import tiny_sd_folder

    return tiny_sd_folder(tmp_path_factory.mktemp("tiny_sd"))
