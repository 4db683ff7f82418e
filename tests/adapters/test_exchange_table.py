"""The exchange table of docs/adapters.md is what tools/exchange_table.py measures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exchange_table", ROOT / "tools" / "exchange_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(tool: ModuleType) -> list[str]:
    text = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    return text.partition(tool.BEGIN)[2].partition(tool.END)[0].strip().splitlines()


@pytest.mark.long  # of the quick tests, test_lora_kohya.py has what diffusers and ComfyUI apply
def test_one_row(tool):
    """Of SD alone; its columns of kohya's file and of diffusers in its own are those of both."""
    row = tool.table(("sd",), ("convolutions",)).splitlines()[-1].split(" | ")
    (expected,) = [line.split(" | ") for line in printed(tool) if line.startswith("| convolutions")]
    assert row[1:5] == expected[1:5] == ["exact"] * 4


@pytest.mark.long
def test_the_table(tool):
    assert tool.table().splitlines() == printed(tool)
