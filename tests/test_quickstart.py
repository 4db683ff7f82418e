"""What the quickstart promises: the shipped networks, and (`make test-long`) the model that it trains."""

import json

import numpy as np
import pytest
import torch

from daguerre import errors
from daguerre.build.parts import build
from daguerre.cli import main
from daguerre.config import config
from daguerre.config.recipe import FOLDER
from daguerre.data.sources import shapes as images
from daguerre.evaluation import shapes as checker

ASSETS = FOLDER.parent / "assets" / "quickstart"


def test_the_shipped_networks_are_small():
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"vae", "text_encoder", "tokenizer"}
    assert sum(path.stat().st_size for path in files) <= 3_000_000


@torch.no_grad()
def test_the_checker_reads_reconstructions_as_well_as_the_images():
    """Held-out images through the shipped autoencoder: within 1 % of what it reads off the images themselves."""
    parts = build(config.load("quickstart", ["training.device=cpu"]).config)
    source = images.open_source(images.Settings(), "held_out")
    records = [source.record(index) for index in range(100)]
    asked = [images.Prompt(r.texts["text"], images.Combination(**r.metadata)) for r in records]
    originals = np.stack([record.image for record in records])
    pixels_BCHW = torch.from_numpy(originals).permute(0, 3, 1, 2).float() / 127.5 - 1
    vae = parts.family.components["vae"]
    again_BCHW = vae.decode(vae.encode(pixels_BCHW).latent_dist.mean).sample.clamp(-1, 1)
    rebuilt = ((again_BCHW + 1) * 127.5).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
    before, after = checker.shares(asked, list(originals)), checker.shares(asked, list(rebuilt))
    for name, share in before.items():
        assert share >= 0.995, f"{name}: the checker reads {share:.3f} of real images"
        assert after[name] >= share - 0.01, f"{name}: {after[name]:.3f} of reconstructions, {share:.3f} of images"


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_reaches_its_marks(tmp_path, seed):
    assert main.run(["train", "quickstart", f"output_dir={tmp_path}", f"seed={seed}"]) == errors.DONE
    rows = json.loads((tmp_path / "quickstart" / "evaluation.json").read_text())["shapes"]["rows"]
    for row in rows:
        assert row["must"] is None or row["value"] >= row["must"], row
