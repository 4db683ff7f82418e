"""`daguerre convert config` for configs that train a ControlNet or new tokens: what they mean, and that they train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_configs
import numpy as np
import pytest
import recipe_values
from adapter_configs import EMBEDDING, ai_toolkit, onetrainer, simpletuner
from PIL import Image
from safetensors.torch import load_file
from test_convert_config import said
from tiny_models import write_sd, write_sdxl

from daguerre import trees
from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config import recipe

CONTROLNET, TOKENS = "adapters.controlnet.", "adapters.tokens."
ADAPTER = "adapter: {type: control_net, train: true, name_or_path: net}"
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "MindOne, ControlNet": (
        "x.yaml",
        adapter_configs.mindone_controlnet(),
        {
            f"{CONTROLNET}name": "controlnet",
            f"{CONTROLNET}conditioning_scale": 0.8,
            "data.source": "jsonl",
            "data.control_column": "source",
            "data.caption_dropout": 0.5,
            "optimizer.learning_rate_factors.controlnet*.controlnet_*": 10,
        },
    ),
    "MindOne, tokens": (
        "x.yaml",
        adapter_configs.mindone_tokens(),
        {
            f"{TOKENS}num_vectors": 1,
            f"{TOKENS}placeholder_token": "???",
            "data.source": "folder",
            "data.captions.templates": "object",
            "optimizer.learning_rate_factors": None,
        },
    ),
    "kohya, ControlNet": (
        "x.toml",
        adapter_configs.KOHYA_CONTROLNET,
        {f"{CONTROLNET}name": "controlnet", "data.control_dir": "controls", "optimizer.learning_rate": 2e-5},
    ),
    "kohya, ControlNet of SDXL": (
        "x.toml",
        adapter_configs.KOHYA_CONTROLNET.replace('"base"', '"my-xl"') + "control_net_lr = 3e-5\n",
        {"model.family": "sdxl", "optimizer.learning_rate": 3e-5},
    ),
    "kohya, ControlNet with its data sets": (
        "x.toml",
        adapter_configs.KOHYA.replace('"base"', '"my-xl"') + adapter_configs.KOHYA_SETS,
        {
            f"{CONTROLNET}name": "controlnet",
            "data.sources.images.control_dir": "controls",
            "data.sources.others.control_dir": "others_controls",
            "optimizer.learning_rate": 1e-4,
        },
    ),
    "kohya, tokens": (
        "x.toml",
        adapter_configs.KOHYA_TOKENS,
        {
            f"{TOKENS}placeholder_token": "<toy>",
            f"{TOKENS}initializer_token": "toy car",
            f"{TOKENS}num_vectors": 2,
            "data.captions.text": "<toy>",
            "data.captions.templates": "object",
        },
    ),
    "kohya, tokens from a file": (
        "x.toml",
        adapter_configs.KOHYA_TOKENS + 'weights = "old.safetensors"\n',
        {f"{TOKENS}tokens.<toy>.init_file": "old.safetensors", f"{TOKENS}tokens.<toy>.vectors": 2},
    ),
    "OneTrainer, an embedding": (
        "x.json",
        onetrainer("EMBEDDING", embedding=EMBEDDING),
        {
            f"{TOKENS}tokens.<toy>.init": "toy",
            f"{TOKENS}tokens.<toy>.vectors": 2,
            f"{TOKENS}text_encoders": ["text_encoder"],
            "optimizer.learning_rates.*.rows": 3e-4,
            "model.train_unet": None,
        },
    ),
    "OneTrainer, embeddings beside a LoRA": (
        "x.json",
        onetrainer("LORA", additional_embeddings=[EMBEDDING, EMBEDDING | {"placeholder": "<b>", "token_count": None}]),
        {"adapters.lora.name": "lora", f"{TOKENS}tokens.<b>.init": "toy", f"{TOKENS}tokens.<toy>.vectors": 2},
    ),
    "OneTrainer, an embedding beside a whole UNet": (
        "x.json",
        onetrainer("FINE_TUNE", additional_embeddings=[EMBEDDING | {"model_name": "old.pt"}]),
        {"adapters.full.train": ["unet"], f"{TOKENS}tokens.<toy>.init_file": "old.pt"},
    ),
    "SimpleTuner, ControlNet": (
        "x.json",
        simpletuner(),
        {f"{CONTROLNET}name": "controlnet", f"{CONTROLNET}condition": None, "data.control_dir": "controls"},
    ),
    "ai-toolkit, an embedding": (
        "x.yaml",
        ai_toolkit("embedding: {trigger: <toy>, tokens: 3, init_words: red toy, save_format: pt}"),
        {
            f"{TOKENS}placeholder_token": "<toy>",
            f"{TOKENS}initializer_token": "red toy",
            f"{TOKENS}num_vectors": 3,
            "data.captions.text": "<toy>",
            "model.train_unet": None,
        },
    ),
    "ai-toolkit, ControlNet": (
        "x.yaml",
        ai_toolkit(ADAPTER, "          control_path: controls\n"),
        {f"{CONTROLNET}controlnet_model_name_or_path": "net", "data.control_dir": "controls"},
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("config", "images"):
        (tmp_path / name).mkdir()
    Path("config/backends.json").write_text(adapter_configs.backends(), encoding="utf-8")
    return tmp_path


def converted(name: str, text: str, capsys, code: int = 0) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """Our values by path, and {key: (kind, text)}."""
    Path(name).write_text(text, encoding="utf-8")
    assert main.run(["convert", "config", name, "out=ours.yaml", "--all"]) == code, capsys.readouterr()
    output = capsys.readouterr()
    assert not code or not Path("ours.yaml").exists()
    values = recipe_values.values(Path("ours.yaml")) if not code else {"error": output.err}
    return values, said(output.out)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_controlnet_and_new_tokens_are_adapters(case, place, capsys):
    name, text, expected = CONFIGS[case]
    values, lines = converted(name, text, capsys)
    assert {path: values.get(path) for path in expected} == expected
    alone = "adapters.full.name" in values
    assert not [
        path for path in values if path.startswith("model.train_") or (path.startswith("adapters.full") > alone)
    ]
    refused = {key.rpartition(".")[2] for key, (kind, _) in lines.items() if kind == "refused"}
    words = ("control", "embedding", "token", "train", "adapter", "init_word", "template", "weights")
    assert not [key for key in refused if any(word in key for word in words)]


def test_conditions_of_simpletuner_are_computed(place, capsys):
    made = [{"type": "canny", "low_threshold": 50, "high_threshold": 90}]
    Path("config/backends.json").write_text(adapter_configs.backends(conditioning_data=None, conditioning=made))
    values, _ = converted("x.json", simpletuner(), capsys)
    expected = {"name": "canny", "low": 50, "high": 90}
    assert {name: values[f"{CONTROLNET}condition.{name}"] for name in expected} == expected
    assert "data.control_dir" not in values
    Path("ours.yaml").unlink()
    Path("config/backends.json").write_text(
        adapter_configs.backends(conditioning_data=None, conditioning=[{"type": "depth"}])
    )
    _, lines = converted("x.json", simpletuner(), capsys)
    assert "docs/conditions.md" in lines["data_backends.0.conditioning.0.type"][1]


def test_a_token_stands_before_captions_that_lack_it(place, capsys):
    Path("images/cats").mkdir(parents=True)
    Path("images/cats/0.txt").write_text("a cat")
    text = ai_toolkit("embedding: {trigger: <toy>, tokens: 3}")
    values, _ = converted("x.yaml", text, capsys)
    assert (values["data.captions.prefix"], values[f"{TOKENS}initializer_token"]) == ("<toy> ", "*")
    Path("ours.yaml").unlink()
    Path("images/cats/0.txt").unlink()
    own = "default_caption: a '[trigger]' here\n          caption_ext:"
    values, _ = converted("x.yaml", text.replace("caption_ext:", own), capsys)
    assert values["data.captions.text"] == "a '<toy>' here"
    assert "data.captions.prefix" not in values


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.toml", adapter_configs.KOHYA_CONTROLNET + "cond_emb_dim = 32\n", "a ControlNet-LLLite"),
        ("x.toml", adapter_configs.KOHYA_CONTROLNET + 'network_module = "networks.lora"\n', "beside control images"),
        ("x.json", simpletuner(**{"--model_type": "lora"}), "a LoRA of a ControlNet"),
        ("x.json", simpletuner(**{"--controlnet": "false", "--control": "true"}), "further channels"),
        ("x.yaml", ai_toolkit("adapter: {type: ip, train: true}"), "beside an adapter of type ip"),
        ("x.yaml", ai_toolkit(ADAPTER.replace("true", "false")), "control_net that is not trained"),
        (
            "x.json",
            onetrainer("FINE_TUNE", additional_embeddings=[EMBEDDING], text_encoder={"train": True}),
            "a whole text encoder and embeddings of it",
        ),
    ],
)
def test_an_adapter_that_is_not_here_is_named(name, text, words, place, capsys):
    values, _ = converted(name, text, capsys, code=2)
    assert words in values["error"]


def test_a_controlnet_has_the_numbers_of_its_unet(place, capsys):
    _, lines = converted("x.yaml", adapter_configs.mindone_controlnet(depth="[0, 0, 1]"), capsys)
    key = "model.params.network_config.params.control_stage_config.params.transformer_depth"
    assert lines[key] == (
        "refused",
        "a ControlNet has the UNet's numbers: adapters.controlnet.size leaves out blocks of it",
    )


def test_what_embeddings_cannot_be_is_listed(place, capsys):
    output = EMBEDDING | {"is_output_embedding": True, "placeholder": "<out>"}
    more = {"additional_embeddings": [EMBEDDING, output], "preserve_embedding_norm": True}
    more |= {"text_encoder": {"train": True, "learning_rate": 1e-5}, "text_encoder_2": {"train": False}}
    values, lines = converted("x.json", onetrainer("LORA", **more), capsys)
    assert [path for path in values if path.endswith(".init")] == [f"{TOKENS}tokens.<toy>.init"]
    refused = {key for key, (kind, _) in lines.items() if kind == "refused"}
    assert {"preserve_embedding_norm", "text_encoder.learning_rate", "additional_embeddings.1.placeholder"} <= refused


# They train; a token of the tiny models is a letter

ONE = EMBEDDING | {"initial_embedding_text": "t"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base models, images with captions and control images, in several layouts."""
    folder = tmp_path_factory.mktemp("shelf")
    write_sd(folder / "sd")
    write_sdxl(folder / "sdxl")
    noise = np.random.default_rng(0)
    for name in ("images", "controls"):
        (folder / name).mkdir()
    rows = []
    for number in range(4):
        for name in ("images", "controls"):
            pixels = noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text("a cat")
        rows.append({"source": f"controls/{number}.png", "target": f"images/{number}.png", "prompt": f"cat {number}"})
    (folder / "prompt.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


LEAST = {
    "sampling.num_images": 0,
    "loader.num_workers": 0,
    "model.text_encoder_layer": -2,
    "training.mixed_precision": "no",
    "training.attention": "auto",
    "training.weights_dtype": "float32",
    "lr_scheduler.warmup": "0 steps",
    "data.resolution": 16,
    "data.buckets.aspects": "square",
    "checkpoint.every": "null",
    "optimizer.name": "adamw",
    "ema.enabled": "false",
    "model.text_encoder_final_norm": "false",
    "logging.trackers": "[]",
}


def train(recipe_name: str, shelf: Path, base: str, **given: Any) -> Path:
    """Trains two updates by names of a command line; the folder `adapter` of the run."""
    names = LEAST | {"model.pretrained_model_name_or_path": shelf / base, "run_name": "x", "output_dir": "out"}
    names |= {"training.duration": "2 steps", "training.per_device_batch_size": 2} | given
    words = [f"{key}={value}" for key, value in names.items() if value is not None]
    assert main.run(["train", recipe_name, *words]) == 0
    return Path("out/x/adapter")


def rows_of(folder: Path) -> dict[str, tuple[int, ...]]:
    (found,) = folder.rglob("learned_embeds.safetensors")
    return {name: tuple(value.shape) for name, value in load_file(found).items()}


@pytest.mark.long
def test_kohyas_controlnet_trains(place, shelf, capsys):
    converted("x.toml", adapter_configs.KOHYA_CONTROLNET, capsys)
    given = {"data.path": shelf / "images", "data.control_dir": shelf / "controls", "data.caption_extension": ".txt"}
    assert (train("ours.yaml", shelf, "sd", **given) / "diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.long  # of the quick tests, kohya's LoRA trains in test_convert_lora.py
def test_kohyas_tokens_train(place, shelf, capsys):
    converted("x.toml", adapter_configs.KOHYA_TOKENS.replace("toy car", "ty"), capsys)
    assert rows_of(train("ours.yaml", shelf, "sd", **{"data.path": shelf / "images"}))["<toy>"][0] == 2


@pytest.mark.long
def test_onetrainers_embedding_beside_a_lora_trains(place, shelf, capsys):
    converted("x.json", onetrainer("LORA", additional_embeddings=[ONE]), capsys)
    folder = train("ours.yaml", shelf, "sdxl", **{"data.path": shelf / "images"})
    assert rows_of(folder)["<toy>"][0] == 2
    assert (folder / "lora/kohya.safetensors").is_file()


@pytest.mark.long
def test_onetrainers_embedding_alone_trains(place, shelf, capsys):
    converted("x.json", onetrainer("EMBEDDING", embedding=ONE), capsys)
    given = {"data.path": shelf / "images", "data.captions.text": "a <toy>"}
    assert rows_of(train("ours.yaml", shelf, "sdxl", **given))["<toy>"][0] == 2


@pytest.mark.long
def test_simpletuners_controlnet_trains(place, shelf, capsys):
    converted("x.json", simpletuner(), capsys)
    given = {"data.path": shelf / "images", "data.control_dir": shelf / "controls"}
    assert (train("ours.yaml", shelf, "sdxl", **given) / "config.json").is_file()


@pytest.mark.long
def test_ai_toolkits_embedding_and_controlnet_train(place, shelf, capsys):
    converted("x.yaml", ai_toolkit("embedding: {trigger: <toy>, tokens: 3}"), capsys)
    first = train("ours.yaml", shelf, "sdxl", **{"data.path": shelf / "images"})
    assert rows_of(first)["<toy>"][0] == 3
    Path("ours.yaml").unlink()
    converted("x.yaml", ai_toolkit(ADAPTER, "          control_path: controls\n"), capsys)
    given = {"data.path": shelf / "images", "data.control_dir": shelf / "controls", "run_name": "y"}
    given["adapters.controlnet.controlnet_model_name_or_path"] = "null"
    assert train("ours.yaml", shelf, "sdxl", **given).is_dir()
    assert Path("out/y/adapter/config.json").is_file()


@pytest.mark.long  # of the quick tests, test_a_controlnet_and_new_tokens_are_adapters
def test_mindones_controlnet_trains_by_its_own_command(place, shelf, capsys):
    """Its data set is ControlNet's: prompt.json beside the folders source and target."""
    converted("x.yaml", adapter_configs.mindone_controlnet(), capsys)
    given = {"--weight": shelf / "sdxl", "--data_path": shelf, "--total_step": 2, "--per_batch_size": 2}
    given |= {"--group_lr_scaler": 4.0, "--save_ckpt_interval": 2, "--max_num_ckpt": 5, "--save_path": "out"}
    given |= {"--drop_text_prob": 0.25, "--run_name": "x", "--save_path_with_time": "True", "--log_interval": 1}
    words = [str(word) for pair in given.items() for word in pair]
    assert main.run(["train", "--config", "ours.yaml", *words, *(f"{k}={v}" for k, v in LEAST.items())]) == 0
    assert Path("out/x/adapter/controlnet.safetensors").is_file()
    used = recipe.read(Path("out/x/config.yaml"))
    factors = {"controlnet*.controlnet_*": 4.0}
    assert trees.get(used, "optimizer.learning_rate_factors") == factors
    (source,) = trees.get(used, "data.sources").values()
    assert (source["source"], source["caption_dropout"], source["control_column"]) == ("jsonl", 0.25, "source")


def test_mindones_captions_are_the_token_that_its_command_names(place, capsys):
    converted("x.yaml", adapter_configs.mindone_tokens(), capsys)
    given = ["placeholder_token=<cat-toy>", "initializer_token=toy", "data.path=images", "run_name=x"]
    found = configs.load("ours.yaml", given).config
    (source,) = found.data.sources.values()
    assert source.captions.text == "<cat-toy>"


@pytest.mark.long
def test_mindones_textual_inversion_trains_by_its_own_command(place, shelf, capsys):
    converted("x.yaml", adapter_configs.mindone_tokens(), capsys)
    Path("sentences.txt").write_text("a photo of {}\n{} at night\n")
    given = {"--weight": shelf / "sdxl", "--data_path": shelf / "images", "--total_step": 2, "--train_batch_size": 2}
    given |= {"--placeholder_token": "<cat-toy>", "--num_vectors": 3, "--learnable_property": "style"}
    given |= {"--initializer_token": "toy", "--save_path": "out", "--run_name": "x", "--infer_during_train": "True"}
    given |= {"--gradient_accumulation_steps": 1, "--infer_interval": 500, "--version": "SDXL-base-1.0"}
    words = [str(word) for pair in given.items() for word in pair]
    least = [f"{key}={value}" for key, value in LEAST.items()]
    capsys.readouterr()
    assert main.run(["train", "--config", "ours.yaml", *words, *least]) == 0
    assert "is in none of the first" not in capsys.readouterr().out
    assert rows_of(Path("out/x/adapter"))["<cat-toy>"][0] == 3
    loaded = main.run(
        ["train", "--config", "ours.yaml", *words, *least, "--template_file", "sentences.txt", "--dry-run"]
    )
    assert loaded == 0
