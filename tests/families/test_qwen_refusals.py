"""Ways to get Qwen-Image-2.1 and Qwen-Image wrong: each is refused in words, before anything is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import data_sets
import numpy as np
import pytest
import tiny_texts
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImage21Pipeline, QwenImage21Transformer2DModel
from PIL import Image
from safetensors.torch import save_file
from tiny_families import qwen_image, qwen_image_21
from tiny_models import write_sd

from daguerre import errors
from daguerre.cli import main
from daguerre.samplers.draw import initial_noise

LEVELS = [1.0, 0.8, 0.4]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Both pipelines, what does not belong to them, and a recipe of each."""
    place = tmp_path_factory.mktemp("qwen")
    bases = {"qwen_image_21": qwen_image_21.write(place / "21"), "qwen_image": qwen_image.write(place / "first")}
    turbo = shutil.copytree(place / "21", place / "turbo")
    index = json.loads((turbo / "model_index.json").read_text()) | {"sample_sigmas": LEVELS}
    (turbo / "model_index.json").write_text(json.dumps(index))
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(turbo / "scheduler")
    tiny_texts.write(place / "qwen3", {"text_encoder": tiny_texts.qwen3(), "tokenizer": tiny_texts.qwen_tokenizer()})
    QwenImage21Transformer2DModel(**qwen_image_21.NUMBERS | {"context_in_dim": 48}).save_pretrained(place / "wide")
    tiny_texts.write(place / "t5", {"tokenizer": tiny_texts.t5_tokenizer()})
    write_sd(place / "sd")
    of_sd = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    down, up = torch.ones(2, 32), torch.ones(32, 2)
    lora = {f"{of_sd}.lora_down.weight": down, f"{of_sd}.lora_up.weight": up}
    save_file(lora, place / "sd_lora.safetensors")
    save_file({"x.weight": torch.ones(2)}, place / "other.safetensors")
    data_sets.folder(place / "images", 4)
    for family, base in bases.items():
        recipe = {
            "model": {"family": family, "pretrained_model_name_or_path": str(base)},
            "objective": {"name": "flow"},
            "data": {"source": "folder", "path": str(place / "images"), "resolution": 64},
            "training": {"duration": "1 steps", "global_batch_size": 2, "device": "cpu", "mixed_precision": "no"},
            "sampling": {"num_images": 0, "guidance_scale": 1},
            "checkpoint": {"export": False},
            "validation": {"every": None},
            "logging": {"tensorboard": False},
        }
        (place / f"{family}.yaml").write_text(yaml.safe_dump(recipe))
    return place


WRONG = [
    ("qwen_image_21", "pretrained_model_name_or_path=turbo", "was distilled to few steps"),
    ("qwen_image_21", "is_distilled=true", "train Qwen/Qwen-Image-2.1"),
    ("qwen_image_21", "text_encoder=first", "trained with Qwen3-VL 8B: give that one"),
    ("qwen_image", "text_encoder=21", "trained with Qwen2.5-VL 7B: give that one"),
    ("qwen_image_21", "text_encoder=qwen3", "is a 'qwen3'"),
    ("qwen_image_21", "vae=first", "latents are made by AutoencoderKLQwenImage21"),
    ("qwen_image", "vae=sd", "latents are made by AutoencoderKLQwenImage:"),
    ("qwen_image_21", "transformer=wide", "context_in_dim is 48"),
    ("qwen_image_21", "transformer=other.safetensors", "other.safetensors"),
    ("qwen_image_21", "tokenizer=sd", "tokenizer"),
    ("qwen_image", "tokenizer=t5", "is one of T5, whose numbers mean other words"),
    ("qwen_image_21", "max_sequence_length=0", "max_sequence_length"),
    ("qwen_image_21", "text_encoder_layer=-2", "text_encoder_layer"),
]


@pytest.mark.parametrize(("family", "given", "said"), WRONG)
def test_a_wrong_network_is_refused(family, given, said, place, capsys):
    name, _, value = given.partition("=")
    value = str(place / value) if (place / value).exists() else value
    refused(place, family, f"model.{name}={value}", said, capsys)


def test_a_published_name_says_that_its_weights_were_distilled(place, capsys):
    words = ["train", "qwen_image_21_lora", "model.pretrained_model_name_or_path=Qwen/Qwen-Image-2.1-Turbo"]
    assert main.run([*words, f"output_dir={place}", "run_name=turbo", "--dry-run"]) == errors.REFUSED
    assert "train Qwen/Qwen-Image-2.1, and generate with this one" in " ".join(capsys.readouterr().err.split())


def refused(place, family, given, said, capsys):
    words = ["train", str(place / f"{family}.yaml"), given, f"output_dir={place}", "run_name=wrong"]
    assert main.run(words) == errors.REFUSED
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("family", "given", "said"),
    [
        ("qwen_image_21", "data.resolution=80", "multiples of 32"),
        ("qwen_image", "data.resolution=72", "multiples of 16"),
        ("qwen_image_21", "training.mixed_precision=fp16", "exceed the range of float16"),
        ("qwen_image_21", "sampling.guidance_scale=0.5", "0 and 1 are no guidance"),
        ("qwen_image", "sampling.negative_prompt=blurry", "there is no guidance"),
    ],
)
def test_a_wrong_setting_is_refused(family, given, said, place, capsys):
    refused(place, family, given, said, capsys)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["use=sd_lora.safetensors"], "sd_lora.safetensors"),
        (["reference=21.png"], "reference"),
        (["height=80"], "multiples of 32"),
        (["timestep_spacing=[1,0.5,0.6]"], "give shares of noise that fall"),
        (["timestep_spacing=[1,0.6,0.5]"], "set num_inference_steps=3"),
    ],
)
def test_a_wrong_image_is_refused(given, said, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    size = [] if "height" in given[0] else ["height=64"]
    words = ["generate", str(place / "21"), "prompt=a fox", "width=64", *size, "num_inference_steps=2", *given]
    assert main.run([*words, f"out={place / 'out'}"]) == errors.REFUSED
    assert said in " ".join(capsys.readouterr().err.split())


def test_distilled_weights_generate_at_their_own_noise_levels(place, capsys):
    out = place / "few"
    words = ["generate", str(place / "turbo"), "prompt=a fox", "height=64", "width=64", f"out={out}"]
    assert main.run(words) == errors.DONE
    told = json.loads((out / "000.json").read_text())
    assert (told["num_inference_steps"], told["guidance_scale"]) == (len(LEVELS), 1.0)
    assert told["timestep_spacing"] == LEVELS
    pipe = QwenImage21Pipeline.from_pretrained(place / "turbo", processor=tiny_texts.qwen3_vl_processor())
    noise = initial_noise([0], (64, 4, 4))
    latents = pipe._pack_latents(noise, *noise.shape)
    image = pipe(["a fox"], height=64, width=64, latents=latents, output_type="np").images[0]
    theirs = (image[..., :3] * 255).round().astype(int)
    ours = np.asarray(Image.open(out / "000.png")).astype(int)
    assert np.abs(ours - theirs).max() <= 2
