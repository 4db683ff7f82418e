"""Krea 2: stock diffusers draws what is exported; captions, files of its authors and LoRAs mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import tiny_families
import torch
from diffusers import Krea2Pipeline
from diffusers.loaders import single_file_utils
from flow_runs import SEED, SIDE_PX, STEPS, drawn
from safetensors.torch import load_file
from tiny_families import krea2 as tiny
from tiny_models import prompts

from daguerre.families.krea2 import NAMES
from daguerre.models.weights import original_files
from daguerre.samplers.draw import initial_noise

TOKENS = 64
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SCHEDULE = {"resolution_shift": {"name": "linear_mu", "low_px": 256, "high_px": 1280, "low_mu": 0.5, "high_mu": 1.15}}
CAPTIONS = [
    *("a red circle", "", " ", "A fox, in the snow.", "caf\u00e9 \u732b \U0001f98a", "a\nb\n", " spaces  around "),
    *("word " * 40, "x" * 60, "<|im_end|> in a caption"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("krea2") / "krea2")


def model(base: Path) -> dict[str, Any]:
    chosen = {"text_encoder_select_layers": [*tiny.LAYERS], "max_sequence_length": TOKENS}
    return {"family": "krea2", "pretrained_model_name_or_path": str(base), **chosen}


def trained(place: Path, base: Path, *given: str) -> Path:
    return flow_runs.trained(place, model(base), SCHEDULE, *given)


def theirs(pipe: Any, scale: float) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([SEED], (16, SIDE_PX // 8, SIDE_PX // 8))
    noise = pipe._pack_latents(noise, *noise.shape)
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS, "max_sequence_length": TOKENS}
    image = pipe(["a red circle"], guidance_scale=scale, latents=noise, output_type="np", **size).images[0]
    return (image * 255).round().astype(int)


@pytest.mark.parametrize("scale", [0.0, 3.5])
def test_the_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    """At the pipeline's own number, pos + scale (pos - neg), of which 0 is no guidance."""
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(Krea2Pipeline.from_pretrained(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1


def test_captions_are_read_as_the_pipeline_reads_them(base, tmp_path):
    """Ten captions, of which some are cut: the same tokens, and the same hidden states of them."""
    family = tiny_families.load("krea2", tmp_path)
    assert family.text is not None
    pipe = Krea2Pipeline.from_pretrained(base)
    tokenized: list[Any] = []
    encode = pipe.text_encoder.forward

    def seen(**inputs: Any) -> Any:
        tokenized.append(inputs)
        return encode(**inputs)

    pipe.text_encoder.forward = seen
    for caption in CAPTIONS:
        with torch.no_grad():
            embeds, mask = pipe.encode_prompt([caption], device=torch.device("cpu"), max_sequence_length=TOKENS)
            tokens = family.text.tokens([caption])
            text = family.text.features(tokens)["text"]
        inputs = tokenized[-1]
        assert tokens["text_encoder_ids"].flatten().tolist() == inputs["input_ids"][inputs["attention_mask"]].tolist()
        torch.testing.assert_close(text, embeds[mask][None].flatten(2), rtol=1e-4, atol=1e-5)
    assert [*family.text.truncated(CAPTIONS)] == [7, 8]


@torch.no_grad()
def test_padding_changes_no_sample(base, tmp_path):
    """A batch of unequal captions equals each alone."""
    family = tiny_families.load("krea2", tmp_path)
    x, s = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.1, 0.4, 0.7, 1.0])
    captions, size = ["a", "a large red circle", "", "a green star on grey paper"], (3, 64, 64)
    cond, _ = family.encode_prompts(prompts(captions), size)
    together = family.net(x, s, cond)
    for row, caption in enumerate(captions):
        alone, _ = family.encode_prompts(prompts([caption]), size)
        assert "text_mask" not in alone, "without padding attention has no mask"
        torch.testing.assert_close(family.net(x[row, None], s[row, None], alone)[0], together[row], rtol=0, atol=1e-6)


def test_a_lora_means_the_same_in_diffusers(base, tmp_path):
    more = ["adapter.name=lora", "adapter.rank=2", "adapter.targets=all", "optimizer.learning_rate=0.3"]
    run = trained(tmp_path, base, *more)
    image = drawn(run, tmp_path / "out", 3.5)
    pipe = Krea2Pipeline.from_pretrained(base)
    plain = theirs(pipe, 3.5)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    other = theirs(pipe, 3.5)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_the_transformer_alone(prefix, base, tmp_path):
    weights = load_file(base / WEIGHTS)
    path = tmp_path / "krea2.safetensors"
    original_files.write(path, weights, NAMES.links, prefix=prefix)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    found = original_files.read(path, NAMES, shapes)
    converted = single_file_utils.convert_krea2_transformer_checkpoint_to_diffusers(load_file(path))
    assert found.keys() == weights.keys() == converted.keys()
    assert all(
        torch.equal(found[name], value) and torch.equal(converted[name], value) for name, value in weights.items()
    )
