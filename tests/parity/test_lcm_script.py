"""Distillation of a LoRA beside diffusers' train_lcm_distill_lora_sdxl.py: what the script did with the batches of our
run is recorded (`tools/record_lcm_script.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import lcm_script
import pytest
from adapter_scripts import batches_digest
from controlnet_scripts import largest_gap, moved
from recorded import first

DIGEST = "e1b453ae8c57031e10ed5657537b4278d860a6461eaa0523b79d4b92d7174eb7"


@pytest.mark.long
def test_training_is_that_of_diffusers_script(tmp_path: Path) -> None:
    """diffusers' table of levels is a product of a thousand float32 numbers: twice as far as ours are from its script
    where that reads float64."""
    assert hashlib.sha256(lcm_script.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs, ours = json.loads(lcm_script.RECORDED.read_text()), lcm_script.ours(tmp_path)
    assert batches_digest(ours) == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses with our levels"], rel=1e-6)
    assert ours.losses == pytest.approx(theirs["losses"], rel=2e-6)
    changes = moved(ours.weights, first(ours, tmp_path))
    assert largest_gap(changes, theirs["moved"]) < 1e-3
    assert min(norm for norm, _ in changes.values()) > 0
