"""The commands of the other trainers' guides run as they are written there, but for the program's name.

Models and data are tiny and local: bases lie where the hub's cache would have them, so that the names in the commands
are those of the guides; lengths and sizes come from the recipes' twins (tests/support/twins.py). Only addresses of
buckets are folders here.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import foreign_configs
import huggingface_hub
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from twins import Twins, shards

from daguerre import errors, trees
from daguerre.cli import main
from daguerre.config import overrides, recipe, short_forms

BASES = {
    "CompVis/stable-diffusion-v1-4": "sd1",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "sd1",
    "runwayml/stable-diffusion-v1-5": "sd1",
    "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
}
"""Models of the commands, and the kind of each."""
ISSUE = "run_name=my_run jax_cache_dir=cache activations_dtype=float32 weights_dtype=float32 per_device_batch_size=2 \
precision=DEFAULT dataset_save_location=dataset output_dir=out attention=flash"
BIAS = "--timestep_bias_multiplier 2 --timestep_bias_strategy range --timestep_bias_begin 200 --timestep_bias_end 500"


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins(tmp_path_factory.mktemp("twins"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory, twins):
    """A cache of the hub that holds the bases."""
    cache = tmp_path_factory.mktemp("hub")
    for name, kind in BASES.items():
        place = cache / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        shutil.copytree(twins.pipeline(kind), place / "snapshots" / ("0" * 40))
    return cache


@pytest.fixture
def run(twins, hub, tmp_path, monkeypatch, capsys):
    """Runs one command line of a guide in an empty folder: exit code and what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))

    def command(line: str, *more: str) -> tuple[int, str]:
        words = shlex.split(line)
        assert words.pop(0) == "daguerre"
        name = recipe.locate(overrides.split(words[1:]).recipe).stem if words[0] == "train" else ""
        code = main.run([*words, *(tiny(twins, name, line) if name in recipe.shipped() else ()), *more])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    def tiny(twins: Twins, name: str, line: str) -> list[str]:
        """The twin's sizes and data, but for what the command says itself, with the base that either names."""
        theirs = {"model.pretrained_model_name_or_path"}
        theirs |= {"data.path", "data.name"} if "data_path" in line or "cache_path" in line else set()
        theirs |= {"training.per_device_batch_size"} if "batch_size" in line else set()
        theirs |= {"training.global_batch_size"} if "gradient_accumulation" in line else set()
        return [override for override in twins.overrides(name) if override.partition("=")[0] not in theirs]

    return command


def settings(run_folder: str) -> trees.Tree:
    """What a run was told."""
    return recipe.read(Path(run_folder) / "config.yaml")


def value(run_folder: str, path: str):
    return trees.get(short_forms.flat(settings(run_folder)), path)


def steps(run_folder: str) -> int:
    return int(json.loads((Path(run_folder) / "status.json").read_text())["step"])


@pytest.mark.long
def test_the_quick_start_of_maxdiffusion_trains_and_draws(run):
    code, said = run(f"daguerre train sd14 {ISSUE}")
    assert code == errors.DONE, said
    assert steps("out/my_run") == 2
    assert said.count("jax_cache_dir has no effect: it sets training.compile_cache_dir, but nothing is compiled") == 1
    expected = {
        "training.weights_dtype": "float32",
        "training.mixed_precision": "no",
        "training.attention": "fused",
        "training.matmul_precision": "medium",
        "training.per_device_batch_size": 2,
        "data.cache_dir": "dataset",
        "model.pretrained_model_name_or_path": "CompVis/stable-diffusion-v1-4",
    }
    assert {path: value("out/my_run", path) for path in expected} == expected
    assert any(Path("dataset").rglob("*"))
    code, said = run("daguerre generate sd14 output_dir=out run_name=my_run")
    assert code == errors.DONE, said
    assert list(Path("out/my_run/generated").rglob("*.png"))
    code, said = run(f"daguerre train sd14 {ISSUE} experiment.requeue=False")
    assert code == errors.REFUSED
    assert "holds a run already" in said


@pytest.mark.long  # of the quick tests, ../test_seed_docs.py reads every command
def test_mindones_bias_and_min_snr_train_sdxl(run):
    code, said = run(f"daguerre train sdxl {BIAS} --snr_gamma 5.0", "run_name=x", "output_dir=out")
    assert code == errors.DONE, said
    bias, weighting = (value("out/x", f"objective.{name}") for name in ("timestep_bias", "weighting"))
    assert bias == {"name": "range", "multiplier": 2, "begin": 200, "end": 500}
    assert weighting == {"name": "min_snr", "snr_gamma": 5}


MAXDIFFUSION = [
    "daguerre train src/maxdiffusion/configs/base14.yml run_name='my_run' jax_cache_dir=gs://your-bucket/cache_dir "
    "activations_dtype=float32 weights_dtype=float32 per_device_batch_size=2 precision=DEFAULT "
    "dataset_save_location=my_dataset/ output_dir=your-bucket/ attention=flash",
    "daguerre train src/maxdiffusion/configs/base14.yml run_name='my_run' output_dir='your-bucket/' "
    "pretrained_model_name_or_path=runwayml/stable-diffusion-v1-5 from_pt=True revision=main",
]


@pytest.mark.long
@pytest.mark.parametrize("line", MAXDIFFUSION)
def test_maxdiffusions_commands(run, line):
    code, said = run(line)
    assert code == errors.DONE, said
    assert "the shipped recipe sd14 is used in its place" in said
    assert steps("your-bucket/my_run") == 2
    assert {"checkpoints", "metrics"} <= {path.name for path in Path("your-bucket/my_run").iterdir()}
    draw = "daguerre generate src/maxdiffusion/configs/base14.yml output_dir='your-bucket/' run_name='my_run'"
    assert run(draw)[0] == errors.DONE
    assert list(Path("your-bucket/my_run/generated").rglob("*.png"))


# max_device_memory is left out: it caps a GPU's allocator, and a CPU refuses it.
MINDONE = {
    f"{BIAS} --timestep_bias_portion 0.25": {"objective.timestep_bias.name": "range"},
    "--snr_gamma 5.0": {"objective.weighting.snr_gamma": 5.0},
    "--lpw True": {"model.long_prompts": True},
    "--config configs/training/sd_xl_base_finetune_910b_edm.yaml": {"objective.name": "edm"},
    "--config configs/training/sd_xl_base_finetune_910b.yaml --data_path images --per_batch_size 1 "
    "--gradient_accumulation_steps 2 --clip_grad True --max_grad_norm 1.0 --use_ema True --scale_lr False "
    "--is_parallel False --data_sink False --sink_size 100 --sink_queue_size 10 "
    "--ms_amp_level O2 --param_fp16 False --offset_noise_level 0.05": {
        "data.source": "folder",
        "training.per_device_batch_size": 1,
        "training.gradient_accumulation_steps": 2,
        "training.mixed_precision": "bf16",
        "ema.enabled": True,
        "objective.noise.offset_per": "sample",
    },
}


@pytest.mark.long
@pytest.mark.parametrize("line", MINDONE)
def test_mindones_commands(run, twins, tmp_path, line):
    name = "" if "--config" in line else "sdxl"
    more = ["run_name=x", "output_dir=out"]
    if "--data_path" in line:
        images(tmp_path / "images")
        more.append("held_out_fraction=0.2")
    code, said = run(f"daguerre train {name} {line}", *more)
    assert code == errors.DONE, said
    assert steps("out/x") == 2
    for path, expected in MINDONE[line].items():
        assert value("out/x", path) == expected
    assert any(load_file(next(Path("out/x/pipeline/unet").glob("*.safetensors"))))


@pytest.mark.long  # of the quick tests, run/test_cached_runs.py trains without images
def test_mindones_cache_is_filled_and_then_trained_on_without_images(run, tmp_path):
    images(tmp_path / "images")
    line = (
        "daguerre train --config configs/training/sd_xl_base_finetune_910b.yaml --cache_latent True "
        "--cache_text_embedding True --cache_path ./cache_data"
    )
    more = ["run_name=x", "output_dir=out", "held_out_fraction=0.2", "sampling.num_images=0", "export=false"]
    code, said = run(f"{line} --task cache --data_path images", *more)
    assert code == errors.DONE, said
    assert (
        f"{tmp_path / 'cache_data'}: complete; 24 rows were encoded" in said
    )  # 7 images, mirrored ones, one held out; captions
    assert not Path("out").exists()
    shutil.rmtree("images")
    code, said = run(line, *more)
    assert code == errors.DONE, said
    assert f"cache of images and texts: {tmp_path / 'cache_data'}" in said
    assert (steps("out/x"), value("out/x", "data.source")) == (2, "cache")


@pytest.mark.long
def test_maxdiffusions_cached_latents(run):
    code, said = run(
        "daguerre train src/maxdiffusion/configs/base14.yml run_name=my_run output_dir=out per_device_batch_size=2 "
        "dataset_save_location=my_dataset/ cache_latents_text_encoder_outputs=True"
    )
    assert code == errors.DONE, said
    assert "cache of images and texts: my_dataset/encoded" in said
    assert (steps("out/my_run"), value("out/my_run", "cache.path")) == (2, "auto")


@pytest.fixture
def wandb(monkeypatch):
    """The package that stands for wandb, offline."""
    monkeypatch.syspath_prepend(str(Path(foreign_configs.__file__).parent / "fake_wandb"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    sys.modules.pop("wandb", None)


@pytest.mark.long
def test_trackers_and_profilers_of_the_guides(run, wandb):
    for words, entity, project in (
        ("wandb.entity=us experiment.project=diffusion", "us", "diffusion"),
        ("wandb_project=StableCascade wandb_entity=wandb_username", "wandb_username", "StableCascade"),
    ):
        code, said = run(f"daguerre train sd14 run_name={entity} output_dir=out {words}", "export=false")
        assert code == errors.DONE, said
        told = sys.modules["wandb"].RUNS[-1].arguments
        assert (told["name"], told["entity"], told["project"]) == (entity, entity, project)
    code, said = run("daguerre train sd14 run_name=x output_dir=out wandb.api_key=0123456789")
    assert code == errors.REFUSED
    assert "WANDB_API_KEY" in said
    profiled = "enable_profiler=True skip_first_n_steps_for_profiler=2 profiler_steps=2"
    code, said = run(f"daguerre train sd14 run_name=y output_dir=out {profiled}", "export=false", "duration=5 steps")
    assert code == errors.DONE, said
    assert "profile of updates 3 to 4" in said


def images(path: Path) -> None:
    """A folder of captioned images."""
    path.mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{number}.png")
        (path / f"{number}.txt").write_text(f"noise number {number}", encoding="utf-8")


@pytest.mark.long
def test_open_diffusions_config_is_converted_and_trained(run, hub, tmp_path, wandb):
    """Its two launches, `python -u train.py config=...` and `torchrun -m train config=...`, are one command here."""
    shards(tmp_path / "shards", labelled=False)
    text = foreign_configs.OPEN_DIFFUSION.replace("[320, 640, 1280, 1280]", "[32, 64, 64, 64]")
    Path("theirs.yaml").write_text(text.replace("norm_eps: 1e-05", "norm_num_groups: 8"), encoding="utf-8")
    assert run("daguerre train config=theirs.yaml")[0] == errors.REFUSED
    assert run("daguerre convert config theirs.yaml out=ours.yaml")[0] == errors.DONE
    Path("captions.txt").write_text("a first caption\na second one\n", encoding="utf-8")
    line = (
        "daguerre train config=ours.yaml dataset.params.path=shards experiment.name=x experiment.log_dir=out "
        "experiment.num_examples_to_see=4 model.pretrained=CompVis/stable-diffusion-v1-4 model.scheduler=base "
        "model.text_encoder=base model.tokenizer=base system.batch_size=2 system.gradient_accumulation=1 "
        "dataset.params.resolution=16 lr_scheduler.params.warmup_length=1 experiment.num_eval_images=2 "
        "experiment.save_every=1 sampling.num_inference_steps=2 system.workers=0 distributed.dist_backend=auto"
    )
    code, said = run(line)
    assert code == errors.DONE, said
    assert steps("out/x") == 2
    assert (Path("out/x/pipeline") / "model_index.json").exists()
    assert len(list(Path("out/x/samples").rglob("*.png"))) == 4  # two at each of two saves
