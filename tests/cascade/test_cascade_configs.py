"""The training configs of Stability's repository, with its values: each is converted, and trains a tiny twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
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
        assert main.run(["convert", "config", str(theirs), f"out={ours}"]) == errors.DONE
        return ours

    return convert


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_converted_whole(name, converted, capsys):
    tree, said = recipe.read(converted(name)), CONFIGS[name]
    assert "not carried over" not in capsys.readouterr().out
    stage = "decoder" if "_b_" in name else "prior"
    assert tree["model"][stage] == said["generator_checkpoint_path"], "not the published one of that size"
    assert tree["objective"]["name"] == ("v" if name.endswith("_v") else "eps")
    assert tree["objective"]["weighting"]["name"] == ("adaptive" if "adaptive_loss_weight" in said else "p2")
    assert tree["data"].get("buckets") == ({"step": 32, "aspects": ASPECTS} if "multi_aspect_ratio" in said else None)
    assert tree["objective"]["schedule"].get("shift", 1) == 1, "Stage B's 4 is never read by their code"
    adapters = tree.get("adapters")
    if not name.endswith("_lora"):
        assert adapters is None
    else:
        assert adapters["lora"] == {"name": "lora", "rank": 4, "targets": ["*.to_*"], "alpha": 1.0}
        assert adapters["tokens"] == {"name": "tokens", "tokens": {"[fernando]": {"init_pattern": "^dog</w>"}}}


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
