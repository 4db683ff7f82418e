"""Training of a LoRA of Qwen-Image beside diffusers' train_dreambooth_lora_qwen_image.py: what the script did with the
batches of our run is recorded (`tools/record_qwen_image_script.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import qwen_image_script
from controlnet_scripts import largest_gap, moved
from flux2_scripts import batches_digest, first

DIGEST = "c40c5f6175735bfc3b599a2996ee2ee1f4291915036f95494ea6236f7b688412"


@pytest.mark.long
def test_training_is_that_of_diffusers_script(tmp_path: Path) -> None:
    assert hashlib.sha256(qwen_image_script.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs, ours = json.loads(qwen_image_script.RECORDED.read_text()), qwen_image_script.ours(tmp_path)
    assert batches_digest(ours) == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses"], rel=3e-7)
    assert largest_gap(moved(ours.weights, first(ours, tmp_path)), theirs["moved"]) < 1e-3
