"""Preferences learnt beside diffusers' train_diffusion_dpo.py: what the script did with the batches of our run is
recorded (`tools/record_dpo_script.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import dpo_script
import pytest
from adapter_scripts import batches_digest
from controlnet_scripts import largest_gap, moved
from recorded import first

DIGEST = "412929ee1ac3ef91941a38c8b9a322c7a90f155331d0c8fea227893587d603f6"


@pytest.mark.long
def test_training_is_that_of_diffusers_script(tmp_path: Path) -> None:
    """With diffusers' own table of noise levels, a product of float32 numbers, it is twice as far."""
    assert hashlib.sha256(dpo_script.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs, ours = json.loads(dpo_script.RECORDED.read_text()), dpo_script.ours(tmp_path)
    assert batches_digest(ours) == theirs["batches"], "record anew: batches are others"
    assert ours.losses == pytest.approx(theirs["losses with our rounding"], rel=1e-6)
    assert ours.losses == pytest.approx(theirs["losses"], rel=2e-6)
    changes = moved(ours.weights, first(ours, tmp_path))
    assert largest_gap(changes, theirs["moved"]) < 1e-3
    assert min(norm for norm, _ in changes.values()) > 0
