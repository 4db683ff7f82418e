"""The contract of metrics, over all files of evaluation/metrics/."""

from __future__ import annotations

from pathlib import Path

import pytest
from emoji_fonts import colour_font

from daguerre import plugins
from daguerre.contracts.metrics import MetricContract
from daguerre.data.settings import SourceSettings

FEW: dict[str, dict[str, object]] = {"shape_edits": {"checked_pairs": 8}, "shapes": {"checked_prompts": 8}}


@pytest.fixture(scope="module")
def font(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A font of few emoji."""
    return colour_font(tmp_path_factory.mktemp("font") / "few.ttf")


@pytest.mark.parametrize("name", plugins.names("metrics"))
class TestMetric(MetricContract):
    """The contract."""

    @pytest.fixture
    def given(self, name: str) -> dict[str, object]:
        return {}

    @pytest.fixture
    def source(self, name: str, font: Path) -> SourceSettings | None:
        """With few prompts."""
        few = {**FEW, "emoji": {"font": str(font), "resolution": 32}}
        if name not in few:
            return None
        found: SourceSettings = plugins.find("sources", name).Settings.model_validate(few[name])
        return found
