"""Z-Image: stock diffusers draws what is exported; files of its authors and LoRAs of others mean the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline
from diffusers.loaders import single_file_utils
from flow_runs import SEED, SIDE_PX, STEPS, drawn
from safetensors.torch import load_file
from tiny_families import z_image as tiny

from daguerre.families.z_image import NAMES
from daguerre.models.weights import original_files
from daguerre.samplers.draw import initial_noise

TOKENS = 64
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("z_image") / "z_image")


def trained(place: Path, base: Path, *given: str) -> Path:
    model = {"family": "z_image", "pretrained_model_name_or_path": str(base), "max_sequence_length": TOKENS}
    return flow_runs.trained(place, model, {"shift": 6.0}, *given)


def theirs(pipe: Any, scale: float) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([SEED], (4, SIDE_PX // 8, SIDE_PX // 8))
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS, "max_sequence_length": TOKENS}
    image = pipe(["a red circle"], guidance_scale=scale, latents=noise, output_type="np", **size).images[0]
    return (image * 255).round().astype(int)


@pytest.mark.parametrize("scale", [pytest.param(0.0, marks=pytest.mark.long), 3.0])
def test_the_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    """At the pipeline's own number, pos + scale (pos - neg), of which 0 is no guidance."""
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(ZImagePipeline.from_pretrained(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1


def test_a_lora_means_the_same_in_diffusers(base, tmp_path):
    more = ["adapter.name=lora", "adapter.rank=2", "adapter.targets=attention+ff", "optimizer.learning_rate=1"]
    run = trained(tmp_path, base, *more)
    image = drawn(run, tmp_path / "out", 3.0)
    pipe = ZImagePipeline.from_pretrained(base)
    plain = theirs(pipe, 3.0)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    other = theirs(pipe, 3.0)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_the_transformer_alone(prefix, base, tmp_path):
    weights = load_file(base / WEIGHTS)
    path = tmp_path / "z_image.safetensors"
    original_files.write(path, weights, NAMES.links, prefix=prefix)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    found = original_files.read(path, NAMES, shapes)
    converted = single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers(load_file(path))
    assert found.keys() == weights.keys() == converted.keys()
    assert all(
        torch.equal(found[name], value) and torch.equal(converted[name], value) for name, value in weights.items()
    )
