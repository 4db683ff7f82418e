"""Stable Cascade's networks against Stability's own code, whose files and outputs record_stability.py has recorded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableCascadeUNet
from diffusers.loaders.single_file_utils import convert_stable_cascade_unet_single_file_to_diffusers
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from safetensors.torch import load_file, save_file
from torch import nn

from daguerre.errors import UserError
from daguerre.families.cascade import files, initial, keys, sizes
from daguerre.families.cascade.efficientnet import EfficientNetEncoder
from daguerre.families.cascade.previewer import Previewer

HERE = Path(__file__).parent
DIGESTS = {
    "decoder.safetensors": "49b100d388d0c9de",
    "effnet.safetensors": "661f5cef611427bc",
    "previewer.safetensors": "1dd3db1a64cfbdf3",
    "prior.safetensors": "30ea71028b021f6d",
    "stability.npz": "340d842d4cf33672",
    "vqgan.safetensors": "d4b2dcd059db057c",
}
EFFNET = {
    "stem_channels": 8,
    "feature_channels": 32,
    "stages": (
        ("fused", 1, 1, 8, 1), ("fused", 4, 2, 8, 2), ("fused", 4, 2, 16, 1),
        ("separable", 4, 2, 16, 2), ("separable", 6, 1, 16, 1), ("separable", 6, 2, 24, 1),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    with np.load(HERE / "stability.npz") as file:
        return {
            name: torch.from_numpy(file[name]) if file[name].dtype.kind == "f" else str(file[name]) for name in file
        }


def loaded(component: str) -> Any:
    """The network of a recorded file, in evaluation mode."""
    path = HERE / f"{component}.safetensors"
    tensors = files.read(path, component)
    if component in ("prior", "decoder"):
        network: Any = StableCascadeUNet(**sizes.told(files.shapes(path, component)))
    elif component == "vqgan":
        network = PaellaVQModel(embed_dim=16, bottleneck_blocks=2, num_vq_embeddings=8, scale_factor=0.43)
    else:
        network = EfficientNetEncoder(**EFFNET) if component == "effnet" else Previewer(16, 16)
    network.load_state_dict(tensors)
    return network.eval()


def test_files_are_those_that_were_recorded():
    found = {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:16] for name in DIGESTS}
    assert found == DIGESTS


class TestOutputs:
    """Of weights that came through the table of names. Stability's attention is another kernel: not the last bit."""

    r = torch.tensor([0.2, 0.9])

    @torch.no_grad()
    def test_of_stage_c(self, recorded: dict[str, Any]):
        given = {name: recorded[f"given/{name}"] for name in ("text", "pooled", "image", "x_c")}
        found = loaded("prior")(given["x_c"], self.r, given["pooled"], given["text"], given["image"]).sample
        torch.testing.assert_close(found, recorded["made/prior"], rtol=1e-5, atol=2e-5)
        assert found.std() > 0.2

    @torch.no_grad()
    def test_of_stage_b(self, recorded: dict[str, Any]):
        pooled, latent = recorded["given/pooled"], recorded["given/latent"]
        found = loaded("decoder")(recorded["given/x_b"], self.r, pooled, effnet=latent).sample
        torch.testing.assert_close(found, recorded["made/decoder"], rtol=1e-5, atol=2e-5)

    @torch.no_grad()
    def test_of_stage_a(self, recorded: dict[str, Any]):
        vqgan = loaded("vqgan")
        encoded = vqgan.encode(recorded["given/pixels"], return_dict=False)[0] / 0.43
        torch.testing.assert_close(encoded, recorded["made/encoded"], rtol=1e-6, atol=1e-6)
        decoded = vqgan.decode(0.43 * recorded["made/encoded"], return_dict=False)[0]
        torch.testing.assert_close(decoded, recorded["made/decoded"], rtol=1e-6, atol=1e-6)

    @torch.no_grad()
    def test_of_the_encoder_and_the_previewer(self, recorded: dict[str, Any]):
        found = loaded("effnet")(recorded["given/effnet_in"])
        torch.testing.assert_close(found, recorded["made/effnet"], rtol=1e-5, atol=1e-5)
        found = loaded("previewer")(recorded["given/latent"])
        torch.testing.assert_close(found, recorded["made/previewed"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("component", keys.STAGES)
def test_a_file_is_written_as_it_was_read(component: str, tmp_path: Path):
    """Both ways, to the bit; and by way of diffusers' network."""
    theirs = HERE / f"{component}.safetensors"
    network = loaded(component)
    files.write(tmp_path / "again.safetensors", network.state_dict())
    before, after = load_file(theirs), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    network.save_pretrained(tmp_path / component)
    assert files.read(theirs, component).keys() == network.state_dict().keys()
    again = type(network).from_pretrained(tmp_path / component)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("component", ["prior", "decoder"])
def test_names_are_those_of_diffusers_converter(component: str):
    tensors = load_file(HERE / f"{component}.safetensors")
    theirs = convert_stable_cascade_unet_single_file_to_diffusers(tensors)
    ours = files.read(HERE / f"{component}.safetensors", component)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.items())


@torch.no_grad()
def test_heads_are_in_the_order_of_a_fused_projection():
    torch.manual_seed(0)
    fused = nn.MultiheadAttention(128, 2, bias=True, batch_first=True)
    fused.in_proj_bias.normal_()
    network = StableCascadeUNet(
        **sizes.STAGE_C["1B"] | {"block_out_channels": [128] * 2, "conditioning_dim": 64, "num_attention_heads": [2, 2]}
        | {"down_num_layers_per_block": [1, 1], "up_num_layers_per_block": [1, 1]}
    )  # fmt: skip
    attention = network.eval().down_blocks[0][2].attention
    named = {f"x.attention.attn.{name}": value for name, value in fused.state_dict().items()}
    own = keys.own_names(named)
    parts = {n: p for name, value in named.items() for n, p in zip(own[name], value.chunk(len(own[name])), strict=True)}
    attention.load_state_dict({name.removeprefix("x.attention."): value for name, value in parts.items()})
    x, context = torch.randn(2, 5, 128), torch.randn(2, 7, 128)
    wanted = fused(x, context, context, need_weights=False)[0]
    torch.testing.assert_close(attention(x, encoder_hidden_states=context), wanted, rtol=1e-5, atol=1e-5)


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


@pytest.mark.long  # of the quick tests, models/test_architectures.py
def test_published_sizes():
    counts = {"3.6B": 3589.1, "1B": 1030.8, "3B": 1562.9, "700M": 699.5}
    for size, numbers in {**sizes.STAGE_C, **sizes.STAGE_B}.items():
        with torch.device("meta"):
            network = StableCascadeUNet(**numbers)
        assert round(sum(p.numel() for p in network.parameters()) / 1e6, 1) == counts[size]
        told = sizes.told({name: tuple(value.shape) for name, value in network.state_dict().items()})
        with torch.device("meta"):
            again = StableCascadeUNet(**told)
        shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (network, again)]
        assert shapes[0] == shapes[1]
        differs = {name for name in told if [*_listed(again.config[name])] != [*_listed(network.config[name])]}
        assert differs <= {"num_attention_heads"}  # 700M has nine heads at a level without attention


def test_names_and_shapes_of_the_published_encoder(recorded: dict[str, Any]):
    """As torchvision builds it in Stability's class: 81.5 MB with the header."""
    with torch.device("meta"):
        state = EfficientNetEncoder().state_dict()
    assert "\n".join(f"{name} {tuple(value.shape)}" for name, value in state.items()) == recorded["effnet_names"]
    assert round(sum(value.numel() * value.element_size() for value in state.values()) / 1e6, 1) == 81.4
    with torch.device("meta"):
        assert 15.9e6 < sum(v.numel() * 4 for v in Previewer().state_dict().values()) < 16e6


class TestInitial:
    @pytest.mark.parametrize("stage", ["c", "b"])
    def test_weights_are_drawn_as_stability_draws_them(self, stage: str, recorded: dict[str, Any]):
        spreads = dict(line.split() for line in recorded[f"fresh_{stage}"].splitlines())
        own = {names: float(spreads[name]) for name, names in keys.own_names(spreads).items()}
        component = "prior" if stage == "c" else "decoder"
        shapes = files.shapes(HERE / f"{component}.safetensors", component)
        small = sizes.told(shapes)
        widths = [64, 64] if stage == "c" else [32, 64, 64, 64]
        torch.manual_seed(1)
        numbers = small | {"block_out_channels": widths, "conditioning_dim": 64}
        network = initial.initialise(StableCascadeUNet(**numbers))
        state = network.state_dict()
        assert {name for names in own for name in names} == state.keys()
        for names, spread in own.items():
            value = torch.cat([state[name] for name in names]).double()
            if value.numel() >= 1000 or spread == 0:
                assert value.std(correction=0).item() == pytest.approx(spread, rel=0.08), names

    @torch.no_grad()
    def test_the_first_prediction_is_zero(self, recorded: dict[str, Any]):
        """diffusers' own initial weights give something else."""
        numbers = sizes.told(files.shapes(HERE / "prior.safetensors", "prior"))
        given = [recorded[f"given/{name}"] for name in ("pooled", "text", "image")]
        x, r = recorded["given/x_c"], torch.tensor([0.2, 0.9])
        network = StableCascadeUNet(**numbers).eval()
        assert network(x, r, *given).sample.abs().max() > 0
        assert torch.equal(initial.initialise(network)(x, r, *given).sample, torch.zeros_like(x))

    def test_of_stage_a(self):
        torch.manual_seed(0)
        vqgan = initial.initialise_stage_a(PaellaVQModel(embed_dim=64, bottleneck_blocks=1, num_vq_embeddings=8))
        weight = vqgan.down_blocks[2].channelwise[0].weight
        assert weight.std().item() == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.05)
        assert vqgan.down_blocks[2].gammas.abs().max() == 0


class TestRefused:
    """What people have in their folders, by name."""

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["effnet_mapper.0.weight", "clip_mapper.weight"], "the weights of Stage B"),
            (["projection.weight", "cond_mapper.0.weight", "blocks.0.channelwise.0.weight"], "Wuerstchen v2"),
            (["effnet_mappers.0.weight", "clip_mapper.weight"], "Wuerstchen v2"),
            (["weights.0.lora_down", "embeddings.indices"], "a LoRA"),
            (["model.diffusion_model.input_blocks.0.0.weight"], "a UNet of Stable Diffusion"),
            (["something.weight"], "1 tensors such as something.weight"),
        ],
    )
    def test_files_of_something_else(self, names: list[str], message: str, tmp_path: Path):
        save_file({name: torch.zeros(1) for name in names}, tmp_path / "file.safetensors")
        for call in (files.read, files.shapes):
            with pytest.raises(UserError, match=message):
                call(tmp_path / "file.safetensors", "prior")

    def test_float16(self, tmp_path: Path):
        with pytest.raises(UserError, match="bfloat16"):
            files.write(tmp_path / "half.safetensors", {"clf.1.weight": torch.zeros(1)}, torch.float16)
