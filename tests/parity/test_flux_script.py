"""Training of a LoRA of FLUX.1 beside diffusers' train_dreambooth_lora_flux.py: what the script did with the batches
of our run is recorded (`tools/record_flux_script.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import flux_script
import pytest
from controlnet_scripts import largest_gap, moved
from flux2_scripts import batches_digest, first

DIGEST = "d73673ef56b6a0159e6662c5712fc5d121686619022fdea4772b26db78cda4d1"


@pytest.mark.long
def test_training_is_that_of_diffusers_script(tmp_path: Path) -> None:
    assert hashlib.sha256(flux_script.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs, ours = json.loads(flux_script.RECORDED.read_text()), flux_script.ours(tmp_path)
    assert batches_digest(ours) == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses"], rel=3e-7)
    found = moved(ours.weights, first(ours, tmp_path))
    assert largest_gap(found, theirs["moved"]) < 1e-3
    assert min(norm for norm, _ in found.values()) > 0
