"""The kinds of the adapter `lora`, its layers by name and by pattern, and their ranks and alphas."""

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft import PeftModel
from quick_cases import chosen
from safetensors.torch import load_file
from test_lora import config, errors, outputs, prediction
from torch import Tensor, nn

from daguerre.assembly.parts import Components, build, outline
from daguerre.config import config as configs
from daguerre.models.lora_files.addition import DIFFUSERS_FILE as FILE

KINDS = ("lora", "rslora", "dora", "loha", "lokr", "boft")
QUICK = chosen(KINDS, lambda kind: kind in ("dora", "lokr"))
ONE = chosen(KINDS, lambda kind: kind == "lokr")
IN_DIFFUSERS = ("lora", "rslora", "dora")
EVERYWHERE = "adapter.targets=attention+ff+conv"
RANKS = {"unet": 4, "text_encoder": 2}
ALPHA = 2.5


def plain(base: Path, *more: str) -> Components:
    parts = build(config("sd", base, *more, lora=False), torch.device("cpu"))
    parts.net.eval()
    return parts


def attached(base: Path, kind: str, *more: str) -> Components:
    """UNet and text encoder with additions of a kind, as training starts."""
    alpha = [] if kind == "boft" else [f"adapter.alpha={ALPHA}"]
    ranks = [f"adapter.rank={RANKS['unet']}", f"adapter.ranks.text_encoder={RANKS['text_encoder']}"]
    return plain(base, "adapter.name=lora", f"adapter.kind={kind}", *ranks, EVERYWHERE, *alpha, *more)


def trained(parts: Components) -> Components:
    """The same with additions that have an effect."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in parts.net.named_parameters():
            if name in parts.attached.names:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    parts.net.eval()
    return parts


def networks(parts: Components) -> dict[str, nn.Module]:
    return {name: parts.family.components[name] for name in RANKS}


@pytest.mark.parametrize("kind", ONE)
def test_it_starts_at_the_base_and_merged_is_unmerged(kind, base):
    parts, untouched = attached(base, kind), plain(base)
    difference = (prediction(parts) - prediction(untouched)).abs().max()
    assert difference <= (1e-5 if kind == "boft" else 0), "an identity is computed as a rotation"
    before = outputs(networks(trained(parts)))
    alone = outputs(networks(untouched))
    with parts.attached.trainables["lora"].detached():
        assert all(torch.equal(outputs(networks(parts))[name], alone[name]) for name in alone)
    with parts.attached.merged():
        errors(outputs(networks(parts)), before, alone)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("kind", QUICK)
def test_others_read_the_export_as_our_network(kind, base, tmp_path):
    parts, pipe = trained(attached(base, kind)), StableDiffusionPipeline.from_pretrained(base)
    alone = outputs({name: getattr(pipe, name) for name in RANKS})
    parts.attached.export(tmp_path / "out", parts.objective, None)
    theirs: dict[str, nn.Module] = {}
    if kind in IN_DIFFUSERS:
        pipe.load_lora_weights(tmp_path / "out")
        theirs = {name: getattr(pipe, name) for name in RANKS}
    else:
        for name in RANKS:
            theirs[name] = PeftModel.from_pretrained(getattr(pipe, name), tmp_path / "out" / name).base_model.model
    errors(outputs(theirs), outputs(networks(parts)), alone)


def delta(kind: str, files: dict[str, Tensor], rank: int) -> Tensor:
    """What is added to a linear layer's weight, by the formula of the kind's paper."""
    t = {name: value.double() for name, value in files.items()}
    scale = ALPHA / (math.sqrt(rank) if kind == "rslora" else rank)
    if kind == "loha":
        return scale * (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    if kind == "lokr":
        small, large = (t[f"lokr_w{i}"] if f"lokr_w{i}" in t else t[f"lokr_w{i}_a"] @ t[f"lokr_w{i}_b"] for i in (1, 2))
        return scale * torch.kron(small, large)
    return scale * t["lora_B.weight"] @ t["lora_A.weight"]


def merged_weight(kind: str, weight: Tensor, files: dict[str, Tensor], rank: int) -> Tensor:
    """The weight of a linear layer with what was learnt."""
    weight = weight.double()
    if kind == "boft":
        (skew,) = files["boft_R"].double()
        skew = (skew - skew.transpose(1, 2)) / 2
        one = torch.eye(rank, dtype=torch.float64)
        turns = (one + skew) @ torch.linalg.inv(one - skew)  # Cayley's transform of each block
        return (weight @ torch.block_diag(*turns)) * files["boft_s"].double()
    if kind == "dora":
        moved = weight + delta(kind, files, rank)
        return files["lora_magnitude_vector"].double()[:, None] * moved / moved.norm(dim=1, keepdim=True)
    return weight + delta(kind, files, rank)


@pytest.mark.parametrize("kind", chosen(KINDS, lambda kind: kind in ("lora", "dora", "boft")))
def test_weights_are_those_of_the_papers(kind, base, tmp_path):
    parts, layer = trained(attached(base, kind)), "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    before = plain(base).family.components["unet"].get_submodule(layer).weight.detach()
    parts.attached.export(tmp_path / "out", parts.objective, None)
    place, outer = (FILE, "unet.") if kind in IN_DIFFUSERS else ("unet/adapter_model.safetensors", "base_model.model.")
    start = f"{outer}{layer}."
    files = load_file(tmp_path / "out" / place)
    own = {name.removeprefix(start): value for name, value in files.items() if name.startswith(start)}
    assert own
    expected = merged_weight(kind, before, own, RANKS["unet"])
    with parts.attached.merged():
        found = parts.family.components["unet"].get_submodule(layer).weight.detach().double()
    assert (found - expected).abs().max() <= 1e-6 * (expected - before).abs().max()


PATTERNS = (
    'adapter.rank_pattern={"attn2.to_?": 3, "*.conv1": null, "unet.mid_block.*": 2}',
    'adapter.alpha_pattern={"ff.net.2": 1.5, "to_?": 6}',
)


@pytest.mark.parametrize("kind", ONE[:-1])
def test_ranks_and_alphas_by_pattern(kind, base, tmp_path):
    """As peft's config in the file says; the first pattern that fits a layer counts."""
    parts = trained(attached(base, kind, *PATTERNS))
    ranks, strengths = dict[str, int](), dict[str, float]()
    for name, module in networks(parts)["unet"].named_modules():
        if hasattr(module, "scaling"):
            ranks[name], strengths[name] = module.r["default"], module.scaling["default"]
    assert not any(name.endswith("conv1") for name in ranks)
    for name, rank in ranks.items():
        last = name.rpartition(".")[2]
        in_cross = ".attn2." in name and last.startswith("to_") and name[-1] != "0"
        assert rank == (3 if in_cross else 2 if name.startswith("mid_block.") else 4), name
        alpha = 1.5 if name.endswith("ff.net.2") else 6 if last in ("to_q", "to_k", "to_v") else ALPHA
        assert strengths[name] == pytest.approx(alpha / (math.sqrt(rank) if kind == "rslora" else rank)), name
    parts.attached.export(tmp_path / "out", parts.objective, None)
    pipe = StableDiffusionPipeline.from_pretrained(base)
    alone = outputs({name: getattr(pipe, name) for name in RANKS})
    if kind in IN_DIFFUSERS:
        pipe.load_lora_weights(tmp_path / "out")
        errors(outputs({name: getattr(pipe, name) for name in RANKS}), outputs(networks(parts)), alone)
    else:
        saved = json.loads((tmp_path / "out/unet/adapter_config.json").read_text())
        assert set(saved["rank_pattern"].values()) == {2, 3}


PRESETS = [
    # base, targets, layers and trained parameters at rank 4 of UNet and text encoders, as counted with peft
    ("sd15", "attention", {"unet": (128, 797_184), "text_encoder": (48, 294_912)}),
    ("sd15", "attention+ff", {"unet": (192, 1_695_744), "text_encoder": (72, 663_552)}),
    ("sd15", "attention+ff+conv", {"unet": (278, 4_203_264)}),
    ("sdxl", "attention", {"unet": (560, 5_806_080)}),
    ("sdxl", "attention+ff", {"unet": (722, 10_639_360), "text_encoder_2": (192, 2_949_120)}),
    ("sdxl", "attention+ff+conv", {"unet": (788, 12_296_960)}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [pytest.param(*each, marks=[] if number == 2 else [pytest.mark.long]) for number, each in enumerate(PRESETS)],
)
def test_names_of_layers_mean_those_of_others(name, targets, expected):
    given = ["adapter.name=lora", "adapter.rank=4", f"adapter.targets={targets}", "run_name=x"]
    given += [f"adapter.ranks.{component}=4" for component in expected if component != "unet"]
    parts = outline(configs.load(name, given).config)
    for component, (layers, numbers) in expected.items():
        network = parts.family.components[component]
        wrapped = [module for module in network.modules() if hasattr(module, "lora_A")]
        trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
        assert (len(wrapped), trained) == (layers, numbers), component


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["adapter.targets=attention+fff"], "fff: allowed: attention, ff, conv, all"),
        (["adapter.targets=[]"], "nothing would be trained"),
        (["adapter.rank_pattern={to_x: 3}"], "targets to_x are no linear layers or convolutions"),
        (["adapter.rank_pattern={to_q: 0}"], "allowed: a whole number from 1 or null"),
        (["adapter.alpha_pattern={to_q: -1}"], "allowed: a number above 0"),
        (["adapter.kind=loha", "adapter.dropout=0.1"], "peft drops inputs of lora, rslora and dora only"),
        (["adapter.kind=boft", f"adapter.alpha={ALPHA}"], "a rotation has no strength"),
        (["adapter.kind=boft", "adapter.rank=5"], "which blocks of rank=5 do not divide"),
        (["adapter.kind=pissa"], "allowed: lora, rslora, dora, loha, lokr, boft"),
    ],
)
def test_what_cannot_be_is_refused(given, said, base):
    with pytest.raises(ValueError, match=r".") as caught:
        plain(base, "adapter.name=lora", *given)
    assert said in " ".join(str(caught.value).split())
