"""Stage B of Stable Cascade with tiny networks."""

from pathlib import Path
from typing import Any

from tiny_cascade import stage_b, write_decoder


def settings(folder: Path) -> dict[str, Any]:
    return stage_b(write_decoder(folder / "decoder"))
