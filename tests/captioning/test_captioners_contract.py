"""The contract of captioners, over all files of captioning/, with tiny networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import tiny_captioners
import tiny_tagger
from quick_cases import quick_where

from daguerre import plugins
from daguerre.contracts.captioners import CaptionerContract

WRITE: Mapping[str, Callable[[Path], Path]] = {
    "blip": tiny_captioners.blip,
    "florence2": tiny_captioners.florence2,
    "qwen3_vl": tiny_captioners.qwen3_vl,
    "wd14": tiny_tagger.of_colours,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a captioner's network, written once."""
    return cache(lambda name: WRITE[name](tmp_path_factory.mktemp(name) / name))


# transformers is loaded for the others
@pytest.mark.parametrize("name", quick_where(lambda case: case == ("wd14",), plugins.names("captioners")))
class TestCaptioner(CaptionerContract):
    """The contract."""

    @pytest.fixture
    def given(self, name: str, folder: Callable[[str], Path]) -> dict[str, object]:
        if name == "wd14":
            pytest.importorskip("onnxruntime")
            return {"path": str(folder(name))}
        return {"path": str(folder(name)), "max_new_tokens": 3}
