"""LoRAs of Stage C and Stage B: files that Stability's own code has written, ComfyUI's names, what is refused."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cascade_networks import loaded
from tiny_cascade import stage_b, stage_c, write_decoder, write_prior
from torch import nn

from daguerre.build.parts import build
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.models.lora_files import forms, read
from daguerre.models.lora_files.addition import KOHYA_FILE

HERE = Path(__file__).parent
DIGESTS = {
    "lora_attn.safetensors": "3e7f23d1d85cf990",
    "lora_more.safetensors": "8ed718e11df5ebb7",
    "lora.npz": "ada610b4c4dcb7f5",
}


def added(network: nn.Module, file: Path) -> None:
    """Puts a file's additions into the weights of a network."""
    for each in read.read(file, {"prior": network})["prior"]:
        weight: Any = network.get_submodule(each.layer).weight
        weight.data.copy_(each.weight(weight.data))


def test_files_are_those_that_were_recorded():
    assert {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:16] for name in DIGESTS} == DIGESTS


@torch.no_grad()
@pytest.mark.parametrize("name", ["attn", "more"])
def test_a_numbered_file_has_the_effect_that_it_has_in_stabilitys_code(name):
    network, r = loaded("prior"), torch.tensor([0.2, 0.9])
    with np.load(HERE / "stability.npz") as file:
        given = [torch.from_numpy(file[f"given/{part}"]) for part in ("x_c", "pooled", "text", "image")]
    before = network(given[0], r, *given[1:]).sample
    added(network, HERE / f"lora_{name}.safetensors")
    wanted = torch.from_numpy(np.load(HERE / "lora.npz")[name])
    found = network(given[0], r, *given[1:]).sample
    assert (wanted - before).abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("form", ["kohya", "diffusers", "peft"])
def test_a_numbered_file_is_converted_to_names(form, tmp_path):
    networks = {"prior": loaded("prior")}
    additions = read.read(HERE / "lora_attn.safetensors", networks)
    forms.write(form, tmp_path / "named.safetensors", networks, additions)  # reads back what it has written
    assert len(additions["prior"]) == 4 * 6, "q, k, v and the output of the attention of six blocks"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda t: t | {"embeddings.embeddings": torch.ones(1, 1280), "embeddings.indices": torch.tensor([49408])},
         r"trained words .*49408.* only in the YAML"),
        (lambda t: {name: value for name, value in t.items() if "weights.3." not in name}, "layers are missing"),
        (lambda t: {name: value for name, value in t.items() if int((re.findall(r"\d+", name) or ["9"])[0]) < 4},
         "numbers its 4 layers without their names"),
    ],
)  # fmt: skip
def test_what_a_numbered_file_does_not_say_is_refused(changed, said, tmp_path):
    tensors = changed(load_file(HERE / "lora_attn.safetensors"))
    save_file(tensors, tmp_path / "theirs.safetensors")
    with pytest.raises(UserError, match=said):
        read.read(tmp_path / "theirs.safetensors", {"prior": loaded("prior")})


def test_a_numbered_file_is_refused_by_other_models():
    with pytest.raises(UserError, match="a LoRA for Stage C of Stable Cascade, which this model is not"):
        read.read(HERE / "lora_attn.safetensors", {"unet": nn.Linear(2, 2)})


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bases")
    return {"prior": stage_c(write_prior(folder / "c")), "decoder": stage_b(write_decoder(folder / "b"))}


def config(model: dict[str, Any], *given: str) -> configs.Config:
    tree = {
        "run_name": "x",
        "model": model,
        "objective": {"name": "eps", "schedule": {"name": "cosine"}},
        "data": {"source": "folder", "path": ".", "resolution": 32},
        "training": {"duration": "1 steps", "global_batch_size": 1},
    }
    return configs.load("lora", ["adapter.name=lora", "adapter.rank=2", *given], whole=tree).config


@pytest.mark.parametrize("component", ["prior", "decoder"])
def test_names_are_comfyuis(component, bases, tmp_path):
    """Its rule: the names of Stability's file, attention's fused product as to_q, to_k, to_v, dots as underscores."""
    layers = "to_q, to_k, to_v, to_out.0, clip_txt_pooled_mapper, q_proj, k_proj, v_proj, out_proj"
    own = [f"adapter.targets=[{layers}]", "adapter.ranks.text_encoder=2"]
    parts = build(config(bases[component], *own), torch.device("cpu"))
    parts.attached.export(tmp_path / "out", parts.objective, None)
    there = {name.rpartition(".lora_")[0] for name in load_file(tmp_path / "out" / KOHYA_FILE) if ".lora_" in name}
    recorded = [name.removesuffix(".weight") for name in load_file(HERE / f"{component}.safetensors")]
    theirs = {
        f"{'lora_prior_unet' if component == 'prior' else 'lora_unet'}_{layer.replace('.', '_')}"
        for name in recorded
        for layer in [name.replace("in_proj_weight", part) for part in ("to_q", "to_k", "to_v")]
    }
    texts = {name for name in there if name.startswith("lora_prior_te_text_model_encoder_layers_")}
    assert len(texts) == 2 * 4
    assert there - texts
    blocks = {re.sub(r"_blocks_\d+_\d+_", "_blocks_N_N_", name) for name in theirs}
    assert {re.sub(r"_blocks_\d+_\d+_", "_blocks_N_N_", name) for name in there - texts} <= blocks


@pytest.mark.parametrize(("component", "frozen"), [("prior", "effnet"), ("decoder", "vqgan"), ("decoder", "effnet")])
def test_what_makes_latents_has_no_adapter(component, frozen, bases):
    with pytest.raises(UserError, match=rf"{frozen} is not a component .* it reads or makes images"):
        config(bases[component], f"adapter.ranks.{frozen}=2")
