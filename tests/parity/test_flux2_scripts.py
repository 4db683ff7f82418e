"""Training of a LoRA of FLUX.2 klein beside diffusers' train_dreambooth_lora_flux2_klein.py, and beside its form with a
reference image, train_dreambooth_lora_flux2_klein_img2img.py.

What the scripts did with the batches of our runs is recorded (`tools/record_flux2_scripts.py`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import flux2_scripts
import pytest
from controlnet_scripts import largest_gap, moved

DIGEST = "63fc677a953ef72780b77ed32501ca6b9c89432141505a4f958d513207a2c5e3"


@pytest.mark.long
@pytest.mark.parametrize("script", flux2_scripts.SCRIPTS)
def test_training_is_that_of_diffusers_scripts(script: str, tmp_path: Path) -> None:
    assert hashlib.sha256(flux2_scripts.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs = json.loads(flux2_scripts.RECORDED.read_text())[script]
    ours = flux2_scripts.ours(script, tmp_path)
    assert flux2_scripts.batches_digest(ours) == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses"], rel=3e-7)
    found = moved(ours.weights, flux2_scripts.first(ours, tmp_path))
    assert largest_gap(found, theirs["moved"]) < 1e-3
    assert min(norm for norm, _ in found.values()) > 0
