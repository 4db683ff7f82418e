"""Every trainable recipe's tiny twin overfits one image: its loss falls below a tenth of its start in 300 updates.

Objective, weighting, optimizer and average are the recipe's own (twins.py); the learning rate is one for networks of
this size, and latents are taken from the posterior's mean, so that there is one image indeed. One recipe runs in
`make test`, where a fifth of the updates has to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import twins
from data_sets import folder as images
from twins import Twins, begun_from, sources, tree

from daguerre import plugins
from daguerre.cli import main
from daguerre.config import recipe

BATCH = 8
GIVEN = [
    "run_name=overfit",
    "model.sample_posterior=false",
    "data.random_flip=false",
    f"training.global_batch_size={BATCH}",
    f"training.per_device_batch_size={BATCH}",
    "optimizer.learning_rate=2e-3",
    "lr_scheduler.warmup=20 steps",
    "checkpoint.every=null",
    "checkpoint.export=false",
    "validation.every=null",
    "sampling.num_images=0",
]
OWN = ("training.duration", "lr_scheduler.", "checkpoint.", "validation.", "sampling.")
"""What of a twin is said here instead."""
OWN += tuple(given.partition("=")[0] for given in GIVEN)
UPDATES = 300
LORA = ["adapter.targets=all", "optimizer.learning_rate=1e-2"]
"""Of recipes that train a LoRA: attention alone cannot learn an image by heart on networks of random weights."""


def trainable() -> list[str]:
    """Recipes that train a UNet."""
    found = []
    for name in recipe.shipped():
        fields = plugins.find("families", tree(name)["model"]["family"]).Settings.model_fields
        if "unet" in fields and tree(name)["training"]["duration"] != "0 steps":
            found.append(name)
    return found


def one_image(name: str, made: Twins) -> list[str]:
    """The twin's overrides, with a data set of one image, seen by all samples of a batch; of a mix, one a source."""
    data = tree(name)["data"]
    kept = [override for override in made.overrides(name) if not override.startswith(OWN)]
    if "sources" in data:
        for setting, own in sources(data).items():
            kept += [f"{setting}.generate.count=1"] if "generate" in own else []
            kept += [f"{setting}.num_images=1" if own.get("source") == "shapes" else f"{setting}.repeats={BATCH}"]
        return kept
    if data["source"] == "shapes":  # these images have no end
        kept = ["loader.num_workers=0", "logging.every=1 step", "logging.tensorboard=false"]
        kept += ["data.source=folder", f"data.path={images(made.folder / name, 1)}"]
    return [*kept, "data.held_out_fraction=0", f"data.repeats={BATCH}"]


@pytest.mark.long
@pytest.mark.parametrize("name", trainable())
def test_a_twin_overfits_one_image(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "IMAGES", 1)
    made = Twins(tmp_path / "made")
    made.folder.mkdir()
    if (begun := begun_from(name)) is not None:
        short = [given for given in GIVEN[1:] if given != "checkpoint.export=false"]
        first = [f"output_dir={tmp_path}", "training.duration=20 steps", *one_image(begun, made), *short]
        assert main.run(["train", begun, *first]) == 0
    own = LORA if "lora" in tree(name).get("adapters", {}) else []
    kept = [each for each in GIVEN if not (own and each.startswith("optimizer."))]
    given = [f"output_dir={tmp_path}", f"training.duration={UPDATES} steps", *kept, *own]
    assert main.run(["train", name, *one_image(name, made), *given]) == 0
    lines = (tmp_path / "overfit" / "metrics" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["learning/loss"] for line in lines]
    assert len(losses) == UPDATES
    print(name, losses[0], fmean(losses[-20:]), fmean(losses[-20:]) / losses[0])
    assert fmean(losses[-20:]) < losses[0] / 10
    assert max(losses[:3]) < 5, "the start is that of a network that predicts nothing, not a blown-up one"
