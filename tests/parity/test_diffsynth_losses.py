"""Anima and FLUX.3 klein beside DiffSynth-Studio's networks and loss, whose numbers are recorded
(`tools/record_diffsynth_losses.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import diffsynth_losses
import pytest

DIGEST = "528c81746cba9b236c5b49b549f9e7b12e0618fea895abef49e57371d9ea6286"


@pytest.mark.long  # of the quick tests, those of both families have the loss of their formulas by diffusers' parts
@pytest.mark.parametrize("case", diffsynth_losses.CASES)
def test_losses_and_gradients_are_diffsynths(case: str, tmp_path: Path) -> None:
    assert hashlib.sha256(diffsynth_losses.RECORDED.read_bytes()).hexdigest() == DIGEST
    theirs = json.loads(diffsynth_losses.RECORDED.read_text())[case]
    ours = diffsynth_losses.ours(*diffsynth_losses.CASES[case], tmp_path)
    assert ours.digest == theirs["inputs"], "record anew: inputs are others"
    assert ours.losses == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours.gradient == pytest.approx(theirs["gradient"], rel=1e-4)
