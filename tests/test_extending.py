"""docs/extending.md: the five files stand in a copy of the package as they are written there, and train together."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n# src/(daguerre/\S+)\n(.*?)```", re.DOTALL)
RUN = """
from daguerre.cli import main as cli; from daguerre import plugins
assert "difference" in plugins.names("objectives"), plugins.__file__
assert cli.run(["data", "show", "stripes.yaml", "count=4", "condition=posterize", "condition.levels=2"]) == 0
raise SystemExit(cli.run(["train", "quickstart", "run_name=extended", "model.family=pixels", "model.channels=[8, 16]",
    "objective.name=difference", "adapter.name=biases", "data.source=stripes",
    "data.resolution=16", "training.duration=3 steps",
    "training.global_batch_size=2", "training.per_device_batch_size=2", "lr_scheduler.warmup=1 step",
    "checkpoint.every=2 steps", "validation.every=2 steps", "validation.num_samples=2", "logging.tensorboard=false",
    "sampling.num_images=1", "sampling.num_inference_steps=2"]))
"""


def test_an_objective_a_source_a_family_an_adapter_and_a_condition_are_one_file_each(tmp_path):
    package = tmp_path / "daguerre"
    shutil.copytree(ROOT / "src" / "daguerre", package, ignore=shutil.ignore_patterns("assets"))
    blocks = BLOCK.findall((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
    assert [path.split("/")[1] for path, _ in blocks] == ["objectives", "data", "families", "adapters", "conditions"]
    for path, code in blocks:
        assert not (tmp_path / path).exists(), f"{path} is a name that the package has: choose another"
        (tmp_path / path).write_text(code, encoding="utf-8")
    (tmp_path / "stripes.yaml").write_text("data: {source: stripes, resolution: 16, formats: [png]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = np.asarray(Image.open(tmp_path / "data-show.png").convert("RGB")).reshape(-1, 3)
    assert {(64, 64, 64), (192, 192, 192)} <= {*map(tuple, shown.tolist())}
    run = tmp_path / "runs" / "extended"
    assert (run / "checkpoints" / "step-00000003" / "manifest.json").exists()
    assert (run / "pipeline" / "unet" / "config.json").exists()
    trained = load_file(run / "checkpoints" / "step-00000003" / "model.safetensors")
    assert trained
    assert all(name.startswith("unet.") and name.endswith(".bias") for name in trained)
    assert "validation/loss" in (run / "metrics" / "metrics.jsonl").read_text()
