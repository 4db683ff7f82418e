"""Training of a LoRA of Krea 2 beside diffusers' train_dreambooth_lora_krea2.py: what the script did with the batches
of our run is recorded (`tools/record_krea2_script.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import krea2_script
import pytest
from controlnet_scripts import largest_gap, moved
from flux2_scripts import batches_digest, first

DIGEST = "9b9671438754e1493f0a5ea0c5322ef849da6d6937372d827a838cb77e305b8e"


@pytest.mark.long
def test_training_is_that_of_diffusers_script(tmp_path: Path) -> None:
    assert hashlib.sha256(krea2_script.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs, ours = json.loads(krea2_script.RECORDED.read_text()), krea2_script.ours(tmp_path)
    assert batches_digest(ours) == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses"], rel=3e-7)
    found = moved(ours.weights, first(ours, tmp_path))
    assert largest_gap(found, theirs["moved"]) < 1e-3
    assert min(norm for norm, _ in found.values()) > 0
