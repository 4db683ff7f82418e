"""Files of whole models: no number in them is NaN or infinite, and their header has the digest of their tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import write_sd

from daguerre import errors
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import load, save
from daguerre.models.export import diffusers as export
from daguerre.models.weights import files, original_files, seals
from daguerre.models.weights import load as weights_load
from daguerre.models.weights.original_names import PrefixedNames

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny pipeline, and the same as one file."""
    place = tmp_path_factory.mktemp("model")
    folder = write_sd(place / "folder")
    save.write(place / "model.safetensors", folder)
    return folder, place / "model.safetensors"


def spoilt(source: Path, target: Path, name: str, number: float) -> None:
    """A copy in which one number of one tensor is another one, under a header of no program."""
    tensors = load_file(source)
    tensors[name].view(-1)[-1] = number
    save_file(tensors, target, {"format": "pt"})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("verb", ["model", "merge", "extract", "single_file", "diffusers", "unet", "pickled"])
def test_numbers_that_are_not_finite_are_never_written(verb: str, number: float, model: Any, tmp_path: Path, capsys):
    folder, _ = model
    spoilt_folder = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt_folder)
    spoilt(folder / UNET, spoilt_folder / UNET, "conv_in.bias", number)
    out = tmp_path / "out"
    given = {
        "model": ["model", tmp_path / "x.safetensors", f"out={out}", "prediction_type=epsilon"],
        "merge": ["merge", spoilt_folder, f"use={{{tmp_path / 'lora.safetensors'}: 1}}", f"out={out}"],
        "extract": ["extract", spoilt_folder, f"base={folder}", "rank=1", f"out={out}.safetensors"],
        "single_file": ["export", spoilt_folder, "format=single_file", f"out={out}.safetensors"],
        "diffusers": ["export", spoilt_folder, "format=diffusers", f"out={out}", "dtype=float16"],
        "unet": ["export", spoilt_folder, "format=unet", f"out={out}.safetensors", "dtype=bfloat16"],
        "pickled": ["model", tmp_path / "old", f"out={out}", "pickled_weights=true"],
    }[verb]
    if verb == "model":
        whole = load_file(model[1])
        whole["model.diffusion_model.input_blocks.0.0.bias"][0] = number
        with safe_open(model[1], "pt") as file:
            save_file(whole, tmp_path / "x.safetensors", {"daguerre.model": file.metadata()["daguerre.model"]})
    elif verb == "merge":
        wide = load_file(folder / UNET)["conv_in.weight"].shape
        factors = {"lora_down.weight": torch.ones(1, *wide[1:]), "lora_up.weight": torch.ones(wide[0], 1, 1, 1)}
        save_file({f"lora_unet_conv_in.{k}": v for k, v in factors.items()}, tmp_path / "lora.safetensors")
    elif verb == "pickled":
        (tmp_path / "old" / "unet").mkdir(parents=True)
        shutil.copy(folder / "unet" / "config.json", tmp_path / "old" / "unet")
        weights = load_file(spoilt_folder / UNET)
        torch.save(weights, tmp_path / "old" / "unet" / "diffusion_pytorch_model.bin")
    before = {path.name for path in tmp_path.iterdir()}
    assert main.run(["convert", *map(str, given)]) == errors.REFUSED
    said = capsys.readouterr().err
    assert "NaN or infinity in it" in said
    assert "conv_in.bias" in said or "input_blocks.0.0.bias" in said
    assert {path.name for path in tmp_path.iterdir()} == before


def test_other_types_of_numbers_and_empty_tensors_are_written(tmp_path: Path):
    eight = torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn)
    tensors = {"mark": torch.empty(0), "ids": torch.arange(3), "eight": eight, "flag": torch.tensor(True)}
    seals.write(tmp_path / "x.safetensors", tensors, {"modelspec.title": "x"})
    seals.check(tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in tensors.items()}
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert (file.metadata()["modelspec.title"], file.metadata()["format"]) == ("x", "pt")
    nan = {"eight": torch.tensor([float("nan")]).to(torch.float8_e4m3fn)}
    with pytest.raises(UserError, match="eight has NaN or infinity in it"):
        seals.write(tmp_path / "y.safetensors", nan)


def flipped(path: Path, seed: int) -> None:
    """One bit of its tensors is another one."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    bit = int(np.random.default_rng(seed).integers(8 * start, 8 * len(data)))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("reader", ["folder", "shards", "single file", "one network", "network file"])
def test_a_flipped_bit_is_found_by_every_reader(reader: str, model: Any, tmp_path: Path):
    """Of what is written by `convert` and by exports of runs."""
    folder, file = model
    network = load_unet(folder)
    made = tmp_path / "made"
    if reader in ("folder", "shards"):
        export.save(network, made)
        damaged = made / Path(UNET).name
        if reader == "shards":  # as the library cuts networks of more than 10 GB
            half = load_file(damaged)
            names = sorted(half)
            for i, own in enumerate((names[::2], names[1::2])):
                part = made / f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors"
                save_file({name: half[name] for name in own}, part)
                seals.seal(part)
            where = {n: f"diffusion_pytorch_model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
            index = made / "diffusion_pytorch_model.safetensors.index.json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
            damaged.unlink()
            damaged = part
        reads = [lambda: load_unet(made.parent, "made"), lambda: files.read(made)]
    elif reader == "network file":
        damaged = tmp_path / "unet.safetensors"
        assert main.run(["convert", "export", str(folder), "format=unet", f"out={damaged}"]) == errors.DONE
        weights = files.read(folder / "unet")
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        reads = [lambda: original_files.read(damaged, PrefixedNames(("",)), shapes)]
    else:
        damaged = tmp_path / "whole.safetensors"
        shutil.copy(file, damaged)
        names = load_unet(folder).state_dict()
        one = [lambda: load.network_tensors(damaged, "unet", names, pickled=False)]
        reads = one if reader == "one network" else [lambda: load.folder(damaged, pickled=False)]
    for read in reads:
        assert read()
    for seed in range(4):
        good = damaged.read_bytes()
        flipped(damaged, seed)
        for read in reads:
            with pytest.raises(UserError, match="is damaged: its tensors are not those"):
                read()
        damaged.write_bytes(good)
    assert all(read() for read in reads)


def load_unet(folder: Path, name: str = "unet") -> Any:
    return weights_load.load(UNet2DConditionModel, folder / name)


def test_a_file_that_another_program_wrote_again_under_our_header_is_read(model: Any, tmp_path: Path):
    """Its tensors are others by name, type or shape: pruned, cast, or with averages beside them."""
    with safe_open(model[1], "pt") as file:
        header = file.metadata()
    whole = load_file(model[1])
    for i, tensors in enumerate((whole | {"model_ema.decay": torch.ones(())}, {n: v.half() for n, v in whole.items()})):
        save_file(tensors, tmp_path / f"{i}.safetensors", header)
        seals.check(tmp_path / f"{i}.safetensors")
