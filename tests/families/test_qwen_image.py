"""Qwen-Image: stock diffusers draws what is exported, padding changes nothing, what nothing reads is not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from flow_runs import SEED, SIDE_PX, STEPS, drawn
from safetensors.torch import load_file
from tiny_families import qwen_image as tiny
from tiny_models import prompts

from daguerre.families import qwen_image
from daguerre.models.parts.qwen.transformer import TwoStreams
from daguerre.models.weights import original_files
from daguerre.samplers.draw import initial_noise

TEXTS = ["a red circle on a white table", "", "x" * 60, "Two cats, one dog."]
TOKENS = 128
SHIFT = {"shift": 2.0, "shift_terminal": 0.02}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("qwen_image") / "qwen_image")


@pytest.fixture(scope="module")
def family(base) -> Any:
    settings = qwen_image.Settings(pretrained_model_name_or_path=str(base), max_sequence_length=TOKENS)
    return qwen_image.load(settings, 0)


def trained(place: Path, base: Path, *given: str) -> Path:
    model = {"family": "qwen_image", "pretrained_model_name_or_path": str(base), "max_sequence_length": TOKENS}
    return flow_runs.trained(place, model, {"shift": SHIFT["shift"], "terminal": SHIFT["shift_terminal"]}, *given)


def theirs(pipe: Any, scale: float) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([SEED], (16, SIDE_PX // 8, SIDE_PX // 8))
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS, "max_sequence_length": TOKENS}
    guided = {"true_cfg_scale": scale, "negative_prompt": [" "]} if scale > 1 else {}
    latents = pipe._pack_latents(noise, *noise.shape)
    image = pipe(["a red circle"], latents=latents, output_type="np", **size, **guided).images[0]
    return (image * 255).round().astype(int)


@pytest.mark.long  # of the quick tests, a LoRA draws as in diffusers, and the family of 2.1 exports
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(QwenImagePipeline.from_pretrained(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1


@pytest.mark.long  # of the quick tests, test_flux.py, and test_family_loras.py reads files back
def test_a_lora_means_the_same_in_diffusers(base, tmp_path):
    more = ["adapter.name=lora", "adapter.rank=2", "adapter.targets=attention", "optimizer.learning_rate=1"]
    run = trained(tmp_path, base, *more)
    image = drawn(run, tmp_path / "out", 3.0)
    pipe = QwenImagePipeline.from_pretrained(base)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**SHIFT)
    plain = theirs(pipe, 3.0)
    for file in ("pytorch_lora_weights.safetensors", "kohya.safetensors"):
        pipe.load_lora_weights(run / "adapter", weight_name=file)
        other = theirs(pipe, 3.0)
        assert np.abs(image - other).max() <= 2
        assert np.abs(other - plain).max() > 20, "it changes something"
        pipe.unload_lora_weights()


def test_what_only_the_texts_end_comes_out_of_is_not_trained(base, family, tmp_path):
    run = trained(tmp_path, base)
    weights, first = load_file(run / "pipeline" / WEIGHTS), load_file(base / WEIGHTS)
    unread = family.networks["transformer"].facts.unread
    assert len(unread) == 9
    assert {name for name in weights if torch.equal(weights[name], first[name])} == unread


@torch.no_grad()
def test_a_batch_of_unequal_captions_is_each_alone(family):
    cond, _ = family.encode_prompts(prompts(TEXTS), (3, 64, 64))
    x = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(2))
    time = torch.tensor([0.2, 0.4, 0.6, 0.8])
    together = family.net(x, time, cond)
    for row, text in enumerate(TEXTS):
        alone, _ = family.encode_prompts(prompts([text]), (3, 64, 64))
        y = family.net(x[row : row + 1], time[row : row + 1], alone)
        torch.testing.assert_close(together[row], y[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("references", [[], [(1, 2, 4), (1, 6, 2)]])
@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_the_forward_pass_is_the_librarys(zero_cond_t, references):
    theirs = tiny.network(zero_cond_t=zero_cond_t)
    ours = TwoStreams(**{name: theirs.config[name] for name in (*tiny.NUMBERS, "zero_cond_t")})
    ours.load_state_dict(theirs.state_dict())
    shapes = [(1, 4, 6), *references]
    width, read = theirs.config.in_channels, theirs.config.joint_attention_dim
    drawing = torch.Generator().manual_seed(3)
    tokens = torch.randn(2, sum(rows * columns for _, rows, columns in shapes), width, generator=drawing)
    text, mask = torch.randn(2, 5, read, generator=drawing), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    time = torch.tensor([0.25, 0.75])
    y = theirs(tokens, text, mask, time, [shapes] * 2, return_dict=False)[0]
    assert torch.equal(ours(tokens, time, text, mask, shapes), y)
    whole = theirs(tokens, text, None, time, [shapes] * 2, return_dict=False)[0]
    assert torch.equal(ours(tokens, time, text, None, shapes), whole)
    assert not torch.equal(y, whole)


def test_guidance_keeps_the_length_of_each_token():
    pos, neg = (torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    y = qwen_image.NormKept().combine(pos, neg, torch.tensor([3.0, 5.0]).reshape(2, 1, 1, 1))
    pack = QwenImagePipeline._pack_latents
    p, n = (pack(side, 2, 16, 4, 6) for side in (pos, neg))
    mixed = n + torch.tensor([3.0, 5.0]).reshape(2, 1, 1) * (p - n)
    expected = mixed * (p.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(pack(y, 2, 16, 4, 6), expected)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_the_transformer_alone(prefix, base, tmp_path):
    weights = load_file(base / WEIGHTS)
    path = tmp_path / "qwen.safetensors"
    original_files.write(path, weights, qwen_image.NAMES.links, prefix=prefix)
    found = original_files.read(path, qwen_image.NAMES, {name: tuple(value.shape) for name, value in weights.items()})
    assert all(torch.equal(found[name], value) for name, value in weights.items())
