"""Qwen-Image-2.1: the transformer computes what the library's own does; padding changes nothing; stock diffusers draws
what is exported; files of ComfyUI mean the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import tiny_texts
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImage21Pipeline, QwenImage21Transformer2DModel
from diffusers.loaders import single_file_utils
from flow_runs import SEED, SIDE_PX, STEPS, drawn
from PIL import Image
from safetensors.torch import load_file
from tiny_families import qwen_image_21 as tiny
from tiny_models import prompts
from torch import Tensor

from daguerre import errors
from daguerre.cli import main
from daguerre.families import qwen_image_21
from daguerre.models.parts.qwen.transformer_21 import Interleaved
from daguerre.models.weights import original_files
from daguerre.samplers.draw import initial_noise

TEXTS = ["a red circle on a white table", "", "x" * 60, "Two cats, one dog.", "a", "a b", "y", "é", "A.", "1 2"]
TOKENS = 128
SHIFT = {"shift": 2.0, "shift_terminal": 0.02}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("qwen_image_21") / "qwen_image_21")


@pytest.fixture(scope="module")
def pipe(base) -> Any:
    return opened(base)


def opened(folder: Path) -> Any:
    pipe = QwenImage21Pipeline.from_pretrained(folder, processor=tiny_texts.qwen3_vl_processor())
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def family(base) -> Any:
    settings = qwen_image_21.Settings(pretrained_model_name_or_path=str(base), max_sequence_length=TOKENS)
    return qwen_image_21.load(settings, 0)


def trained(place: Path, base: Path, *given: str) -> Path:
    model = {"family": "qwen_image_21", "pretrained_model_name_or_path": str(base), "max_sequence_length": TOKENS}
    return flow_runs.trained(place, model, {"shift": SHIFT["shift"], "terminal": SHIFT["shift_terminal"]}, *given)


def theirs(pipe: Any, scale: float) -> np.ndarray:
    noise = initial_noise([SEED], (64, SIDE_PX // 16, SIDE_PX // 16))
    size = {"height": SIDE_PX, "width": SIDE_PX, "num_inference_steps": STEPS}
    guided = {"true_cfg_scale": scale, "negative_prompt": [""]} if scale > 1 else {}
    latents = pipe._pack_latents(noise, *noise.shape)
    image = pipe(["a red circle"], latents=latents, output_type="np", **size, **guided).images[0]
    return (image[..., :3] * 255).round().astype(int)


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.long), 3.0])
def test_the_pipeline_of_a_run_draws_the_same_image(scale, base, tmp_path):
    run = trained(tmp_path, base)
    image = drawn(run, tmp_path / "out", scale)
    assert np.abs(image - theirs(opened(run / "pipeline"), scale)).max() <= 2
    assert image.std() > 1
    assert (run / "pipeline" / "processor" / "preprocessor_config.json").is_file()
    assert "negative_prompt='', true_cfg_scale=" in (run / "pipeline" / "README.md").read_text()


@pytest.mark.long  # of the quick tests, test_qwen_image.py has one
def test_a_lora_means_the_same_in_diffusers(base, tmp_path):
    more = ["adapter.name=lora", "adapter.rank=2", "adapter.targets=attention+ff", "optimizer.learning_rate=1"]
    run = trained(tmp_path, base, *more)
    image = drawn(run, tmp_path / "out", 3.0)
    pipe = opened(base)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**SHIFT)
    plain = theirs(pipe, 3.0)
    pipe.load_lora_weights(run / "adapter", weight_name="pytorch_lora_weights.safetensors")
    other = theirs(pipe, 3.0)
    assert np.abs(image - other).max() <= 2
    assert np.abs(other - plain).max() > 20, "it changes something"


def library(transformer: Any, x_BCHW: Tensor, time_B: Tensor, text_BTD: Tensor) -> Tensor:
    """As QwenImage21Pipeline calls the library's transformer."""
    b, _, h, w = x_BCHW.shape
    is_image = torch.zeros(b, text_BTD.shape[1] + h * w // 4, dtype=torch.bool)
    is_image[:, text_BTD.shape[1] :] = True
    tokens = x_BCHW.flatten(2).transpose(1, 2)
    given = {"img_shapes": [[(1, h, w)]] * b, "img_mask": is_image, "return_dict": False}
    (y,) = transformer(hidden_states=tokens, encoder_hidden_states=text_BTD, timestep=time_B, **given)
    return y[:, -h * w :].transpose(1, 2).unflatten(2, (h, w))


@pytest.mark.parametrize("causal", [True, False])
def test_the_transformer_computes_what_the_librarys_own_does(causal):
    numbers = tiny.NUMBERS | {"causal_condition": causal}
    own = tiny_texts.seeded(lambda: Interleaved(**numbers))
    stock = QwenImage21Transformer2DModel(**numbers)
    stock.load_state_dict(own.state_dict())
    g = torch.Generator().manual_seed(1)
    x, text = (torch.randn(shape, generator=g) for shape in [(2, 64, 4, 6), (2, 11, tiny_texts.WIDTH)])
    time = torch.tensor([0.3, 0.7])
    y, expected = own(x, time, text), library(stock, x, time, text)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    y.square().mean().backward()
    expected.square().mean().backward()
    for (name, p), q in zip(own.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)
        assert p.grad.abs().max() > 0, f"{name} is read"


@torch.no_grad()
def test_a_batch_of_unequal_captions_is_each_alone(family):
    """The library's own transformer reads padding as the image's place, and its mask does not help."""
    cond, _ = family.encode_prompts(prompts(TEXTS[:4]), (3, 64, 64))
    x = torch.randn(4, 64, 4, 4, generator=torch.Generator().manual_seed(2))
    time = torch.tensor([0.2, 0.4, 0.6, 0.8])
    together = family.net(x, time, cond)
    for row, text in enumerate(TEXTS[:4]):
        alone, _ = family.encode_prompts(prompts([text]), (3, 64, 64))
        assert "text_mask" not in alone
        y = family.net(x[row : row + 1], time[row : row + 1], alone)
        torch.testing.assert_close(together[row], y[0], rtol=0, atol=1e-6)
    stock = QwenImage21Transformer2DModel(**tiny.NUMBERS)
    stock.load_state_dict(family.components["transformer"].state_dict())
    padded = library(stock, x, time, cond["text"])
    assert (padded - together).abs().max() > 1e-3, "else padding could be read"


@torch.no_grad()
def test_features_are_those_of_the_pipeline(family, pipe):
    """Tokens and hidden states of ten captions, of which the pipeline fills up a batch on the left."""
    text, mask, _ = pipe.encode_prompt(TEXTS, device="cpu")
    ours = family.text.features(family.text.tokens(TEXTS))
    assert torch.equal(ours["text_mask"], mask.bool())
    torch.testing.assert_close(ours["text"], text, rtol=1e-4, atol=1e-5)
    assert len(family.text.encoders[0].tokenizer([qwen_image_21._SYSTEM]).input_ids[0]) == pipe._drop_idx


def test_images_are_opaque_and_sides_multiples_of_32(family):
    assert family.latent_shape((3, 64, 96)) == (64, 4, 6)
    with pytest.raises(Exception, match="multiples of 32"):
        family.latent_shape((3, 64, 80))
    seen = []
    vae = family.components["vae"]
    hook = vae.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    family.images.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    hook.remove()
    assert seen[0].shape[1] == 4
    assert torch.equal(seen[0][:, 3], torch.ones_like(seen[0][:, 3]))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_the_transformer_alone(prefix, base, tmp_path):
    weights = load_file(base / WEIGHTS)
    path = tmp_path / "qwen.safetensors"
    original_files.write(path, weights, qwen_image_21.NAMES.links, prefix=prefix)
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    found = original_files.read(path, qwen_image_21.NAMES, shapes)
    assert f"{prefix}transformer_blocks.1.img_mlp.gate_up.weight" in load_file(path)
    converted = single_file_utils.convert_qwen_image21_transformer_checkpoint_to_diffusers(load_file(path))
    assert found.keys() == weights.keys() == converted.keys()
    assert all(
        torch.equal(found[name], value) and torch.equal(converted[name], value) for name, value in weights.items()
    )


def test_a_published_name_says_that_its_weights_were_distilled(tmp_path, capsys):
    words = ["train", "qwen_image_21_lora", "model.pretrained_model_name_or_path=Qwen/Qwen-Image-2.1-Turbo"]
    assert main.run([*words, f"output_dir={tmp_path}", "run_name=turbo", "--dry-run"]) == errors.REFUSED
    assert "train Qwen/Qwen-Image-2.1, and generate with this one" in " ".join(capsys.readouterr().err.split())


def test_distilled_weights_generate_at_their_own_noise_levels(tmp_path):
    turbo, out = tiny.distilled(tmp_path / "turbo"), tmp_path / "few"
    words = ["generate", str(turbo), "prompt=a fox", f"height={SIDE_PX}", f"width={SIDE_PX}", f"out={out}"]
    assert main.run(words) == errors.DONE
    told = json.loads((out / "000.json").read_text())
    assert (told["num_inference_steps"], told["guidance_scale"]) == (len(tiny.LEVELS), 1.0)
    assert told["timestep_spacing"] == tiny.LEVELS
    pipe = opened(turbo)
    noise = initial_noise([0], (64, SIDE_PX // 16, SIDE_PX // 16))
    latents = pipe._pack_latents(noise, *noise.shape)
    image = pipe(["a fox"], height=SIDE_PX, width=SIDE_PX, latents=latents, output_type="np").images[0]
    theirs = (image[..., :3] * 255).round().astype(int)
    ours = np.asarray(Image.open(out / "000.png")).astype(int)
    assert np.abs(ours - theirs).max() <= 2
