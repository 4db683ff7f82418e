"""`daguerre convert config` for configs of other trainers that train a LoRA: what they mean, and that they train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import foreign_configs
import numpy as np
import peer_configs
import pytest
import recipe_values
from PIL import Image
from safetensors.torch import load_file
from test_convert_config import said
from tiny_models import write_sd, write_sdxl

from daguerre.cli import main

KOHYA = """\
pretrained_model_name_or_path = "base"
output_name = "dogs"
output_dir = "out"
network_module = "networks.lora"
network_dim = 4
network_alpha = 2
network_dropout = 0.1
network_args = ["conv_dim=2", "conv_alpha=1", "loraplus_lr_ratio=4"]
unet_lr = 1e-4
text_encoder_lr = 5e-5
learning_rate = 1e-4
max_train_steps = 2
train_batch_size = 2
resolution = 16
train_data_dir = "images"
"""
_LORA = """\
                lora_dim: 4
                lora_alpha: 2
                lora_dropout: 0.0
                lora_merge_weights: False
"""


def mindone(dreambooth: bool = False) -> str:
    """A config of MindOne's with a LoRA of the UNet and of one text encoder."""
    text = foreign_configs.mindone().replace("openaimodel.UNetModel", "openaimodel.UNetModel_lora")
    text = text.replace("                in_channels: 4\n", f"{_LORA}                only_save_lora: True\n", 1)
    text = text.replace("FrozenCLIPEmbedder\n", "FrozenCLIPEmbedder_lora\n")
    text = text.replace(
        "                      layer_idx: 11\n", f"                      layer_idx: 11\n{_deeper(_LORA)}"
    )
    text = text.replace("disable_first_stage_amp: True", "disable_first_stage_amp: False")
    text = text.replace(
        "                    dropout: 0.0\n",
        "                    dropout: 0.0\n                    decoder_attn_dtype: fp16\n",
    )
    if dreambooth:
        text = text.replace("dataset.Text2ImageDataset", "dataset.Text2ImageDatasetDreamBooth")
        text = text.replace("DiffusionEngine", "DiffusionEngineDreamBooth")
    return text


def _deeper(text: str) -> str:
    return "".join(f"      {line}\n" for line in text.splitlines())


def onetrainer(**more: Any) -> str:
    own = {"training_method": "LORA", "lora_rank": 8, "lora_alpha": 1.0, "layer_filter": "attentions", **more}
    return json.dumps(peer_configs.ONETRAINER | own)


def simpletuner(**more: Any) -> str:
    own = {"--model_type": "lora", "--lora_rank": 8, "--lora_initialisation_style": "pissa", **more}
    return json.dumps(peer_configs.SIMPLETUNER | own)


def ai_toolkit(network: str) -> str:
    return peer_configs.AI_TOOLKIT.replace("      device", f"      network: {network}\n      device")


CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kohya": (
        "x.toml",
        KOHYA,
        {
            "rank": 4,
            "alpha": 2,
            "dropout": 0.1,
            "kind": "lora",
            "targets": "attention+ff+conv",
            "rank_pattern.conv[12]": 2,
            "alpha_pattern.conv[12]": 1.0,
            "ranks.text_encoder": 4,
            "/optimizer.learning_rates.unet.*": 1e-4,
            "/optimizer.learning_rates.text_encoder.*": 5e-5,
            "/optimizer.learning_rate_factors.*.lora_B.*": 4.0,
        },
    ),
    "kohya, UNet alone": (
        "x.toml",
        KOHYA.replace("network_dropout = 0.1", "network_train_unet_only = true"),
        {"rank": 4, "ranks.text_encoder": None, "/optimizer.learning_rates.unet.*": 1e-4},
    ),
    "LyCORIS": (
        "x.toml",
        KOHYA.replace("networks.lora", "lycoris.kohya")
        .replace('"conv_dim=2", "conv_alpha=1"', '"algo=lokr"')
        .replace("network_alpha = 2", "network_alpha = 4"),
        {"kind": "lokr", "targets": "attention+ff+conv", "alpha": 4},
    ),
    "OneTrainer": (
        "x.json",
        onetrainer(),
        {"rank": 8, "alpha": 1.0, "targets": ["unet.*attentions*", "text_encoder.*"], "ranks.text_encoder": 8},
    ),
    "OneTrainer, all layers": (
        "x.json",
        onetrainer(layer_filter="", peft_type="LOHA"),
        {"targets": "all", "kind": "loha"},
    ),
    "ai-toolkit": (
        "x.yaml",
        ai_toolkit("{type: lora, linear: 16, linear_alpha: 8, conv: 4}"),
        {"rank": 16, "alpha": 8, "targets": "attention+ff+conv", "rank_pattern.conv[12]": 4},
    ),
    "SimpleTuner": (
        "x.json",
        simpletuner(),
        {"rank": 8, "alpha": None, "dropout": 0.1, "targets": "attention", "init": "pissa"},
    ),
    "MindOne": (
        "x.yaml",
        mindone(),
        {"rank": 4, "alpha": 2, "targets": "attention", "ranks.text_encoder": 4, "ranks.text_encoder_2": None},
    ),
    "MindOne, DreamBooth": (
        "x.yaml",
        mindone(dreambooth=True),
        {"rank": 4, "/data.sources.class.generate.count": 50, "/training.per_device_batch_size": 4},
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/backends.json").write_text(json.dumps(peer_configs.BACKENDS), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("case", CONFIGS)
def test_a_lora_is_an_adapter_with_its_numbers(case, place, capsys):
    name, text, expected = CONFIGS[case]
    Path(name).write_text(text, encoding="utf-8")
    assert main.run(["convert", "config", name, "out=ours.yaml", "--all"]) == 0, capsys.readouterr()
    lines = said(capsys.readouterr().out)
    values = recipe_values.values(Path("ours.yaml"))
    expected = {p[1:] if p[0] == "/" else f"adapters.lora.{p}": value for p, value in expected.items()}
    assert {path: values.get(path) for path in expected} == expected
    assert values["adapters.lora.name"] == "lora"
    assert not [path for path in values if path.startswith("model.train_")]
    refused = {key for key, (kind, text) in lines.items() if kind == "refused" and "no dropout of inputs" not in text}
    assert not [key for key in refused if any(word in key for word in ("lora", "network", "layer_filter", "peft"))]
    assert "MindOne" not in case or not refused


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "x.toml",
            KOHYA.replace("networks.lora", "networks.dylora"),
            "networks.dylora is not read; networks.lora, networks.lora_fa, lycoris.kohya are",
        ),
        ("x.json", onetrainer(peft_type="OFT_2"), "a LoRA of type OFT_2"),
        ("x.json", onetrainer(layer_filter_regex=True), "a regular expression"),
        ("x.json", simpletuner(**{"--lora_type": "lycoris"}), "LyCORIS by a config of its own"),
        (
            "x.toml",
            KOHYA.replace("networks.lora", "lycoris.kohya").replace("conv_dim=2", "algo=tlora"),
            "A T-LoRA is algo=lora here, and adapter.tlora_min_rank=1",
        ),
    ],
)
def test_a_network_that_is_not_here_is_named(name, text, words, place, capsys):
    Path(name).write_text(text, encoding="utf-8")
    assert main.run(["convert", "config", name, "out=ours.yaml", "--all"]) == 2
    assert words in capsys.readouterr().err
    assert not Path("ours.yaml").exists()


@pytest.mark.parametrize(
    ("argument", "serves"),
    [
        ("rank_dropout=0.1", ""),
        ("down_lr_weight=0,0,1", "optimizer.learning_rate_factors of the recipe takes names"),  # beside LoRA+
        ("conv_block_dims=2,4", "rank_pattern of the recipe takes names"),
    ],
)
def test_an_argument_of_a_network_that_is_not_here_is_lost_and_the_others_are_carried(argument, serves, place, capsys):
    text = KOHYA.replace('"conv_alpha=1"', f'"conv_alpha=1", "{argument}"')
    Path("x.toml").write_text(text, encoding="utf-8")
    assert main.run(["convert", "config", "x.toml", "out=ours.yaml", "--all"]) == 0
    kind, why = said(capsys.readouterr().out)["network_args"]
    assert kind == "refused"
    assert f"not supported: {argument};" in why
    assert serves in why
    values = recipe_values.values(Path("ours.yaml"))
    assert values["adapters.lora.targets"] == "attention+ff+conv"
    assert values["optimizer.learning_rate_factors.*.lora_B.*"] == 4.0


def images(folder: Path) -> None:
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(4):
        pixels = noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.mark.long  # of the quick tests, test_a_lora_is_an_adapter_with_its_numbers
def test_kohyas_lora_trains(place, capsys):
    write_sd(place / "base")
    images(place / "images")
    more = "cache_latents = true\nshuffle_caption = true\nsave_every_n_epochs = 1\n"
    Path("x.toml").write_text(KOHYA + more, encoding="utf-8")
    assert main.run(["convert", "config", "x.toml", "out=ours.yaml", "--all"]) == 0
    command = ["train", "ours.yaml", "model.family=sd", "data.captions.text=a dog", "sampling.num_images=0"]
    assert main.run(command) == 0, capsys.readouterr()
    tensors = load_file("out/dogs/adapter/kohya.safetensors")
    assert {len(value) for name, value in tensors.items() if "conv1.lora_down" in name} == {2}
    assert any(name.startswith("lora_te_") for name in tensors)


@pytest.mark.long
def test_mindones_dreambooth_with_a_lora_trains(place, capsys):
    """By the names of its command line."""
    write_sdxl(place / "base")
    images(place / "mine")
    Path("x.yaml").write_text(mindone(dreambooth=True), encoding="utf-8")
    assert main.run(["convert", "config", "x.yaml", "out=ours.yaml", "--all"]) == 0
    given = {
        "instance_data_path": "mine",
        "class_data_path": "class",
        "instance_prompt": "a sks dog",
        "class_prompt": "a dog",
        "num_class_images": 2,
        "prior_loss_weight": 0.5,
        "train_data_repeat": 10,
        "weight": "base",
        "run_name": "x",
        "output_dir": "out",
        "data.total_step": 2,
        "resolution": 16,
        "sampling.num_images": 0,
        "sampling.num_inference_steps": 2,
        "loader.num_workers": 0,
        "model.text_encoder_layer": -2,
        "training.mixed_precision": "no",
    }
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    assert main.run(["train", "ours.yaml", *words]) == 0, capsys.readouterr()
    assert any(name.startswith("lora_te1_") for name in load_file("out/x/adapter/kohya.safetensors"))
    assert len(list(Path("class").glob("*.png"))) >= 2
