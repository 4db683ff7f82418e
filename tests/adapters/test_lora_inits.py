"""Starts of a LoRA: peft's numbers over a base that stays what it is, what is frozen, and files of twice the rank."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig, inject_adapter_in_model
from peft.optimizers import create_loraplus_optimizer
from safetensors import safe_open
from test_lora import config as config_of
from test_lora import errors, outputs, prediction
from test_lora_kinds import networks, plain, trained
from torch import nn

from daguerre.assembly import base_digests
from daguerre.assembly.parts import Components, begin, outline
from daguerre.models.lora_files import read
from daguerre.models.lora_files.addition import DIFFUSERS_FILE as FILE

RANKS = {"unet": 4, "text_encoder": 2}
LAYER = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
GIVEN = ("adapter.name=lora", "adapter.rank=4", "adapter.ranks.text_encoder=2", "adapter.alpha=2.5")
FROM_BASE = ("pissa", "olora")
QUICK = [pytest.param(init, marks=[] if init == "pissa" else [pytest.mark.long]) for init in FROM_BASE]


def started(base: Path, init: str, *more: str) -> Components:
    return plain(base, *GIVEN, f"adapter.init={init}", *more)


def of_peft(base: Path, init: str, rank: int, alpha: float) -> tuple[nn.Module, nn.Module]:
    """A layer as it is, and as peft starts it."""
    layers = [plain(base).family.components["unet"].get_submodule(LAYER) for _ in range(2)]
    holder = nn.ModuleDict({"one": layers[1]})
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights=init, target_modules=["one"]), holder
    )
    return layers[0], holder["one"]


@pytest.mark.parametrize("init", QUICK)
def test_it_starts_as_peft_does_over_the_base_as_it_is(init, base):
    parts = started(base, init)
    before, theirs = of_peft(base, init, 4, 2.5)
    ours = parts.family.components["unet"].get_submodule(LAYER)
    assert torch.equal(ours.base_layer.weight, before.weight)
    moved = (theirs.base_layer.weight - before.weight).abs().max()
    assert moved > 0.01, "there the base has changed"
    for factors in ("lora_A", "lora_B"):
        assert torch.equal(getattr(ours, factors)["default"].weight, getattr(theirs, factors)["default"].weight)
    start = ours.base_layer.weight + ours.get_delta_weight("start")
    assert (start - theirs.base_layer.weight).abs().max() <= 1e-6 * moved
    assert (prediction(parts) - prediction(plain(base))).abs().max() <= 1e-5


@pytest.mark.parametrize("init", ["orthogonal", pytest.param("gaussian", marks=pytest.mark.long)])
def test_other_starts_have_no_effect_and_stay_as_they_are(init, base):
    parts = started(base, init)
    assert (prediction(parts) - prediction(plain(base))).abs().max() <= (1e-5 if init == "orthogonal" else 0)
    layer = parts.family.components["unet"].get_submodule(LAYER)
    assert "start" not in layer.lora_A
    deviation = layer.lora_A["default"].weight.std().item()
    assert deviation == pytest.approx(1 / 4, rel=0.3) if init == "gaussian" else deviation > 0


@pytest.mark.long
@pytest.mark.parametrize("init", QUICK)
def test_the_file_of_twice_the_rank_means_the_same_on_the_plain_base(init, base, tmp_path):
    more = ("adapter.rank_pattern={to_k: 3}", "adapter.alpha_pattern={to_v: 6}", "adapter.kind=rslora")
    parts, pipe = trained(started(base, init, *more)), StableDiffusionPipeline.from_pretrained(base)
    alone = outputs({name: getattr(pipe, name) for name in RANKS})
    parts.attached.export(tmp_path, parts.objective, None)
    with safe_open(tmp_path / FILE, "pt") as file:
        header = json.loads(file.metadata()["lora_adapter_metadata"])
        assert file.get_slice(f"unet.{LAYER}.lora_A.weight").get_shape()[0] == 8
        assert file.get_slice(f"unet.{LAYER.replace('to_q', 'to_k')}.lora_A.weight").get_shape()[0] == 6
    assert header["unet.init_lora_weights"] is True, "diffusers would take the weights apart again"
    pipe.load_lora_weights(tmp_path)
    expected = outputs(networks(parts))
    errors(outputs({name: getattr(pipe, name) for name in RANKS}), expected, alone)
    fresh = plain(base)
    for file in (FILE, "kohya.safetensors"):
        for component, additions in read.read(tmp_path / file, fresh.family.components).items():
            for each in additions:
                layer = parts.family.components[component].get_submodule(each.layer).float()
                own = layer.get_base_layer().weight
                delta = layer.get_delta_weight("default") + layer.get_delta_weight("start")
                assert (each.weight(own) - own - delta).abs().max() <= 2e-6 * delta.abs().max()
    with parts.attached.merged():
        errors(outputs(networks(parts)), expected, alone)


def test_the_start_is_frozen_saved_and_no_part_of_the_base(base):
    parts = trained(started(base, "pissa"))
    names = {name for name, p in parts.net.named_parameters() if p.requires_grad}
    assert names
    assert all(".default." in name for name in names)
    assert parts.attached.names == names | {name.replace(".default.", ".start.") for name in names}
    untouched = plain(base, *GIVEN)
    of_base = base_digests.of(config_of("sd", base), untouched.family, untouched.attached)
    assert base_digests.of(config_of("sd", base), parts.family, parts.attached) == of_base


@pytest.mark.long  # of the quick tests, test_lora.py outlines them
def test_networks_without_memory_start_alike(base):
    parts, sketch = started(base, "pissa"), outline(config_of("sd", base, *GIVEN, "adapter.init=pissa", lora=False))
    assert {p.device.type for p in sketch.net.parameters()} == {"meta"}
    shapes = [{name: p.shape for name, p in each.net.named_parameters()} for each in (parts, sketch)]
    assert shapes[0] == shapes[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo asks inputs for theirs
@pytest.mark.parametrize(
    "given", [["adapter.init=pissa"], ["adapter.kind=rslora", "adapter.lora_fa=true"], ["adapter.tlora_min_rank=1"]]
)
def test_blocks_are_compiled_in_one_piece(given, base):
    """As training.compile=blocks compiles them, by a backend without a C++ compiler."""
    parts = trained(plain(base, *GIVEN, *given))
    seen: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for compiles in (False, True):
        if compiles:
            for module in parts.net.modules():
                if type(module).__name__ in parts.family.block_classes:
                    module.compile(backend="aot_eager", fullgraph=True)
        parts.net.train()
        x, cond = torch.ones(1, *parts.family.latent_shape((3, 16, 16))), parts.family.text.tokens(["a red dog"])
        y = parts.net(x, torch.tensor([10.0]), cond)
        y.square().mean().backward()
        seen.append((y.detach(), [p.grad for p in parts.net.parameters() if p.grad is not None]))
        parts.net.zero_grad(set_to_none=True)
    (plain_y, plain_grads), (y, grads) = seen
    assert torch.equal(y, plain_y)
    assert grads
    for own, expected in zip(grads, plain_grads, strict=True):
        assert (own - expected).norm() <= 1e-5 * expected.norm()


def test_of_lora_fa_b_alone_is_trained(base, tmp_path):
    parts = trained(plain(base, *GIVEN, "adapter.lora_fa=true"))
    by_factor = {".lora_A.": False, ".lora_B.": True}
    for name, p in parts.net.named_parameters():
        if name in parts.attached.names:
            assert p.requires_grad == next(on for part, on in by_factor.items() if part in name), name
    pipe = StableDiffusionPipeline.from_pretrained(base)
    alone = outputs({name: getattr(pipe, name) for name in RANKS})
    parts.attached.export(tmp_path, parts.objective, None)
    pipe.load_lora_weights(tmp_path)
    errors(outputs({name: getattr(pipe, name) for name in RANKS}), outputs(networks(parts)), alone)


def test_lora_plus_has_the_groups_of_peft(base):
    more = ("optimizer.learning_rate=1e-4", "optimizer.weight_decay=0", "loraplus_lr_ratio=16")
    parts, config = plain(base, *GIVEN, *more), config_of("sd", base, *GIVEN, *more, lora=False)
    theirs = create_loraplus_optimizer(parts.net, torch.optim.AdamW, lr=1e-4, loraplus_lr_ratio=16)
    ours = begin(config, parts).optimizer.parts[0].optimizer
    found, expected = (
        {id(p): (group["lr"], group["weight_decay"]) for group in each.param_groups for p in group["params"]}
        for each in (ours, theirs)
    )
    assert {rate for rate, _ in expected.values()} == {1e-4, 1.6e-3}
    assert found == expected


def test_dropout_by_pattern(base):
    parts = plain(
        base, *GIVEN, "adapter.dropout=0.1", 'adapter.dropout_pattern={"attn2.to_?": 0.5, "text_encoder.*": 0}'
    )
    layers = {name: m for part in networks(parts).values() for name, m in part.named_modules() if hasattr(m, "lora_A")}
    found = {name: getattr(layer.lora_dropout["default"], "p", 0.0) for name, layer in layers.items()}
    for name, share in found.items():
        in_cross = "attn2" in name and not name.endswith("to_out.0")
        assert share == (0.5 if in_cross else 0.1 if "attn" in name and "self_attn" not in name else 0.0), name
    parts.net.train()
    assert layers[LAYER].lora_dropout["default"].training
    one, other = prediction(trained(parts)), prediction(parts)
    assert torch.equal(one, other), "evaluation drops nothing"
    parts.net.train()
    assert not torch.equal(prediction(parts), one)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["adapter.init=pissa", "adapter.targets=all"], "is a convolution, and init=pissa is defined for matrices"),
        (["adapter.init=orthogonal", "adapter.rank=3"], "init=orthogonal needs an even rank, not 3"),
        (["adapter.init=olora", "adapter.rank=4096"], "init=olora cannot take a part of rank 4096"),
        (["adapter.init=pissa", "adapter.kind=dora"], "kind=dora divides by the length of both together"),
        (["adapter.init=pissa", "adapter.kind=loha"], "only lora, rslora and dora have the factors A and B"),
        (["adapter.lora_fa=true", "adapter.kind=boft"], "only lora, rslora and dora have the factors A and B"),
        (["adapter.dropout_pattern={to_q: 1}"], "dropout_pattern.to_q = 1 allowed: a number from 0, below 1"),
        (["adapter.dropout_pattern={to_x: 0.5}"], "targets to_x are no linear layers or convolutions"),
        (["adapter.kind=oft"], "oft: peft's OFT is no identity when it starts"),
        (["adapter.kind=vera"], "vera: its random matrices are shared between layers"),
        (["adapter.kind=randlora"], "randlora: peft's merged weights differ"),
    ],
)
def test_what_cannot_be_is_refused(given, said, base):
    with pytest.raises(ValueError, match=r".") as caught:
        plain(base, "adapter.name=lora", *given)
    assert said in " ".join(str(caught.value).split())
