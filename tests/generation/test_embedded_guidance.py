"""`daguerre generate PIPELINE` of a network that is given the guidance scale, and of one that takes none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_families import flux

from daguerre.cli import main

SMALL = ("model.max_sequence_length=16", "height=32", "width=32", "seed=1", "training.device=cpu")


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flux.write(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flux.write(tmp_path_factory.mktemp("flux") / "schnell", guidance_embeds=False)


def generate(folder: Path, out: Path, *given: str) -> int:
    return main.run(["generate", str(folder), f"out={out}", *SMALL, *given])


def test_each_row_of_a_list_has_its_own_scale(dev, tmp_path, capsys):
    """A pipeline with FlowMatchEulerDiscreteScheduler needs no recipe; the scale reaches the network row by row."""
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt,guidance_scale,seed\na cat,3.5,1\na cat,1,1\na cat,,1\na cat,0,1\n")
    assert generate(dev, tmp_path / "out", f"prompts_file={rows}", "num_inference_steps=2") == 0
    documents = [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("00*.json"))]
    assert [each["guidance_scale"] for each in documents] == [3.5, 1.0, 3.5, 0.0]
    assert documents[0]["objective"]["name"] == "flow"
    assert documents[0]["objective"]["schedule"]["resolution_shift"]["name"] == "linear_mu"
    of_scale = [np.asarray(Image.open(path)).astype(int) for path in sorted((tmp_path / "out").glob("*.png"))]
    assert np.abs(of_scale[0] - of_scale[2]).max() <= 1
    assert all(np.abs(of_scale[i] - of_scale[j]).max() > 2 for i, j in ((0, 1), (0, 3), (1, 3)))
    assert "scheduler" not in capsys.readouterr().out, "nothing about it is unusual"


@pytest.mark.parametrize("setting", ["negative_prompt=dark", "guidance_rescale=0.5"])
def test_what_needs_an_unguided_side_is_refused(dev, tmp_path, capsys, setting):
    assert generate(dev, tmp_path / "out", "prompt=a cat", setting) == 2
    assert "given guidance_scale itself, without an unguided side" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_network_without_guidance_samples_as_its_pipeline_and_refuses_a_scale(schnell, tmp_path, capsys):
    assert generate(schnell, tmp_path / "out", "prompt=a cat") == 0
    document = json.loads((tmp_path / "out" / "000.json").read_text())
    assert (document["guidance_scale"], document["num_inference_steps"]) == (0.0, 4)
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt,guidance_scale\na cat,3.5\n")
    capsys.readouterr()
    for place, given in (("scale", ("prompt=a cat", "guidance_scale=3.5")), ("row", (f"prompts_file={rows}",))):
        assert generate(schnell, tmp_path / place, *given) == 2
        assert "this model takes no guidance: set guidance_scale to 0" in capsys.readouterr().err
