"""Krea 2: stock diffusers draws what is exported; captions, files of its authors and LoRAs mean the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import tiny_families
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from diffusers.loaders import lora_conversion_utils, single_file_utils
from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift
from flow_runs import SEED, SIDE_PX, STEPS, drawn, drawn_on
from safetensors.torch import load_file, save_file
from tiny_families import krea2 as tiny
from tiny_models import prompts
from torch import Tensor

from daguerre import errors
from daguerre.cli import main
from daguerre.families.krea2 import NAMES, Settings
from daguerre.models.lora_files.addition import DOWN, UP
from daguerre.models.lora_files.read import read
from daguerre.models.settings import INDEX
from daguerre.models.weights import architectures, original_files
from daguerre.objectives import flow
from daguerre.samplers.draw import initial_noise
from daguerre.samplers.settings import SamplingSettings

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


@pytest.mark.parametrize("scale", [pytest.param(0.0, marks=pytest.mark.long), 3.5])
def test_the_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    """At the pipeline's own number, pos + scale (pos - neg), of which 0 is no guidance."""
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(Krea2Pipeline.from_pretrained(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1


@pytest.mark.parametrize(("side_px", "shift"), [(256, 1.65), (512, 1.79), (1024, 2.475), (1280, 3.16)])
def test_noise_levels_are_those_of_the_pipeline(side_px, shift):
    """Of Raw by the size of the images, of Turbo as at 1280 px at every size: the published tables."""
    place = architectures.FOLDER / "krea2"
    config = json.loads((place / "scheduler" / "scheduler_config.json").read_text())
    section = Settings.schedulers.objective_of(config)
    diffusion = replace(flow.build(flow.Settings.model_validate(section)), sampled_px=side_px**2)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    few = Settings.usual_of({INDEX: {"is_distilled": True}})["sampling"]["shift"]
    for given, tokens in ((None, (side_px // 16) ** 2), (few, 80**2)):
        mu = calculate_shift(tokens, 256, 6400, 0.5, 1.15)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 52, 52), mu=mu)
        levels = diffusion.sampled(SamplingSettings(shift=given))
        assert levels.schedule.settings.shift == pytest.approx(shift if given is None else 3.158, abs=5e-3)
        torch.testing.assert_close(levels.grid(52, "trailing").t_N.float(), scheduler.sigmas[:-1], rtol=0, atol=1e-6)


@pytest.mark.long
def test_norms_stay_float32_where_weights_are_stored_in_16_bits(base, tmp_path):
    """They are stored as their scale less 1, and diffusers keeps them so."""
    run = trained(tmp_path, base, "training.weights_dtype=bfloat16", "training.mixed_precision=bf16")
    (saved,) = run.glob("checkpoints/*/model.safetensors")
    types = {name: value.dtype for name, value in load_file(saved).items()}
    wide = {name for name, dtype in types.items() if dtype == torch.float32}
    kept = Krea2Transformer2DModel._keep_in_fp32_modules
    assert wide == {name for name in types if {*name.split(".")} & {*kept}}
    assert {types[name] for name in types.keys() - wide} == {torch.bfloat16}


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


@pytest.mark.long  # of the quick tests, test_family_loras.py reads files back
def test_a_lora_means_the_same_in_diffusers(base, tmp_path, capsys):
    """Also on the distilled model, which has a schedule of its own and is not trained."""
    more = ["adapter.name=lora", "adapter.rank=2", "adapter.targets=all", "optimizer.learning_rate=0.3"]
    run = trained(tmp_path, base, *more)
    image = drawn(run, tmp_path / "out", 3.5)
    pipe = Krea2Pipeline.from_pretrained(base)
    plain = theirs(pipe, 3.5)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    other = theirs(pipe, 3.5)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"
    assert "kohya's it would find no layer of Krea2Transformer2DModel" in capsys.readouterr().out
    turbo = tiny.write(tmp_path / "turbo", is_distilled=True)
    few = drawn_on(turbo, run, tmp_path / "few", f"model.max_sequence_length={TOKENS}")
    pipe = Krea2Pipeline.from_pretrained(turbo)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    assert np.abs(few - theirs(pipe, 0.0)).max() <= 2


@pytest.mark.long  # of the quick tests, test_family_loras.py reads files back
def test_loras_are_converted_merged_and_taken_out_again(base, tmp_path, capsys):
    run = trained(tmp_path, base, "adapter.name=lora", "adapter.rank=2", "adapter.targets=all")
    file, out = run / "adapter" / "pytorch_lora_weights.safetensors", tmp_path / "out"
    for words in (
        ["lora", str(file), "format=kohya", f"base={base}", f"out={out / 'kohya.safetensors'}"],
        ["merge", str(base), f"use={{{file}: 1}}", f"out={out / 'merged'}"],
        ["extract", str(out / "merged"), f"base={base}", "rank=2", f"out={out / 'again.safetensors'}"],
        ["resize", str(file), f"base={base}", "rank=1", f"out={out / 'small.safetensors'}"],
    ):
        assert main.run(["convert", *words]) == errors.DONE, capsys.readouterr().err
    networks = tiny_families.load("krea2", tmp_path / "plain").components
    first, again = (
        {each.layer: each for each in read(path, networks)["transformer"]}
        for path in (out / "kohya.safetensors", out / "again.safetensors")
    )
    assert first.keys() == again.keys()
    for layer, each in first.items():
        product, other = (one.factors[UP] @ one.factors[DOWN] * one.scale for one in (each, again[layer]))
        torch.testing.assert_close(other, product, rtol=1e-3, atol=1e-6)


def test_loras_in_the_names_of_krea_are_read(base, tmp_path):
    """`diffusion_model.` and the original names, as ai-toolkit and Krea's own trainer write them."""
    family = tiny_families.load("krea2", tmp_path)
    layers = [name for name, m in family.components["transformer"].named_modules() if isinstance(m, torch.nn.Linear)]
    found: dict[str, Tensor] = {}
    for link in NAMES.links([f"{layer}.weight" for layer in layers]):
        rows, columns = family.components["transformer"].get_parameter(link.names[0]).shape
        original = link.original.removesuffix(".weight")
        found[f"diffusion_model.{original}.lora_A.weight"] = torch.randn(2, columns)
        found[f"diffusion_model.{original}.lora_B.weight"] = torch.randn(rows, 2)
    save_file(found, tmp_path / "lora.safetensors")
    additions = read(tmp_path / "lora.safetensors", family.components)["transformer"]
    assert sorted(each.layer for each in additions) == sorted(layers)
    theirs = lora_conversion_utils._convert_non_diffusers_krea2_lora_to_diffusers(dict(found))
    for each in additions:
        assert torch.equal(each.factors[DOWN], theirs[f"transformer.{each.layer}.lora_A.weight"])


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
