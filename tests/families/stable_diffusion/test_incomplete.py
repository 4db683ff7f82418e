"""Checkpoints that lack a network, which is given from another place; folders of variants in the verbs of convert."""

import json
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from quick_cases import quick_where
from safetensors.torch import load_file, save_file
from tiny_models import write_sdxl

from daguerre import errors
from daguerre.cli import main
from daguerre.cli.convert import export, extract, merge
from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import configs, save


@pytest.fixture(scope="module")
def xl(tmp_path_factory):
    """A tiny SDXL, and files without some of its networks, and of these alone."""
    place = tmp_path_factory.mktemp("xl")
    folder = write_sdxl(place / "folder")
    save.write(place / "whole.safetensors", folder)
    tensors = load_file(place / "whole.safetensors")
    for name, prefix in (("vae", "first_stage_model."), ("text_encoder", "conditioner.embedders.0.")):
        own = {key: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        save_file(own, place / f"{name}.safetensors")
        save_file({key: tensors[key] for key in tensors.keys() - own.keys()}, place / f"without_{name}.safetensors")
    return folder


@pytest.fixture
def published(xl, monkeypatch):
    """The tiny model as if its numbers were published."""
    pipeline = replace(save._read_configs(xl), tokenizers={})

    def of_architecture(name, wanted):
        return replace(pipeline, configs={part: own for part, own in pipeline.configs.items() if part in wanted})

    monkeypatch.setattr(configs, "of_architecture", of_architecture)


def drawn(place, *given):
    arguments = ["prompt=a cat", "num_inference_steps=2", "training.device=cpu", "seed=3", "resolution=16"]
    out = place / f"{len(list(place.iterdir()))}"
    assert main.run(["generate", *map(str, given), *arguments, f"out={out}"]) == errors.DONE
    return np.asarray(Image.open(next(out.glob("*.png"))))


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "part"),
    quick_where(("file", "vae").__eq__, product(["file", "folder"], ["vae", "text_encoder"])),
)
def test_a_file_without_a_network_opens_beside_one(xl, published, tmp_path, capsys, part, source):
    file = xl.parent / f"without_{part}.safetensors"
    words = [f"model.{name}={xl / name}" for name in ("tokenizer", "tokenizer_2")]
    place = xl.parent / f"{part}.safetensors" if source == "file" else xl / part
    found = drawn(tmp_path, file, *words, f"model.{part}={place}")
    assert np.array_equal(found, drawn(tmp_path, xl))
    capsys.readouterr()
    assert main.run(["generate", str(file), *words, "prompt=a"]) == errors.REFUSED
    said = capsys.readouterr().err
    assert f"lacks {part}/" in said
    assert f"or give model.{part}=PLACE" in said


@pytest.mark.long
def test_a_folder_without_an_autoencoder_opens_beside_one(xl, tmp_path):
    folder = shutil.copytree(xl, tmp_path / "copy")
    shutil.move(folder / "vae", tmp_path / "vae")
    assert np.array_equal(drawn(tmp_path, folder, f"model.vae={tmp_path / 'vae'}"), drawn(tmp_path, xl))


@pytest.fixture
def half(xl, tmp_path):
    """All networks but the autoencoder in float16 files of their own."""
    folder = shutil.copytree(xl, tmp_path / "half")
    for path in list(folder.glob("*/*.safetensors")):
        if path.parent.name != "vae":
            tensors = {name: tensor.half() for name, tensor in load_file(path).items()}
            save_file(tensors, path.with_name(path.name.replace(".safetensors", ".fp16.safetensors")))
            path.unlink()
    return folder


@pytest.mark.long
def test_the_verbs_of_convert_choose_the_variant_for_each_network(xl, half, tmp_path):
    out = f"out={tmp_path / 'out.safetensors'}"
    for arguments in (["format=single_file"], ["format=unet"]):
        with pytest.raises(UserError, match="has the variant fp16: set variant=fp16"):
            export.run([str(half), *arguments, out])
    with pytest.raises(UserError, match="it has the variants: fp16"):
        export.run([str(half), "format=single_file", "variant=bf16", out])
    assert export.run([str(half), "format=single_file", "variant=fp16", out]) == 0
    tensors = load_file(tmp_path / "out.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("first_stage")} == {torch.float32}
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("model.")} == {torch.float16}
    extracted = f"out={tmp_path / 'lora.safetensors'}"
    with pytest.raises(UserError, match="set variant=fp16"):
        extract.run([str(half), f"base={xl}", "rank=1", extracted])
    with pytest.raises(UserError, match="nothing to extract"):
        extract.run([str(half), f"base={xl}", "rank=1", "variant=fp16", extracted])
    lora = tmp_path / "own.safetensors"
    layer = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
    save_file({f"{layer}.lora_up.weight": torch.ones(64, 1), f"{layer}.lora_down.weight": torch.ones(1, 64)}, lora)
    use = "use=" + json.dumps({str(lora): 1})
    with pytest.raises(UserError, match="set variant=fp16"):
        merge.run([str(half), use, f"out={tmp_path / 'merged'}"])
    assert merge.run([str(half), use, "variant=fp16", f"out={tmp_path / 'merged'}"]) == 0
    made = tmp_path / "merged"
    assert (made / "unet" / "diffusion_pytorch_model.safetensors").is_file()
    assert (made / "vae" / "diffusion_pytorch_model.safetensors").is_file()
    assert main.run(["generate", str(made), "prompt=a", "num_inference_steps=1", f"out={tmp_path / 'image'}"]) == 0
