"""FLUX.1: stock diffusers draws what is exported, files of others mean the same weights, schnell takes no scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import tiny_families
import torch
from diffusers import FluxPipeline
from flow_runs import SEED, SIDE_PX, STEPS, drawn
from safetensors.torch import load_file
from tiny_families import flux as tiny

from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.models.parts.flux_names import FLUX
from daguerre.models.weights import original_files
from daguerre.samplers.draw import initial_noise

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("flux") / "flux")


def trained(place: Path, base: Path, *given: str) -> Path:
    model = {"family": "flux", "pretrained_model_name_or_path": str(base), "max_sequence_length": 16}
    return flow_runs.trained(place, model, {"resolution_shift": {"name": "linear_mu"}}, *given)


def theirs(pipe: Any, scale: float) -> np.ndarray:
    shape = (4, SIDE_PX // 8, SIDE_PX // 8)
    noise = initial_noise([SEED], shape)
    packed = FluxPipeline._pack_latents(noise, 1, *shape)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS, "max_sequence_length": 16}
    image = pipe("a red circle", guidance_scale=scale, latents=packed, output_type="np", **size).images[0]
    return (image * 255).round().astype(int)


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.long), 3.5])
def test_the_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(FluxPipeline.from_pretrained(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("pytorch_lora_weights.safetensors", "attention+ff"),
        # diffusers' reader of kohya's single blocks has the published widths written into it
        pytest.param("kohya.safetensors", "[transformer.transformer_blocks.*]", marks=pytest.mark.long),
    ],
)
def test_a_lora_means_the_same_in_diffusers_in_both_layouts(name, targets, base, tmp_path):
    run = trained(
        tmp_path, base, "adapter.name=lora", "adapter.rank=2", f"adapter.targets={targets}", "optimizer.learning_rate=1"
    )
    image = drawn(run, tmp_path / "out", 3.5)
    pipe = FluxPipeline.from_pretrained(base)
    plain = theirs(pipe, 3.5)
    pipe.load_lora_weights(run / "adapter", weight_name=name)
    other = theirs(pipe, 3.5)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_the_transformer_alone(prefix, base, tmp_path):
    weights = load_file(base / WEIGHTS)
    path = tmp_path / "flux1.safetensors"
    original_files.write(path, weights, FLUX.links, prefix=prefix)
    assert all(name.startswith(prefix) for name in load_file(path))
    module = tiny_families.plugins.find("families", "flux")
    settings = {"pretrained_model_name_or_path": str(base), "transformer": str(path), "max_sequence_length": 16}
    family = module.load(module.Settings.model_validate(settings), 1)
    found = family.components["transformer"].state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    original_files.write(tmp_path / "again.safetensors", found, FLUX.links, prefix=prefix)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_file_of_another_size_is_refused_by_the_weights_that_do_not_fit(base, tmp_path):
    other = load_file(
        tiny.write(tmp_path / "other", num_attention_heads=2, joint_attention_dim=32)
        / "transformer"
        / "diffusion_pytorch_model.safetensors"
    )
    path = tmp_path / "flux1.safetensors"
    original_files.write(path, other, FLUX.links)
    module = tiny_families.plugins.find("families", "flux")
    settings = {"pretrained_model_name_or_path": str(base), "transformer": str(path), "max_sequence_length": 16}
    with pytest.raises(UserError, match="does not have the weights of this FluxTransformer2DModel"):
        module.load(module.Settings.model_validate(settings), 1)


def test_weights_without_embedded_guidance_take_no_scale(tmp_path, capsys):
    base = tiny.write(tmp_path / "schnell", guidance_embeds=False)
    args = ["generate", str(base), "prompt=a cat", f"out={tmp_path / 'o'}", "height=32", "width=32"]
    assert main.run([*args, "guidance_scale=3.5"]) != 0
    assert "takes no guidance" in capsys.readouterr().err
    assert main.run([*args, "guidance_scale=0", "num_inference_steps=2"]) == 0
