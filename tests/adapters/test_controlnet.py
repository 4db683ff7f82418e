"""The adapter `controlnet`: it starts without effect, its output is diffusers', and the base is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from quick_cases import chosen
from tiny_models import write_sd, write_sdxl
from torch import Tensor

from daguerre.adapters.controlnet import ControlNet
from daguerre.assembly import base_digests
from daguerre.assembly.parts import Components, build, outline
from daguerre.config import config as configs
from daguerre.config.errors import ConfigError
from daguerre.distributed.mesh import AXES, Mesh
from daguerre.errors import UserError
from daguerre.families.stable_diffusion import controlnet
from daguerre.models.controlnets import controlled
from daguerre.models.placement import of_net
from daguerre.types import Batch, Cond, Prompt

SIDE = 16
T = torch.tensor([10.0, 500.0])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {"sd": write_sd(folder / "sd"), "sdxl": write_sdxl(folder / "sdxl")}


def config(base: Path, adapters: dict[str, Any], **more: Any) -> configs.Config:
    tree = {
        "run_name": "x",
        "model": {"family": base.name, "pretrained_model_name_or_path": str(base)},
        "objective": {"name": "eps"},
        "adapters": adapters,
        "data": {"source": "folder", "path": str(base), "resolution": SIDE},
        "training": {"duration": "1 steps", "global_batch_size": 1, "kernels": "plain", "channels_last": False, **more},
    }
    return configs.load("controlnet", [], whole=json.loads(json.dumps(tree))).config


def built(base: Path, *own: dict[str, Any], moved: bool = False, **more: Any) -> Components:
    """A tiny model with these adapters; `moved`: with weights of the ControlNets that are not zero."""
    adapters = {f"own{number}": {"name": "controlnet", **each} for number, each in enumerate(own)}
    parts = build(config(base, adapters, **more), torch.device("cpu"))
    if moved:
        move(parts)
    return parts


@torch.no_grad()
def move(parts: Components) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, p in parts.net.named_parameters():
        if p.requires_grad and name.startswith("controlnet"):
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)


def inputs(parts: Components, **controls: Tensor) -> tuple[Tensor, Cond]:
    """Latents of two samples and their conditioning, with pictures."""
    cond, _ = parts.family.encode_prompts([Prompt("a red dog"), Prompt("")], (3, SIDE, SIDE))
    keys, sizes = np.array([[7, 0, 0], [8, 0, 0]]), np.zeros((2, 6), dtype=np.int32)
    batch = Batch(keys, controls or {"control": picture(3)}, ["", ""], torch.ones(2), ["", ""], sizes)
    shape = parts.family.latent_shape((3, SIDE, SIDE))
    batch = Batch(**vars(batch) | {"draws": parts.attached.random_inputs(0, keys, shape)})
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2))
    return x, parts.attached.condition(batch, cond)


def picture(seed: int, channels: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, (2, channels, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    found[:, 3:] = 255
    return found


def plain(parts: Components, x: Tensor, cond: Cond, **more: Any) -> Tensor:
    """diffusers' own UNet, called as its pipelines call it."""
    unet: Any = parts.family.components["unet"]
    found: Tensor = unet(x, T, encoder_hidden_states=cond["text"], **added(cond), **more).sample
    return found


def added(cond: Cond) -> dict[str, Any]:
    sized = {"text_embeds": cond["pooled"], "time_ids": cond["sizes"]} if "sizes" in cond else None
    return {"added_cond_kwargs": sized}


FAMILIES = chosen(["sd", "sdxl"], lambda family: family == "sdxl")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_without_effect_and_only_zero_convolutions_get_a_gradient(family, bases):
    parts = built(bases[family], {})
    x, cond = inputs(parts)
    parts.net.train()
    assert not any(module.training for module in parts.family.components["unet"].modules())
    y = parts.net(x, T, cond)
    assert torch.equal(y, plain(parts, x, cond))
    y.square().mean().backward()
    network = parts.net.controlnet
    moved = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.any()}
    zero_at_first = ("controlnet_down_blocks.", "controlnet_mid_block.")
    assert moved == {name for name in network.state_dict() if name.startswith(zero_at_first)}
    assert all(p.grad is None for name, p in parts.net.named_parameters() if name.startswith("unet."))
    own = network.state_dict()
    assert all(torch.equal(own[n], p) for n, p in parts.family.components["unet"].state_dict().items() if n in own)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_its_output_is_that_of_diffusers(family, bases, tmp_path):
    """Of the export, read by diffusers; the picture in [0, 1], -1 where it is transparent."""
    parts = built(bases[family], {"conditioning_scale": 0.7}, moved=True)
    pixels = picture(3)
    pixels[0, 3, :4] = 0
    x, cond = inputs(parts, control=pixels)
    hint = pixels[:, :3].float() / 255
    hint[0, :, :4] = -1
    parts.attached.export(tmp_path / "adapter", parts.objective, None)
    network = ControlNetModel.from_pretrained(tmp_path / "adapter", low_cpu_mem_usage=False)
    unet = UNet2DConditionModel.from_pretrained(bases[family] / "unet", low_cpu_mem_usage=False)
    text = cond["text"]
    down, middle = network(x, T, text, hint, conditioning_scale=0.7, return_dict=False, **added(cond))
    theirs = unet(
        x,
        T,
        text,
        down_block_additional_residuals=down,
        mid_block_additional_residual=middle,
        **added(cond),
    ).sample
    ours = parts.net.eval()(x, T, cond)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - plain(parts, x, cond)).abs().max() > 0.01


@torch.no_grad()
def test_several_add_up_each_with_its_own_scales_and_levels(bases):
    parts = built(bases["sd"], {}, {"image": "control_2", "size": "small"}, moved=True)
    x, cond = inputs(parts, control=picture(3), control_2=picture(4))
    both = MultiControlNetModel([parts.net.controlnet, parts.net.controlnet_2])
    hints = [picture(seed)[:, :3].float() / 255 for seed in (3, 4)]

    def theirs(scales: list[float], guess_mode: bool = False) -> Tensor:
        down, middle = both(x, T, cond["text"], hints, scales, guess_mode=guess_mode, return_dict=False)
        return plain(parts, x, cond, down_block_additional_residuals=down, mid_block_additional_residual=middle)

    ours = parts.net.eval()
    torch.testing.assert_close(ours(x, T, cond), theirs([1.0, 1.0]), rtol=0, atol=1e-6)
    names = ("controlnet", "controlnet_2")
    always = {controlled.levels(name): torch.tensor([[-1e9, 1e9]] * 2) for name in names}
    count = parts.net.kind.count(parts.net.controlnet)
    scales = {controlled.scales(name): torch.full((2, count), s) for name, s in zip(names, (0.5, 2.0), strict=True)}
    torch.testing.assert_close(ours(x, T, {**cond, **scales, **always}), theirs([0.5, 2.0]), rtol=0, atol=1e-6)
    guessed = {controlled.scales(name): torch.logspace(-1, 0, count).expand(2, -1) for name in names}
    torch.testing.assert_close(ours(x, T, {**cond, **guessed, **always}), theirs([1.0, 1.0], True), rtol=0, atol=1e-6)
    late = {controlled.levels(name): torch.tensor([[0.0, 100.0]] * 2) for name in names}
    found = ours(x, T, {**cond, **scales, **late})
    torch.testing.assert_close(found[0], theirs([0.5, 2.0])[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[1], plain(parts, x, cond)[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "order", [("lora", "controlnet"), pytest.param(("controlnet", "lora"), marks=pytest.mark.long)]
)
def test_a_lora_beside_it_trains_too(order, bases):
    """In either order the copy is of the base's own weights, and both get gradients."""
    alone = built(bases["sd"], {})
    parts = build(config(bases["sd"], {name: {"name": name} for name in order}), torch.device("cpu"))
    own, theirs = parts.net.controlnet.state_dict(), alone.net.controlnet.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in own.items())
    move(parts)
    x, cond = inputs(parts)
    assert cond.keys() == inputs(alone)[1].keys()
    parts.net.train()
    parts.net(x, T, cond).square().mean().backward()
    trained = {name for name, p in parts.net.named_parameters() if p.requires_grad}
    assert trained == {name for name in parts.attached.names if name in dict(parts.net.named_parameters())}
    grown = {name.partition(".")[0] for name, p in parts.net.named_parameters() if p.grad is not None and p.grad.any()}
    assert grown == {"unet", "controlnet"}


def test_dropout_blanks_the_same_pictures_in_training_alone(bases):
    parts = built(bases["sd"], {"conditioning_dropout": 0.5})
    (own,) = parts.attached.trainables.values()
    assert isinstance(own, ControlNet)
    keys = np.stack([np.arange(400), np.zeros(400, int), np.zeros(400, int)], axis=1)
    dropped = own.random_inputs(3, keys, (4, 8, 8))["controlnet.dropped"]
    assert 150 < int(dropped.sum()) < 250
    assert torch.equal(dropped[5:9], own.random_inputs(3, keys[5:9], (4, 8, 8))["controlnet.dropped"])
    batch = Batch(keys[:8], {"control": picture(3).repeat(4, 1, 1, 1)}, [], torch.ones(8), [], np.zeros((8, 6)))
    batch = Batch(**vars(batch) | {"draws": {"controlnet.dropped": dropped[:8]}})
    parts.net.train()
    hints = own.condition(batch, {})["controlnet"]
    assert [not bool(hint.any()) for hint in hints] == dropped[:8].tolist()
    assert 0 < int(dropped[:8].sum()) < 8
    parts.net.eval()
    assert all(bool(hint.any()) for hint in own.condition(batch, {})["controlnet"])


def test_gradient_checkpointing_changes_nothing(bases):
    found = []
    for again in (False, True):
        parts = built(bases["sdxl"], {}, moved=True, gradient_checkpointing=again)
        x, cond = inputs(parts)
        parts.net.train()
        parts.net(x, T, cond).square().mean().backward()
        found.append([p.grad for p in parts.net.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_base_may_be_bfloat16_and_is_recorded(bases):
    parts = built(bases["sd"], {}, weights_dtype="bfloat16")
    recorded = base_digests.of(config(bases["sd"], {"own": {"name": "controlnet"}}), parts.family, parts.attached)
    assert set(recorded) == {"unet", "vae", "text_encoder"}
    parts.numerics.store(parts.net, parts.attached.float32)
    types = {(name.partition(".")[0], p.dtype) for name, p in parts.net.named_parameters()}
    assert types == {("unet", torch.bfloat16), ("controlnet", torch.float32)}
    move(parts)
    x, cond = inputs(parts)
    with parts.autocast():
        loss = parts.net.train()(x, T, cond).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parts.net.controlnet.parameters())


@pytest.mark.parametrize("size", chosen(controlled.SIZES, lambda size: size == "mid"))
def test_it_is_outlined_without_memory_and_placed_on_a_mesh(size, bases):
    whole = config(bases["sdxl"], {"own": {"name": "controlnet", "size": size}})
    mesh = Mesh(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 2))
    parts = outline(whole)
    assert all(p.is_meta for p in parts.net.parameters())
    found = of_net(parts.net, parts.networks, whole.mesh.logical_axis_rules, mesh)
    placed = {each.name: each for each in found.placed}
    for name in placed:
        if name.startswith("controlnet.") and controlnet.shared(name.partition(".")[2]):
            twin = placed[name.replace("controlnet.", "unet.", 1)]
            assert (placed[name].tensor, placed[name].fsdp) == (twin.tensor, twin.fsdp), name
    split = {each.tensor for each in found.placed if each.name.startswith("controlnet.")}
    assert split == ({None} if size == "small" else {None, 0, 1})
    assert all(found.patterns.values())


def test_settings_that_cannot_be_are_refused(bases, tmp_path):
    one = {"controlnet_model_name_or_path": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="controlnet_model_name_or_path gives a whole ControlNet"):
        config(bases["sd"], {"own": {"name": "controlnet", "size": "small", **one}})
    with pytest.raises(UserError, match="there is no folder"):
        built(bases["sd"], one)
    tree = config(bases["sdxl"], {"own": {"name": "controlnet"}}).model_dump(mode="json")
    tree["model"]["long_prompts"] = True
    with pytest.raises(UserError, match="only pad the batch"):
        build(configs.load("controlnet", [], whole=tree).config, torch.device("cpu"))
