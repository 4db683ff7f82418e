"""Logical axis rules: every parameter of every network has its axes, and goes where the rules say."""

from __future__ import annotations

from typing import Any

import known_networks
import pytest
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from quick_cases import chosen
from refusals import refused
from tiny_models import SDXL_UNET, TINY_UNET
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from daguerre.distributed import sharding_rules
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.settings import MeshSettings
from daguerre.errors import UserError
from daguerre.families import sd, sdxl
from daguerre.models import placement
from daguerre.models.network import Network

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
HUB = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": sd,
    "stabilityai/stable-diffusion-2-1": sd,
    "stabilityai/stable-diffusion-xl-base-1.0": sdxl,
}


def mesh(**ici: int) -> Mesh:
    return Mesh(ONE, ONE | ici)


def placed(
    module: torch.nn.Module, on: Mesh, by: sharding_rules.Rules = sharding_rules.DEFAULT
) -> tuple[dict[str, Any], list[str]]:
    found = known_networks.placed(module, on, by)
    return {each.name: each for each in found.placed}, [f"{name}: {why}" for name, why in found.problems]


@pytest.mark.parametrize("hub_id", chosen(HUB, lambda hub_id: "xl" in hub_id))
def test_every_parameter_of_the_published_networks_has_its_axes(hub_id: str):
    family = HUB[hub_id]
    with torch.device("meta"):
        parts = family.load(family.Settings(pretrained_model_name_or_path=hub_id), 0).networks
    for network in parts.values():
        found = placement.placement(network, sharding_rules.DEFAULT, mesh(fsdp=2, tensor=7919))
        assert all(found.patterns.values())
        with_heads = {each.name for each in found.placed if "heads" in each.dims}
        assert {name for name, why in found.problems if "heads over" in why} == with_heads


def networks() -> dict[str, Any]:
    """Built without memory."""
    numbers = {"cross_attention_dim": 48, "in_channels": 4, "out_channels": 4}
    control = {name: value for name, value in TINY_UNET.items() if name not in ("up_block_types", "sample_size")}
    t5 = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    clip = CLIPTextConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    image = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        return {
            "unet": UNet2DConditionModel(**TINY_UNET | numbers),
            "sdxl": UNet2DConditionModel(**SDXL_UNET, time_cond_proj_dim=8),
            "controlnet": ControlNetModel(
                **control, cross_attention_dim=48, conditioning_embedding_out_channels=(8, 16)
            ),
            "vae": AutoencoderKL(
                block_out_channels=[16, 16],
                norm_num_groups=8,
                down_block_types=["DownEncoderBlock2D"] * 2,
                up_block_types=["UpDecoderBlock2D"] * 2,
            ),
            "one level": AutoencoderKL(block_out_channels=[16], norm_num_groups=8),
            "clip": CLIPTextModelWithProjection(clip),
            "clip image": CLIPVisionModelWithProjection(image),
            "t5": T5EncoderModel(t5),
            "gated t5": T5EncoderModel(T5Config(**t5.to_dict() | {"feed_forward_proj": "gated-gelu"})),
        }


def test_every_parameter_of_other_networks_has_its_axes_and_no_pattern_is_idle():
    used: set[str] = set()
    for module in networks().values():
        patterns = known_networks.placed(module, mesh()).patterns
        assert all(patterns.values())
        used |= {*patterns.values()}
    assert used == {pattern for facts in known_networks.FACTS.values() for pattern in facts.axes}


def test_patterns_and_parameters_that_do_not_agree_are_shown():
    patterns = {"b.*": ("embed",), "*.weight": ("embed",), "c": ()}
    said = r"b\.weight \(2,\): b\.\*, \*\.weight\n  a\.bias \(2, 2\): no pattern"
    with pytest.raises(UserError, match=said):
        sharding_rules.logical(patterns, {"b.weight": (2,), "a.bias": (2, 2)})


def test_the_default_rules_on_sdxl():
    """Heads and feed-forward over tensor, widths over fsdp, kernels by their output channels."""
    with torch.device("meta"):
        unet = sdxl.load(
            sdxl.Settings(pretrained_model_name_or_path="stabilityai/stable-diffusion-xl-base-1.0"), 0
        ).components["unet"]
    found, said = placed(unet, mesh(fsdp=4, tensor=2))
    block = "down_blocks.1.attentions.0.transformer_blocks.0"
    expected = {
        f"{block}.attn1.to_q.weight": (0, 1),
        f"{block}.attn1.to_out.0.weight": (1, 0),
        f"{block}.ff.net.0.proj.weight": (0, 1),
        f"{block}.ff.net.2.weight": (1, 0),
        "down_blocks.0.resnets.0.conv1.weight": (None, 0),
        "conv_out.weight": (None, 0),
    }
    assert {name: (found[name].tensor, found[name].fsdp) for name in expected} == expected
    assert said == []
    assert sum(each.elements(mesh(fsdp=4, tensor=2)) for each in found.values()) < 2_567_463_684 / 4
    whole = placed(unet, mesh())[0]
    assert sum(each.elements(mesh()) for each in whole.values()) == 2_567_463_684
    assert {(each.tensor, each.fsdp) for each in whole.values()} == {(None, None)}


def test_heads_are_split_whole():
    """SD 1.5 has 8 heads of every width: 16 devices cannot have half a head each."""
    with torch.device("meta"):
        name = "stable-diffusion-v1-5/stable-diffusion-v1-5"
        unet = sd.load(sd.Settings(pretrained_model_name_or_path=name), 0).components["unet"]
    found, said = placed(unet, mesh(tensor=16))
    assert found["mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"].tensor is None
    assert any("attn1.to_q.weight: heads -> tensor is not possible: 8 heads over 16 devices" in line for line in said)
    assert found["mid_block.attentions.0.transformer_blocks.0.ff.net.2.weight"].tensor == 1


def test_dim_0_serves_where_a_rule_does_not_divide():
    found, _ = sharding_rules.place(
        {"a": (6, 10), "b": (7, 8), "c": (5,)},
        {"a": (None, "embed"), "b": (None, "embed"), "c": ("norm",)},
        sharding_rules.DEFAULT,
        mesh(fsdp=4),
        {},
    )
    assert [(each.fsdp, each.by_rule) for each in found] == [(0, False), (1, True), (0, False)]
    assert [each.elements(mesh(fsdp=4)) for each in found] == [20, 14, 2]


@pytest.mark.parametrize("rule", [["embedding", ["fsdp"]], ["embed", ["sequence"]], ["embed"], "embed"])
def test_rules_that_are_none_are_refused_with_what_there_is(rule):
    with pytest.raises(ValueError, match=r"logical axes are embed, heads, .*; mesh axes are data, fsdp, tensor"):
        MeshSettings(logical_axis_rules=[rule])


def test_rules_that_the_engine_cannot_follow_are_refused_by_name():
    with refused("unsupported", "mesh.logical_axis_rules", "activation_heads -> fsdp"):
        sharding_rules.check([("activation_heads", ["fsdp"])], mesh(fsdp=2, tensor=2))


def test_a_network_without_facts_is_split_along_dim_0_and_that_is_said():
    """A transformer whose names end like a UNet's is not taken for one."""
    module = torch.nn.ModuleDict({"transformer_blocks": torch.nn.ModuleList([torch.nn.Linear(6, 4)])})
    found = placement.placement(Network(module, "denoiser"), sharding_rules.DEFAULT, mesh(fsdp=2, tensor=2))
    assert [(each.tensor, each.fsdp, each.by_rule) for each in found.placed] == [(None, 0, False)] * 2
    net = placement.of_net(module, {"transformer": Network(module, "denoiser")}, sharding_rules.DEFAULT, mesh(fsdp=2))
    (line,) = placement.describe_unknown(net.unknown, mesh(fsdp=2))
    assert line == (
        "transformer: no logical axes are known, so their parameters are split over the 2 devices of fsdp along dim 0"
    )
    assert placement.describe_unknown(net.unknown, mesh(data=2)) == []


def test_what_does_nothing_on_this_mesh_is_said():
    assert sharding_rules.check(sharding_rules.DEFAULT, mesh(data=4)) == []
    assert sharding_rules.check([("activation_heads", ["fsdp"])], mesh(data=4)) == []
    (line,) = sharding_rules.check(sharding_rules.DEFAULT, mesh(tensor=2))
    assert "out_channels -> tensor has no effect" in line
