"""The contract of every family with a pipeline, found by its file: it is distilled into a LoRA, or refused in words."""

from __future__ import annotations

import json

import pytest
import several_devices
import tiny_families
from tiny_runs import lines

from daguerre import errors
from daguerre.cli import main
from daguerre.families.pretrained import catalogue

SIDE_PX = 64
RECIPE = """
run_name: run
training: {duration: 2 steps, global_batch_size: 2}
adapter: {name: lora, rank: 2}
lr_scheduler: {warmup: 0 steps}
optimizer: {learning_rate: 1e-3}
ema: {enabled: false}
logging: {every: "1 steps", tensorboard: false}
checkpoint: {every: null, export: false}
validation: {every: null}
"""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*catalogue.pipelines().values()}))
def test_a_family_is_distilled(name, tmp_path, capsys):
    family = tiny_families.load(name, tmp_path)
    assert family.pretrained is not None
    scheduler = family.pretrained.scheduler()
    assert scheduler is not None
    inner = family.pretrained.settings.schedulers.objective_of(scheduler)
    sections = {
        "model": tiny_families.settings(name, tmp_path / "model"),
        "objective": {"name": "lcm", "diffusion": inner},
        "data": {"source": "folder", "path": str(several_devices.images(tmp_path / "images")), "resolution": SIDE_PX},
        "sampling": {"num_images": 0, "prompts": ["a"], "height": SIDE_PX, "width": SIDE_PX},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + "\n".join(f"{key}: {json.dumps(own)}" for key, own in sections.items()))
    code = main.run(["train", str(path), f"output_dir={tmp_path}"])
    said = " ".join(capsys.readouterr().err.split())
    if code == errors.REFUSED:
        assert not family.guidance.acts(6.0) or "are read with reference images" in said, said
        return
    assert code == errors.DONE, said
    losses = [line["learning/loss"] for line in lines(tmp_path / "run") if "learning/loss" in line]
    assert len(losses) == 2
    assert losses[0] != losses[1]
