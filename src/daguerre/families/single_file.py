"""Checkpoints of one file in the original layout, as folders in diffusers' layout."""

from __future__ import annotations

from pathlib import Path

from daguerre.errors import UserError


def folder(path: Path, pickled: bool) -> Path:
    """A folder in diffusers' layout, made once."""
    raise UserError(f"{path}: single-file checkpoints are not read yet")
