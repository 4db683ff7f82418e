"""Training of LoRAs beside diffusers' DreamBooth scripts for models that are trained by flow matching: what the scripts
did with the batches of our runs is recorded (`tools/record_flow_scripts.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import flow_scripts
import pytest
from controlnet_scripts import largest_gap, moved
from recorded import first

DIGEST = "ee2097fe77bae484107d9ef2b592dafe049e5f9e4907447cb1e7ad677703949b"


@pytest.mark.long
@pytest.mark.parametrize("name", flow_scripts.SCRIPTS)
def test_training_is_that_of_diffusers_scripts(name: str, tmp_path: Path) -> None:
    assert hashlib.sha256(flow_scripts.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs = json.loads(flow_scripts.RECORDED.read_text())[name]
    ours = flow_scripts.ours(flow_scripts.SCRIPTS[name], tmp_path)
    assert flow_scripts.batches_digest(ours) == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses"], rel=3e-7)
    found = moved(ours.weights, first(ours, tmp_path))
    assert largest_gap(found, theirs["moved"]) < 1e-3
    assert min(norm for norm, _ in found.values()) > 0
