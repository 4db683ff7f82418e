"""docs/extending.md: the files stand in a copy of the package as they are written there, and train together; the
lines about a transformer put a family together."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import forked_runs
import numpy as np
import pytest
import several_devices
import tiny_texts
import torch
from diffusers import DDIMScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
from PIL import Image
from safetensors.torch import load_file
from tiny_models import prompts, tiny_vae

from daguerre import plugins
from daguerre.checkpoint.store import Store
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.parts import vae
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.reading import Reading
from daguerre.models.schedulers.betas import BetaSchedulers
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.objectives import eps
from daguerre.samplers.settings import SamplingSettings

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n# src/(daguerre/\S+)\n(.*?)```", re.DOTALL)
RUN = """
from daguerre.cli import main as cli; from daguerre import plugins
assert "difference" in plugins.names("objectives"), plugins.__file__
assert cli.run(["caption", "pictures", "with=shade", "least=100"]) == 0
assert cli.run(["data", "show", "stripes.yaml", "count=4", "condition=posterize", "condition.levels=2"]) == 0
raise SystemExit(cli.run(["train", "quickstart", "run_name=extended", "model.family=pixels", "model.channels=[8, 16]",
    "objective.name=difference", "adapter.name=biases", "data.source=stripes", "optimizer.name=radam",
    "data.resolution=16", "training.duration=3 steps",
    "training.global_batch_size=2", "training.per_device_batch_size=2", "lr_scheduler.warmup=1 step",
    "checkpoint.every=2 steps", "validation.every=2 steps", "validation.num_samples=2", "logging.trackers=[csv_file]",
    "logging.every=1 step", "sampling.num_images=1", "sampling.num_inference_steps=2", "sampling.sampler=twice"]))
"""


def extended(folder: Path) -> None:
    """A copy of the package in a folder, with the files of the page."""
    shutil.copytree(ROOT / "src" / "daguerre", folder / "daguerre", ignore=shutil.ignore_patterns("assets"))
    blocks = BLOCK.findall((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
    kinds = [kind for path, _ in blocks for kind, own in plugins.FOLDERS.items() if Path(path).parent.match(own)]
    assert sorted(kinds) == sorted(plugins.FOLDERS)
    for path, code in blocks:
        assert not (folder / path).exists(), f"{path} is a name that the package has: choose another"
        (folder / path).write_text(code, encoding="utf-8")


@pytest.mark.long  # of the quick tests, contracts take whatever files there are
def test_each_plug_in_is_one_file(tmp_path):
    extended(tmp_path)
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8), (110, 110, 110)).save(tmp_path / "pictures" / "grey.png")
    (tmp_path / "stripes.yaml").write_text("data: {source: stripes, resolution: 16, formats: [png]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "pictures" / "grey.json").read_text()) == {"shade": "a light picture"}
    shown = np.asarray(Image.open(tmp_path / "data-show.png").convert("RGB")).reshape(-1, 3)
    assert {(64, 64, 64), (192, 192, 192)} <= {*map(tuple, shown.tolist())}
    run = tmp_path / "runs" / "extended"
    assert (run / "checkpoints" / "step-00000003" / "manifest.json").exists()
    assert (run / "pipeline" / "unet" / "config.json").exists()
    trained = load_file(run / "checkpoints" / "step-00000003" / "model.safetensors")
    assert trained
    assert all(name.startswith("unet.") and name.endswith(".bias") for name in trained)
    assert "validation/loss" in (run / "metrics" / "metrics.jsonl").read_text()
    assert "3,validation/loss," in (run / "numbers.csv").read_text()


@pytest.mark.long
@pytest.mark.parametrize("adapter", ["full", "biases"])
def test_these_files_learn_the_same_on_every_mesh(adapter, tmp_path, monkeypatch):
    """The network has no logical axes: fsdp splits it along dim 0, and tensor not at all."""
    extended(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    given = ["model.family=pixels", "model.channels=[8, 16]", "objective.name=difference", f"adapter.name={adapter}"]
    given += ["data.source=stripes", "data.resolution=16", "training.duration=3 steps", "training.global_batch_size=4"]
    given += ["lr_scheduler.warmup=0 steps", "checkpoint.every=null", "validation.every=null", "sampling.num_images=0"]
    # A bias in front of a norm has a gradient of rounding alone, which must not be magnified to a step.
    given += ["logging.tensorboard=false", "optimizer.epsilon=1e-3"]
    meshes = {"one": 1, "fsdp": 2, "tensor": 2, "data": 2}
    plan = [
        forked_runs.run(
            tmp_path, name, size, *given, *([f"mesh.ici_{name}_parallelism=2"] if size > 1 else []), recipe="quickstart"
        )
        for name, size in meshes.items()
    ]
    assert several_devices.zeros(forked_runs.together(tmp_path, plan))
    tensors = {}
    for name in meshes:
        store = Store(tmp_path / name / "checkpoints")
        tensors[name] = store.load(store.root / "step-00000003", ("model",)).tensors["model"]
    assert tensors["one"]
    for name, found in tensors.items():
        assert found.keys() == tensors["one"].keys()
        for key, value in found.items():
            torch.testing.assert_close(value, tensors["one"][key], rtol=1e-3, atol=1e-5, msg=f"{name}: {key}")


class PixArt(TransformerSettings):
    """A family that the package has not."""

    family: str = "pixart"
    time_scale: ClassVar[float] = 1000.0
    pipeline_class: ClassVar[str] = "PixArtSigmaPipeline"
    schedulers: ClassVar[Schedulers] = BetaSchedulers()


def test_the_lines_about_a_transformer_put_a_family_together(tmp_path):
    """Its net is diffusers' transformer on the T5's tokens with their mask, and its export opens as a pipeline."""
    torch.manual_seed(0)
    numbers = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "cross_attention_dim": 16}
    numbers |= {"in_channels": 4, "out_channels": 8, "sample_size": 8, "caption_channels": tiny_texts.WIDTH}
    theirs = PixArtSigmaPipeline(
        tiny_texts.t5_tokenizer(), tiny_texts.t5(), tiny_vae(), PixArtTransformer2DModel(**numbers), DDIMScheduler()
    )
    theirs.save_pretrained(tmp_path / "base")
    settings = PixArt(pretrained_model_name_or_path=str(tmp_path / "base"))
    components = ComponentLoader(settings, 0)
    reading = Reading(kinds=("t5",), max_tokens=16, masked=True, text_mask=True)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "trained_net.family" in block]
    given: dict[str, Any] = {
        "components": components,
        "settings": settings,
        "encoder": encoder,
        "facts": {},
        "images": vae.load(components, patch=2),
        "text": TextConditioning((encoder,)),
        "trained_net": trained_net,
        "PixArtTransformer2DModel": PixArtTransformer2DModel,
        "PipelineExporter": PipelineExporter,
    }
    exec("def load():\n" + textwrap.indent(code, "    "), given)  # noqa: S102
    family = given["load"]()
    size, texts = (3, 16, 16), ["a large red circle", "blue"]
    cond, _ = family.encode_prompts(prompts(texts), size)
    x, c_noise = torch.randn(2, *family.latent_shape(size)), torch.tensor([3.0, 700.0])
    embeds, mask, *_ = theirs.encode_prompt(texts, False, max_sequence_length=16)
    expected = theirs.transformer(x, embeds, c_noise, encoder_attention_mask=mask).sample[:, :4]
    torch.testing.assert_close(family.net.eval()(x, c_noise, cond), expected)
    family.export(tmp_path / "out", eps.build(eps.Settings()), SamplingSettings())
    again = PixArtSigmaPipeline.from_pretrained(tmp_path / "out").transformer.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in theirs.transformer.state_dict().items())
