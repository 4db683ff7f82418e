"""The adapter `lora`: its export in diffusers is our network, merging changes nothing, the base is left alone."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from peft.tuners.lora import LoraLayer
from quick_cases import chosen
from safetensors import safe_open
from tiny_models import write_sd, write_sdxl
from torch import nn

from daguerre.assembly import base_digests
from daguerre.assembly.parts import Components, build, outline
from daguerre.config import config as configs
from daguerre.models.lora_files.addition import DIFFUSERS_FILE as FILE
from daguerre.types import Prompt

PIPELINES = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
FIRST_NUMBERS = {
    "unet": [0.16774824261665344, -0.16531214118003845],
    "text": [-0.0899440199136734, 0.07306618243455887],
}
ENCODERS = {"sd": ["text_encoder"], "sdxl": ["text_encoder", "text_encoder_2"]}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {"sd": write_sd(folder / "sd") or folder / "sd", "sdxl": write_sdxl(folder / "sdxl") or folder / "sdxl"}


def config(kind: str, base: Path, *more: str, lora: bool = True) -> configs.Config:
    """UNet and text encoders of a tiny model, each with a rank of its own, and alpha unlike any of them."""
    given = [f"model.pretrained_model_name_or_path={base}"]
    if lora:
        given += ["adapter.name=lora", "adapter.rank=4", "adapter.alpha=2.5"]
        given += [f"adapter.ranks.{name}={number}" for number, name in enumerate(ENCODERS[kind], start=2)]
    tree = {
        "run_name": "x",
        "model": {"family": kind},
        "objective": {"name": "eps"},
        "data": {"source": "folder", "path": str(base), "resolution": 16},
        "training": {"duration": "1 steps", "global_batch_size": 1},
    }
    return configs.load("lora", [*given, *more], whole=tree).config


def built(kind: str, base: Path, *more: str) -> Components:
    """The parts, with additions that are not zero."""
    parts = build(config(kind, base, *more), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in parts.net.named_parameters():
            if name in parts.attached.names and "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    parts.net.eval()
    return parts


@torch.no_grad()
def prediction(parts: Components) -> torch.Tensor:
    """Of the net, for fixed latents and prompts."""
    pixels = (3, 16, 16)
    cond, _ = parts.family.encode_prompts([Prompt("a red dog"), Prompt("")], pixels)
    x = torch.randn(2, *parts.family.latent_shape(pixels), generator=torch.Generator().manual_seed(2))
    return parts.net(x, torch.tensor([10.0, 500.0]), cond)


@torch.no_grad()
def outputs(networks: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Of each network, for inputs of its own, in float64: what is left of a difference is no rounding."""
    generator, found = torch.Generator().manual_seed(3), {}
    for name, network in networks.items():
        numbers = network.double().config
        if name == "unet":
            x = torch.randn(2, numbers.in_channels, 8, 8, generator=generator).double()
            text = torch.randn(2, 7, numbers.cross_attention_dim, generator=generator).double()
            pooled = numbers.addition_embed_type and numbers.projection_class_embeddings_input_dim - 6 * 8
            sizes = torch.tensor([[16.0, 16, 0, 0, 16, 16]] * 2)
            pools = torch.randn(2, pooled or 1, generator=generator).double()
            added = {"text_embeds": pools, "time_ids": sizes.double()} if pooled else None
            found[name] = network(x, torch.tensor([10.0, 500.0]), text, added_cond_kwargs=added).sample
        else:
            ids = torch.randint(0, 512, (2, 20), generator=generator)
            out = network(ids, output_hidden_states=True)
            found[name] = torch.cat([out.hidden_states[-2].flatten(), out.last_hidden_state.flatten()])
    return found


def networks(parts: Components, kind: str) -> dict[str, nn.Module]:
    """What has additions."""
    return {name: parts.family.components[name] for name in ("unet", *ENCODERS[kind])}


def errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    """Fails where outputs are further apart than 1e-6 of what the additions do."""
    for name, own in expected.items():
        effect, error = (own - plain[name]).abs().max(), (found[name] - own).abs().max()
        print(f"{name}: {error:.2g} of {effect:.3g}")
        assert effect > 0.01
        assert error <= 1e-6 * effect, name


@pytest.mark.long  # of the quick tests, test_lora_kinds.py has exports and merges
@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_our_export_in_diffusers_is_our_network(kind, pipelines, tmp_path):
    parts = built(kind, pipelines[kind])
    pipe = PIPELINES[kind].from_pretrained(pipelines[kind])
    plain = outputs({name: getattr(pipe, name) for name in networks(parts, kind)})
    assert parts.attached.export(tmp_path / "lora", parts.objective, None) == []
    with safe_open(tmp_path / "lora" / FILE, "pt") as file:
        names, header = list(file.keys()), json.loads(file.metadata()["lora_adapter_metadata"])
    assert (header["unet.r"], header["unet.lora_alpha"], header["text_encoder.r"]) == (4, 2.5, 2)
    assert sum(name.startswith("text_encoder.text_model.encoder.layers.") for name in names) > 0
    pipe.load_lora_weights(tmp_path / "lora")
    errors(
        outputs({name: getattr(pipe, name) for name in networks(parts, kind)}), outputs(networks(parts, kind)), plain
    )


@pytest.mark.long  # of the quick tests, test_lora_kinds.py has exports and merges
@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_merged_is_unmerged_and_what_is_left_are_the_base_s_modules(kind, pipelines):
    parts = built(kind, pipelines[kind])
    names = {name: set(each.state_dict()) for name, each in networks(untouched(kind, pipelines[kind]), kind).items()}
    plain = outputs(networks(untouched(kind, pipelines[kind]), kind))
    before = outputs(networks(parts, kind))
    with parts.attached.trainables["lora"].detached():
        alone = outputs(networks(parts, kind))
        assert all(torch.equal(alone[name], plain[name]) for name in plain)
    with parts.attached.merged():
        assert {name: set(each.state_dict()) for name, each in networks(parts, kind).items()} == names
        errors(outputs(networks(parts, kind)), before, plain)


def untouched(kind: str, base: Path) -> Components:
    """The model as it is."""
    return build(config(kind, base, lora=False), torch.device("cpu"))


def test_training_starts_at_the_base(pipelines):
    parts, plain = build(config("sd", pipelines["sd"]), torch.device("cpu")), untouched("sd", pipelines["sd"])
    plain.net.eval()
    assert torch.equal(prediction(parts), prediction(plain))


@pytest.mark.parametrize(
    ("kind", "every"), [("sd", 13), *(pytest.param(kind, 1, marks=pytest.mark.long) for kind in PIPELINES)]
)
def test_every_parameter_of_the_net_is_saved_or_of_the_base_that_is_named(kind, every, pipelines):
    parts = built(kind, pipelines[kind])
    named = base_digests.of(config(kind, pipelines[kind]), parts.family, parts.attached)
    assert named.keys() == {"unet", "vae", *ENCODERS[kind]}
    alone = untouched(kind, pipelines[kind])
    whole = base_digests.of(config(kind, pipelines[kind], lora=False), alone.family, alone.attached)
    assert whole.keys() == {"vae", *ENCODERS[kind]}, "a UNet that is trained is no base"
    assert all(named[name] == whole[name] for name in whole), "additions do not change the base's digest"
    trained = {name for name, p in parts.net.named_parameters() if p.requires_grad}
    assert trained == parts.attached.names == {name for name in parts.net.state_dict() if ".lora_" in name}
    rest = [(name, p) for name, p in parts.net.named_parameters() if name not in trained]
    for name, p in rest[::every]:
        before = p.detach().clone()
        with torch.no_grad():
            p.view(-1)[0] += 1
        changed = base_digests.of(config(kind, pipelines[kind]), parts.family, parts.attached)
        assert [each for each in named if changed[each] != named[each]] == [name.partition(".")[0]], name
        with torch.no_grad():
            p.copy_(before)


def test_a_rank_of_1_is_the_least(pipelines):
    assert config("sd", pipelines["sd"], "adapter.ranks.unet=1").adapters["lora"].ranks["unet"] == 1
    with pytest.raises(configs.ConfigError, match=r"ranks.unet = 0\n *allowed: a whole number from 1 or null"):
        config("sd", pipelines["sd"], "adapter.ranks.unet=0")


def test_first_numbers_follow_from_the_seed_of_the_run_for_ever(pipelines):
    """A run that is trained again elsewhere, or years later, starts from the same additions."""
    weights = built("sd", pipelines["sd"]).net.state_dict()
    first = {c: next(v for n, v in weights.items() if n.startswith(c) and ".lora_A." in n) for c in ("unet", "text")}
    found = {component: weight.flatten()[:2].tolist() for component, weight in first.items()}
    assert found == {component: pytest.approx(two, rel=1e-6) for component, two in FIRST_NUMBERS.items()}


def test_layers_that_no_output_depends_on_have_no_additions(pipelines):
    parts = built("sdxl", pipelines["sdxl"])
    unread = {id(p) for p in parts.family.unread}
    wrapped = [m for m in parts.net.modules() if isinstance(m, LoraLayer)]
    assert unread
    assert wrapped
    assert not any(id(layer.base_layer.weight) in unread for layer in wrapped)


def test_the_base_computes_without_dropout(pipelines):
    parts = built("sd", pipelines["sd"])
    for module in parts.net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    expected = prediction(parts)
    parts.net.train()
    assert torch.equal(prediction(parts), expected)
    with_dropout = built("sd", pipelines["sd"], "adapter.dropout=0.5")
    with_dropout.net.train()
    one, other = prediction(with_dropout), prediction(with_dropout)
    assert not torch.equal(one, other)
    with_dropout.net.eval()
    assert torch.equal(prediction(with_dropout), expected)


@pytest.mark.long  # of the quick tests, test_adapters.py has the weights of a seed
def test_first_weights_follow_from_the_seed_alone(pipelines):
    torch.manual_seed(5)
    first = built("sd", pipelines["sd"]).net.state_dict()
    torch.manual_seed(6)
    state = torch.random.get_rng_state()
    again, other = built("sd", pipelines["sd"]), built("sd", pipelines["sd"], "seed=1")
    assert torch.equal(torch.random.get_rng_state(), state)
    names = [name for name in first if "lora_A" in name]
    assert all(torch.equal(first[name], again.net.state_dict()[name]) for name in names)
    assert not any(torch.equal(first[name], other.net.state_dict()[name]) for name in names)


TARGETS = {
    "[to_q]": {"to_q"},
    '["attn2.to_?"]': {"to_q", "to_k", "to_v"},
    "[unet.mid_block.attentions.0.transformer_blocks.0.ff.net.2, q_proj]": {"2", "q_proj"},
}


@pytest.mark.parametrize("targets", chosen(TARGETS, lambda targets: "q_proj" in targets))
def test_targets_choose_layers(targets, pipelines):
    more = ["adapter.ranks.text_encoder=null"] if "q_proj" not in targets else []
    parts = built("sdxl", pipelines["sdxl"], f"adapter.targets={targets}", "adapter.ranks.text_encoder_2=null", *more)
    wrapped = [name for name, module in parts.net.named_modules() if isinstance(module, LoraLayer)]
    assert {name.rpartition(".")[2] for name in wrapped} == TARGETS[targets]
    assert all("attn2" in name for name in wrapped) or "attn2" not in targets


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("adapter.targets=[to_q, q_proj, to_z]", "targets to_z are no linear layers or convolutions of unet"),
        ("adapter.targets=[to_q]", "no layer of the LoRA's targets (to_q) is in text_encoder"),
        ("adapter.targets=[attention, ff]", "these are kinds of layers: set targets=attention+ff"),
        ("adapter.ranks.vae=4", "vae is not a component that model.family=sd can train"),
        ("adapter.rank=0", "adapters.lora.rank"),
        ("train_text_encoder=true", "adapters.lora.ranks.text_encoder"),
        ("adapters.full.name=full", "both full (full) and lora (lora) cover the unet"),
    ],
)
def test_what_cannot_be_is_refused(given, said, pipelines):
    with pytest.raises(ValueError, match=r".") as caught:
        built("sd", pipelines["sd"], given)
    assert said in str(caught.value)


@pytest.mark.long
def test_networks_without_memory_have_the_same_additions(pipelines):
    parts, sketch = built("sdxl", pipelines["sdxl"]), outline(config("sdxl", pipelines["sdxl"]))
    assert {p.device.type for p in sketch.net.parameters()} == {"meta"}
    shapes = [{name: p.shape for name, p in each.net.named_parameters()} for each in (parts, sketch)]
    assert shapes[0] == shapes[1]
    assert parts.attached.names == sketch.attached.names


@pytest.mark.parametrize("weights", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_additions_stay_float32_over_any_base(weights, pipelines):
    parts = built("sd", pipelines["sd"], f"training.weights_dtype={weights}")
    parts.numerics.store(parts.net, parts.attached.float32)
    for name, p in parts.net.named_parameters():
        assert p.dtype == (torch.float32 if name in parts.attached.names else getattr(torch, weights)), name


def test_activations_of_text_encoders_are_computed_again(pipelines):
    """transformers asks by `training`, which the base is not in."""
    parts = built("sd", pipelines["sd"], "training.gradient_checkpointing=true")
    parts.net.train()
    layer = next(m for m in parts.family.components["text_encoder"].modules() if isinstance(m, LoraLayer))
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    tokens = parts.family.text.tokens(["a red dog"])
    x = torch.randn(1, *parts.family.latent_shape((3, 16, 16)))
    y = parts.net(x, torch.tensor([10.0]), tokens)
    assert len(calls) == 1
    y.square().mean().backward()
    assert len(calls) == 2
    assert all(p.grad is not None for p in parts.net.parameters() if p.requires_grad)
    assert all(p.grad is None for p in parts.net.parameters() if not p.requires_grad)
