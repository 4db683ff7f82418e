"""Files of one autoencoder in the names of programs: each gives the same weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor

from daguerre.families.stable_diffusion.single_file import keys, load

Tensors = dict[str, Tensor]
OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
MIXED = {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0", "norm": "group_norm"}


def before(start: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {start + name: value for name, value in tensors.items()}


def respelt(names: dict[str, str], stem: str) -> Callable[[Tensors], Tensors]:
    pattern = re.compile(rf"({stem}\.)({'|'.join(map(re.escape, names))})\.")
    return lambda tensors: {pattern.sub(lambda m: f"{m[1]}{names[m[2]]}.", name): v for name, v in tensors.items()}


STARTS = (
    "",
    "vae.",
    "first_stage_model.",
    "model.",
    "model.vae.",
    "model.first_stage_model.",
    "autoencoder.",
    "module.",
)
CHANGES = {
    "as it is": before(""),
    "older attention": respelt(OLD, r"attentions\.0"),
    "diffusers' attention": respelt(MIXED, r"attn_1"),
    "matrices": lambda t: {name: v[..., 0, 0] if "attn_1" in name and v.dim() == 4 else v for name, v in t.items()},
    "a loss beside it": lambda t: {**t, "loss.logvar": torch.zeros(())},
}
PLACES = [(original, change) for original in (False, True) for change in CHANGES if original or "loss" not in change]


@pytest.fixture(scope="module")
def vae() -> Tensors:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    network = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, **blocks)
    return dict(network.state_dict())


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("original", "change"), PLACES)
def test_each_gives_the_same_weights(original, change, start, vae, tmp_path):
    tensors = vae
    if original:
        links = keys.vae(vae)
        tensors = {link.original: vae[link.names[0]][..., None, None] if link.form == "convolution"
                   else vae[link.names[0]] for link in links}  # fmt: skip
    made = before(start)(CHANGES[change](tensors))
    save_file({name: value.contiguous() for name, value in made.items()}, tmp_path / "vae.safetensors")
    found = load.network_tensors(tmp_path / "vae.safetensors", "vae", [*vae], False)
    assert found.keys() == vae.keys()
    assert all(torch.equal(found[name].flatten(), value.flatten()) for name, value in vae.items())


def test_a_text_encoder_is_none(tmp_path):
    """Whose names begin like those of an autoencoder."""
    names = ["encoder.layers.0.mlp.fc1.weight", "final_layer_norm.weight"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "text.safetensors")
    found: dict[str, Tensor] = load.network_tensors(Path(tmp_path / "text.safetensors"), "text_encoder", names, False)
    assert found.keys() == {*names}
