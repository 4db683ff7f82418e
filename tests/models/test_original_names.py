"""Names of authors' files: each family's table against diffusers' converter, and the round trip to the bit."""

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import single_file_utils

from daguerre.checkpoint.safetensors import Later
from daguerre.errors import UserError
from daguerre.models.parts.flux_names import FLUX
from daguerre.models.weights.original_names import NameTable, original_shape, packed, unpacked

TINY = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "in_channels": 4}
TINY |= {"joint_attention_dim": 8, "pooled_projection_dim": 8, "guidance_embeds": True, "axes_dims_rope": (4, 6, 6)}


def original(table: NameTable, network: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {link.original: packed(link, network, None) for link in table.links(network)}
    return {name: each.make() if isinstance(each, Later) else each for name, each in made.items()}


def flux() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(value) for name, value in FluxTransformer2DModel(**TINY).state_dict().items()}


def test_reading_is_the_inverse_of_writing():
    network, names = flux(), FLUX
    shapes = {name: tuple(value.shape) for name, value in network.items()}
    file = original(names, network)
    assert all(tuple(file[link.original].shape) == original_shape(link, shapes) for link in names.links(network))
    back = {n: v for link in names.links(network) for n, v in unpacked(link, file[link.original], shapes).items()}
    assert back.keys() == network.keys()
    assert all(torch.equal(back[name], value) for name, value in network.items())


def test_diffusers_converter_reads_the_file_as_the_same_network(monkeypatch):
    network = flux()
    file = {f"model.diffusion_model.{name}": value for name, value in original(FLUX, network).items()}
    split = torch.split  # the converter has the published widths written into it
    monkeypatch.setattr(torch, "split", lambda value, sizes, dim: split(value, [32, 32, 32, 128], dim))
    theirs = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers(file)
    assert theirs.keys() == network.keys()
    assert all(torch.equal(theirs[name], value) for name, value in network.items())


def test_an_unknown_layer_is_named():
    with pytest.raises(UserError, match=r"no name for transformer_blocks\.0\.more\.weight"):
        FLUX.links(["transformer_blocks.0.more.weight"])
