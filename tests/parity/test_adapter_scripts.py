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
from controlnet_scripts import largest_gap, moved

DIGEST = "e52b29065c464fa487a4ca36144688e757952c6ef657dbbbf4fbe4f860074f93"
QUICK = ("train_text_to_image_lora.py", "textual_inversion.py")


@pytest.mark.parametrize(
    "script", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in adapter_scripts.CASES]
)
def test_training_is_that_of_diffusers_scripts(script: str, tmp_path: Path) -> None:
    """Losses, and the change of each tensor by its norm and a product. With our rounding (noise levels from float64,
    AdamW's one kernel, channels that stand last) the scripts' weights were equal to the bit."""
    assert hashlib.sha256(adapter_scripts.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs = json.loads(adapter_scripts.RECORDED.read_text())[script]
    assert theirs["apart with our rounding"]["weights"] == 0.0
    ours = adapter_scripts.ours(script, tmp_path)
    assert adapter_scripts.batches_digest(ours) == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses"], rel=1e-6)
    changes = moved(ours.weights, adapter_scripts.first(ours, tmp_path))
    assert largest_gap(changes, theirs["moved"]) < 1e-3
    assert min(norm for norm, _ in changes.values()) > 0
