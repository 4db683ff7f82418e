"""The training configs of Stability's repository, with its values: each is converted, and trains a tiny twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from quick_cases import quick_first
from tiny_cascade import RECORDED
from twins import BESIDE, SHORT, Twins, shards

from daguerre import errors
from daguerre.cli import main
from daguerre.config import recipe

ASPECTS = ["1/1", "1/2", "1/3", "2/3", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "9/16"]
C = {"model_version": "3.6B", "image_size": 768, "multi_aspect_ratio": ASPECTS, "adaptive_loss_weight": True}
C |= {"generator_checkpoint_path": "models/stage_c_bf16.safetensors"}
C |= {"previewer_checkpoint_path": "models/previewer.safetensors"}
SQUARES = {name: value for name, value in C.items() if name not in ("multi_aspect_ratio", "adaptive_loss_weight")}
B = {"model_version": "3B", "image_size": 1024, "adaptive_loss_weight": True, "shift": 4}
B |= {"generator_checkpoint_path": "models/stage_b_bf16.safetensors"}
B |= {"stage_a_checkpoint_path": "models/stage_a.safetensors"}
LORA = {"module_filters": [".attn"], "rank": 4, "train_tokens": [["[fernando]", "^dog</w>"]], "grad_accum_steps": 4}
LITE = {name: f"models/stage_{name}_lite_bf16.safetensors" for name in "bc"}
CONFIGS: dict[str, dict[str, Any]] = {
    "finetune_c_3b": {**C, "batch_size": 512},
    "finetune_c_3b_lowres": {**C, "batch_size": 1024, "image_size": 384},
    "finetune_c_3b_v": {**C, "batch_size": 512, "edm_objective": True},
    "finetune_c_1b": {**SQUARES, "model_version": "1B", "batch_size": 1024, "generator_checkpoint_path": LITE["c"]},
    "finetune_c_3b_lora": {**SQUARES, "multi_aspect_ratio": ASPECTS, "batch_size": 32, "use_fsdp": False, **LORA},
    "finetune_b_3b": {**B, "batch_size": 256},
    "finetune_b_700m": {**B, "model_version": "700M", "batch_size": 512, "generator_checkpoint_path": LITE["b"]},
}
"""What each file says that others do not; none of them has averages."""
COMMON = {"experiment_id": "theirs", "checkpoint_path": "checkpoints", "output_path": "runs", "lr": 1e-4}
COMMON |= {"grad_accum_steps": 1, "updates": 10000, "backup_every": 20000, "save_every": 2000, "warmup_updates": 1}
COMMON |= {"wandb_project": "StableCascade", "wandb_entity": "wandb_username", "use_fsdp": True}
COMMON |= {"webdataset_path": ["s3://bucket/first"], "effnet_checkpoint_path": "models/effnet_encoder.safetensors"}


@pytest.fixture
def converted(tmp_path: Path) -> Any:
    """Converts a config of this name; the recipe's path."""

    def convert(name: str) -> Path:
        theirs, ours = tmp_path / f"{name}.yaml", tmp_path / "ours.yml"
        theirs.write_text(yaml.safe_dump(COMMON | CONFIGS[name]), encoding="utf-8")
        assert main.run(["convert", "config", str(theirs), f"out={ours}", "--all"]) == errors.DONE
        return ours

    return convert


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_converted_whole(name, converted, capsys):
    tree, said = recipe.read(converted(name)), CONFIGS[name]
    stage, printed = "decoder" if "_b_" in name else "prior", capsys.readouterr().out
    assert "not carried over" not in printed
    assert printed.count(f"model.{stage}: ") == 1, "told once, of the key that decides"
    assert tree["model"][stage] == said["generator_checkpoint_path"], "not the published one of that size"
    assert tree["objective"]["name"] == ("v" if name.endswith("_v") else "eps")
    assert tree["objective"]["weighting"]["name"] == ("adaptive" if "adaptive_loss_weight" in said else "p2")
    buckets = {"step": 32, "aspects": ASPECTS, "random": 0.05}
    assert tree["data"].get("buckets") == (buckets if "multi_aspect_ratio" in said else None)
    assert tree["objective"]["schedule"].get("shift", 1) == 1, "Stage B's 4 is never read by their code"
    assert tree["lr_scheduler"]["warmup"] == "0 steps", "the first of their updates has a rate of 0"
    adapters = tree.get("adapters")
    if not name.endswith("_lora"):
        assert adapters is None
    else:
        assert adapters["lora"] == {"name": "lora", "rank": 4, "targets": ["*.to_*"], "alpha": 1.0}
        assert adapters["tokens"] == {"name": "tokens", "tokens": {"[fernando]": {"init_pattern": "^dog</w>"}}}


def test_captions_are_those_of_its_getter(tmp_path):
    """Of a few lines that its files have as remarks."""
    said = {"captions_getter": ["json", "captions_getter"], "dataset_filters": [["score", "lambda s: s > 9.0"]]}
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yml"
    theirs.write_text(yaml.safe_dump(COMMON | CONFIGS["finetune_c_3b_lowres"] | said))
    assert main.run(["convert", "config", str(theirs), f"out={ours}", "--all"]) == errors.DONE
    data = recipe.read(ours)["data"]["sources"]["images"]
    assert data["captions"] == {"fields": ["og_caption", "caption"], "weights": [0.05, 0.95]}
    assert data["filters"] == said["dataset_filters"]


@pytest.mark.parametrize("left", [{}, {"generator_checkpoint_path": None}])
@pytest.mark.parametrize(("name", "size"), [("finetune_c_1b", "1B"), ("finetune_b_3b", "3B")])
def test_one_without_weights_trains_from_random_ones(name, size, left, tmp_path, capsys):
    """As there, not from the published ones of that size."""
    said = {key: value for key, value in CONFIGS[name].items() if key != "generator_checkpoint_path"}
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yml"
    theirs.write_text(yaml.safe_dump(COMMON | said | left))
    assert main.run(["convert", "config", str(theirs), f"out={ours}", "--all"]) == errors.DONE
    model = recipe.read(ours)["model"]
    stage = "decoder" if "_b_" in name else "prior"
    assert (model["family"], model[stage], model["size"]) == (f"cascade_{name[9]}", None, size)
    assert ("starts from random weights" in capsys.readouterr().out) == bool(left)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(tmp_path_factory.mktemp("twins"))


QUICK = "finetune_c_3b_lora"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == QUICK else [pytest.mark.long]) for n in CONFIGS])
def test_a_tiny_twin_trains_two_steps(name, converted, twins, tmp_path):
    kind = "cascade_b" if "_b_" in name else "cascade_c"
    stage = "decoder" if kind == "cascade_b" else "prior"
    shards(tmp_path / "shards", labelled=False)
    given = SHORT | BESIDE[kind] | {f"model.{stage}": RECORDED / f"{stage}.safetensors"}
    given |= {"model.vqgan": twins.pipeline(kind) / "vqgan"} if kind == "cascade_b" else {}
    given |= {"model.pretrained_model_name_or_path": twins.pipeline(kind), "data.path": tmp_path / "shards"}
    given |= {"output_dir": tmp_path, "run_name": "twin", "logging.trackers.wandb": "null", "sampling.num_images": 0}
    given |= {"training.gradient_accumulation_steps": 1, "checkpoint.backup_every": "null"}
    if name.endswith("_lora"):  # words of the tiny vocabulary
        given["adapters.tokens.tokens"] = '{"[fernando]": {init_pattern: "^d"}}'
    del given["sampling.height"], given["sampling.width"]
    said = [f"{path}={value}" for path, value in given.items()]
    assert main.run(["train", str(converted(name)), *said]) == errors.DONE
    assert (tmp_path / "twin" / "report.html").exists()


GENERATING = {
    "model_version": "3.6B",
    "dtype": "bfloat16",
    "effnet_checkpoint_path": "models/effnet_encoder.safetensors",
}
GENERATING |= {"generator_checkpoint_path": "models/stage_c_bf16.safetensors"}
GENERATING |= {"previewer_checkpoint_path": "models/previewer.safetensors"}
BY_B = {"model_version": "3B", "dtype": "bfloat16", "webdataset_path": "file:inference/imagenet_1024.tar"}
BY_B |= {"batch_size": 4, "image_size": 1024, "grad_accum_steps": 1}
BY_B |= {"effnet_checkpoint_path": "models/effnet_encoder.safetensors"}
BY_B |= {"stage_a_checkpoint_path": "models/stage_a.safetensors"}
BY_B |= {"generator_checkpoint_path": "models/stage_b_bf16.safetensors"}
WITH_LORA = {name: LORA[name] for name in ("module_filters", "rank", "train_tokens")}
WITH_LORA |= {"lora_checkpoint_path": "models/lora_fernando_10k.safetensors"}
INFERENCE = {"stage_c_3b": GENERATING, "stage_b_3b": BY_B, "lora_c_3b": GENERATING | WITH_LORA}
"""Of configs/inference."""


@pytest.mark.parametrize("name", quick_first(INFERENCE))
def test_a_config_that_generates_becomes_a_recipe_that_draws(name, twins, tmp_path, capsys):
    """The recipe, and the config itself in its place; Stage B makes the picture again that it is given."""
    theirs, ours = tmp_path / f"{name}.yaml", tmp_path / "ours.yml"
    said = dict(INFERENCE[name])
    if name == "lora_c_3b":  # a LoRA that Stability's code has written, and no words
        said |= {"lora_checkpoint_path": str(RECORDED / "lora_attn.safetensors"), "train_tokens": []}
    theirs.write_text(yaml.safe_dump(said), encoding="utf-8")
    assert main.run(["convert", "config", str(theirs), f"out={ours}", "--all"]) == errors.DONE
    printed = capsys.readouterr().out
    assert "not carried over" not in printed
    wanted = {"stage_b_3b": "image=PICTURE", "lora_c_3b": f"prompt=TEXT use='{{{theirs}: 1}}'"}.get(name, "prompt=TEXT")
    assert f"daguerre generate {ours} {wanted}\n" in printed
    tree, is_b = recipe.read(ours), "_b_" in name
    assert (tree["sampling"]["num_inference_steps"], tree["sampling"]["guidance_scale"]) == (
        (10, 1.1) if is_b else (20, 4.0)
    )
    assert is_b or tree["sampling"]["shift"] == 2.0
    kind = "cascade_b" if is_b else "cascade_c"
    b = twins.pipeline("cascade_b")
    given = {"model.pretrained_model_name_or_path": twins.pipeline(kind), "model.effnet": BESIDE[kind]["model.effnet"]}
    given |= {"model.vqgan": b / "vqgan", "sampling.num_inference_steps": 2, "sampling.batch_size": 1}
    given |= (
        {"model.decoder": RECORDED / "decoder.safetensors"} if is_b else {"model.prior": RECORDED / "prior.safetensors"}
    )
    given |= {} if is_b else {"model.decoder": b, "model.decode.num_inference_steps": 2, "height": 64, "width": 64}
    picture = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(picture)
    asked = [f"image={picture}"] if is_b else ["prompt=a fox"]
    asked += [f"use={{{theirs}: 1}}"] if name == "lora_c_3b" else []
    overrides = [f"{path}={value}" for path, value in given.items()]
    for place in (ours, theirs) if name == "stage_c_3b" else (ours,):
        assert main.run(["generate", str(place), *asked, *overrides, f"out={tmp_path / place.stem}"]) == errors.DONE
    (drawn,) = (tmp_path / "ours").glob("*.png")
    printed = capsys.readouterr().out
    assert ("layers of prior" in printed) == (name == "lora_c_3b")
    if is_b:
        document = json.loads(drawn.with_suffix(".json").read_text())
        pixels = [np.asarray(Image.open(path)).astype(float) for path in (drawn, picture)]
        assert pixels[0].shape == pixels[1].shape, "of the picture's size"
        error = np.square(pixels[0] - pixels[1]).mean()
        assert document["psnr"] == pytest.approx(10 * np.log10(255**2 / error))
        assert f"reconstruction: PSNR {document['psnr']:.2f} dB, SSIM {document['ssim']:.3f}" in printed
        assert "strength" not in document


def test_stage_b_is_told_the_picture_and_starts_from_it_where_a_strength_is_given(twins, tmp_path, capsys):
    """Another picture is another result from the same noise; the scale at which it is compressed acts."""
    b, results = twins.pipeline("cascade_b"), {}
    for number in range(2):
        noise = np.random.default_rng(number).integers(0, 256, (128, 128, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
    for name, image, *more in (
        ("first", 0), ("second", 1), ("coarse", 0, "model.reconstruction_scale=0.5"), ("started", 0, "strength=0.5"),
    ):  # fmt: skip
        given = [f"image={tmp_path / f'{image}.png'}", f"model.effnet={BESIDE['cascade_b']['model.effnet']}", *more]
        given += ["num_inference_steps=2", "guidance_scale=1"]
        assert main.run(["generate", str(b), *given, f"out={tmp_path / name}"]) == errors.DONE
        (path,) = (tmp_path / name).glob("*.png")
        results[name] = np.asarray(Image.open(path)).astype(int)
        assert ("reconstruction: PSNR" in capsys.readouterr().out) == (name != "started")
    assert all(np.abs(results["first"] - results[other]).max() > 1 for other in ("second", "coarse", "started"))
