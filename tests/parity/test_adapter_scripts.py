"""Training of a LoRA or of new tokens beside diffusers' scripts: train_text_to_image_lora.py, its form for SDXL with
both text encoders, train_dreambooth_lora.py with the text encoder, its form for SDXL, and textual_inversion.py.

What the scripts did with the batches of our runs is recorded (`tools/record_adapter_scripts.py`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import adapter_scripts
import pytest
from controlnet_scripts import assert_as_recorded, moved
from recorded import first

DIGEST = "e52b29065c464fa487a4ca36144688e757952c6ef657dbbbf4fbe4f860074f93"
QUICK = ("train_text_to_image_lora.py", "textual_inversion.py")


@pytest.mark.parametrize(
    "script", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in adapter_scripts.CASES]
)
def test_training_is_that_of_diffusers_scripts(script: str, tmp_path: Path) -> None:
    """Our rounding: noise levels from float64, AdamW's one kernel, channels that stand last."""
    assert hashlib.sha256(adapter_scripts.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs = json.loads(adapter_scripts.RECORDED.read_text())[script]
    ours = adapter_scripts.ours(script, tmp_path)
    changes = moved(ours.weights, first(ours, tmp_path))
    assert_as_recorded(theirs, ours, adapter_scripts.batches_digest(ours), changes)
