"""Stage C of Stable Cascade with tiny networks."""

from pathlib import Path
from typing import Any

from tiny_cascade import stage_c, write_prior


def settings(folder: Path) -> dict[str, Any]:
    return stage_c(write_prior(folder / "prior"))
