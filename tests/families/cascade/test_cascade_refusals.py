"""What cannot be, from the command line: refused in words, before anything is trained or drawn."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_cascade import EFFNET, PREVIEWER, RECORDED, write_decoder, write_prior

from daguerre import errors
from daguerre.cli import main


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Bases of both stages, networks of Wuerstchen v2 as a folder and as a file, and images."""
    folder = tmp_path_factory.mktemp("places")
    old = folder / "wuerstchen" / "prior"
    old.mkdir(parents=True)
    (old / "config.json").write_text(json.dumps({"_class_name": "WuerstchenPrior"}))
    (old / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    save_file({"projection.weight": torch.zeros(1), "cond_mapper.0.weight": torch.zeros(1)}, folder / "v2.safetensors")
    names = ("projection.weight", "effnet_mappers.0.weight", "clip_mapper.weight")
    save_file({name: torch.zeros(1) for name in names}, folder / "v2_b.safetensors")
    narrow = load_file(RECORDED / "prior.safetensors")
    narrow["clip_txt_mapper.weight"] = narrow["clip_txt_mapper.weight"][:, :8].contiguous()
    save_file(narrow, folder / "narrow.safetensors")
    found = {"C": write_prior(folder / "c"), "B": write_decoder(folder / "b"), "DIR": folder}
    return {name: str(path) for name, path in found.items()}


def command(places: dict[str, str], text: str) -> list[str]:
    """The words of a command in which CBASE and BBASE are settings of a stage's tiny base."""
    known = {
        "CBASE": f"pretrained_model_name_or_path={places['C']} model.effnet={EFFNET} model.previewer={PREVIEWER}",
        "BBASE": f"pretrained_model_name_or_path={places['B']} model.effnet={EFFNET}",
        "EFFNET": str(EFFNET),
        "RECORDED": str(RECORDED),
        "DIR": places["DIR"],
        "{C}": places["C"],
        "{B}": places["B"],
    }
    for name, value in known.items():
        text = text.replace(name, value)
    return text.split()


TRAIN_C = "train cascade_c data.source=folder data.path=DIR run_name=x output_dir=DIR/runs CBASE"
TRAIN_B = "train cascade_b data.source=folder data.path=DIR run_name=x output_dir=DIR/runs BBASE"
DRAW = "generate cascade_c base=true CBASE prompt=x height=64 width=64"
STAGES = "generate cascade_c base=true pretrained_model_name_or_path={C} model.effnet=EFFNET prompt=x height=64"
STAGES += " width=64 model.decode.name=stages"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{TRAIN_C} model.prior=RECORDED/decoder.safetensors", "holds the weights of Stage B, and model.prior must"),
        (f"{TRAIN_B} model.decoder=RECORDED/prior.safetensors", "holds the weights of Stage C, and model.decoder must"),
        (f"{TRAIN_C} model.prior={{B}}/decoder", "model.prior is Stage B, and must be Stage C"),
        (f"{TRAIN_C} model.effnet=RECORDED/previewer.safetensors", "the previewer, and model.effnet must be"),
        (f"{TRAIN_B} model.vqgan=RECORDED/effnet.safetensors", "must be Stage A"),
        (f"{TRAIN_C} model.prior=DIR/wuerstchen", "a network of Wuerstchen v2"),
        (f"{TRAIN_C} model.prior=DIR/v2.safetensors", "holds Wuerstchen v2's weights"),
        (f"{TRAIN_B} model.decoder=DIR/v2_b.safetensors", "holds Wuerstchen v2's weights"),
        (f"{TRAIN_C} model.prior=DIR/narrow.safetensors", "the width of the text encoder"),
        (f"{TRAIN_C} model.prior=DIR/none.safetensors", "none.safetensors"),
        (f"{TRAIN_C} data.resolution=100 data.buckets.aspects=square", "multiples of 32"),
        (f"{TRAIN_B} data.resolution=100", "multiples of 8"),
        (f"{TRAIN_C} data.buckets.step=16", "multiples of 32"),
        (f"{TRAIN_C} weights_dtype=float16", "bfloat16"),
        (f"{TRAIN_C} mixed_precision=fp16", "bf16"),
        (f"{TRAIN_B} mixed_precision=fp16", "bf16"),
        (f"{TRAIN_B} model.effnet_scale=[1,0.5]", "must rise"),
        (f"{TRAIN_C} adapter.name=lora adapter.ranks.effnet=4", "effnet is not a component"),
        (f"{TRAIN_B} adapter.name=lora adapter.ranks.vqgan=4", "vqgan is not a component"),
        (f"{STAGES} model.decoder=DIR/none model.vqgan={{B}}", "model.decoder: there is no folder 'DIR/none'"),
        (f"{STAGES} model.decoder={{C}} model.vqgan={{B}}", "decoder"),
        (f"{DRAW} height=100 width=64", "multiples of 8"),
        (f"{DRAW} training.mixed_precision=fp16", "bf16"),
        (f"{DRAW} image_prompt=DIR/none.png", "none.png"),
        (f"{DRAW} model.decode.num_inference_steps=5", "decode"),
        (f"{DRAW} model.prior=null", "random"),
        (f"{TRAIN_C} model.size=1B", "the size is that of model.prior, unless that is null: remove it"),
        ("generate RECORDED/prior.safetensors prompt=x", "for model.prior of the recipe cascade_c"),
        ("generate cascade_b base=true BBASE prompt=x height=64 width=64 image_prompt=x.png", "image_prompt"),
    ],
)  # fmt: skip
def test_it_is_refused_in_words(line, said, places, capsys, tmp_path):
    assert main.run([*command(places, line), *([f"out={tmp_path}/o"] if line.startswith("generate") else [])]) == 2
    found = capsys.readouterr().err
    assert said.replace("DIR", places["DIR"]) in found, found
    assert "Traceback" not in found


def test_half_precision_files_are_not_written(places, capsys, tmp_path):
    given = ["convert", "export", places["C"], "format=single_file", f"out={tmp_path / 'half.safetensors'}"]
    assert main.run([*given, "dtype=float16"]) == errors.REFUSED
    assert "choose dtype=bfloat16 or float32" in capsys.readouterr().err
