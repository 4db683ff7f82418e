"""The file of a LoRA for kohya's trainer, ComfyUI and A1111, as diffusers and ComfyUI's formula apply it.

The formula is written here apart from the product: W + alpha / rank * up @ down, on the weights of a single file.
"""

import hashlib
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors import safe_open
from safetensors.torch import load_file
from test_lora import config, errors, networks, outputs
from test_lora_kinds import trained
from tiny_models import write_sd, write_sdxl
from torch import Tensor

from daguerre.assembly.parts import Components, build
from daguerre.families.stable_diffusion.single_file import save
from daguerre.models.lora_files.addition import KOHYA_FILE
from daguerre.samplers.settings import SamplingSettings

PIPELINES = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
MIXED = (
    "adapter.targets=attention+ff+conv",
    'adapter.rank_pattern={"attn2.to_?": 3, "mid_block.*": 2}',
    'adapter.alpha_pattern={"ff.net.2": 1.5, "to_?": 6}',
)
CASES = {"alpha": (), "alpha of the rank": ("adapter.alpha=null",), "mixed ranks, alphas and convolutions": MIXED}
QUICK = (("sd", "alpha"), ("sdxl", "mixed ranks, alphas and convolutions"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    write_sd(folder / "sd")
    write_sdxl(folder / "sdxl")
    return {kind: folder / kind for kind in PIPELINES}


def built(kind: str, base: Path, *more: str) -> Components:
    """UNet and text encoders with additions that have an effect."""
    return trained(build(config(kind, base, *more), torch.device("cpu")))


def exported(parts: Components, folder: Path) -> Path:
    parts.attached.export(folder, parts.objective, None)
    return folder / KOHYA_FILE


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=[] if (kind, case) in QUICK else [pytest.mark.long])
        for kind in PIPELINES
        for case in CASES
    ],
)
def test_diffusers_applies_what_was_trained(kind, case, bases, tmp_path):
    parts, pipe = built(kind, bases[kind], *CASES[case]), PIPELINES[kind].from_pretrained(bases[kind])
    alone = outputs({name: getattr(pipe, name) for name in networks(parts, kind)})
    pipe.load_lora_weights(exported(parts, tmp_path / "out"))
    found = outputs({name: getattr(pipe, name) for name in networks(parts, kind)})
    errors(found, outputs(networks(parts, kind)), alone)


def product(own: dict[str, Tensor]) -> Tensor:
    """Without alpha / rank: of LoRA, LoHa and LoKr, as ComfyUI's comfy/weight_adapter does."""
    t = {name: value.double() for name, value in own.items()}
    if "hada_w1_a" in t:
        return (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    if "lora_up.weight" in t:
        return t["lora_up.weight"].flatten(1) @ t["lora_down.weight"].flatten(1)
    one = t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]
    two = t["lokr_w2"] if "lokr_w2" in t else t["lokr_w2_a"] @ t["lokr_w2_b"]
    return torch.kron(one if two.dim() == 2 else one[:, :, None, None], two)


def strength(own: dict[str, Tensor]) -> float:
    """alpha / rank; ComfyUI takes 1 for a Kronecker product of two whole matrices."""
    for name in ("lora_down.weight", "hada_w1_b", "lokr_w1_b", "lokr_w2_b"):
        if name in own:
            return float(own["alpha"]) / len(own[name])
    return 1.0


def module_names(kind: str, single: dict[str, Tensor]) -> dict[str, str]:
    """The key of the weight of a single file that a module of SDXL's UNet means."""
    stem = "model.diffusion_model."
    weights = [key.removeprefix(stem) for key in single if key.startswith(stem) and key.endswith(".weight")]
    return {f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}": f"{stem}{key}" for key in weights}


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm", ["lora", *(pytest.param(each, marks=pytest.mark.long) for each in ("rslora", "loha", "lokr"))]
)
def test_comfyuis_formula_gives_the_merged_unet(algorithm, bases, tmp_path):
    """SDXL, whose modules have the names of the original layout: those of a single file."""
    parts = built("sdxl", bases["sdxl"], f"adapter.kind={algorithm}", *MIXED)
    with safe_open(exported(parts, tmp_path / "out"), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save.write(tmp_path / "base.safetensors", bases["sdxl"])
    weights = {name: value.double() for name, value in load_file(tmp_path / "base.safetensors").items()}
    names = module_names("sdxl", weights)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        module, _, factor = name.partition(".")
        if module.startswith("lora_unet_"):
            modules.setdefault(module, {})[factor] = value
    before = {names[module]: weights[names[module]].clone() for module in modules}
    for module, own in modules.items():
        weight = weights[names[module]]
        weight += strength(own) * product(own).reshape(weight.shape)
    with parts.attached.merged():
        parts.family.export(tmp_path / "merged", parts.objective, SamplingSettings())
    save.write(tmp_path / "merged.safetensors", tmp_path / "merged")
    merged = load_file(tmp_path / "merged.safetensors")
    assert len(before) > 20
    for name, value in before.items():
        effect = (weights[name] - value).abs().max()
        assert effect > 0
        assert (merged[name].double() - weights[name]).abs().max() <= 1e-5 * effect, name


def test_a_trigger_phrase_that_no_caption_has_is_told(bases):
    (lora,) = built("sd", bases["sd"], "adapter.trigger_phrase=sks dog, zebra").attached.trainables.values()
    asked: list[int] = []

    def captions(count: int) -> list[str]:
        asked.append(count)
        return ["a photo of SKS dog", "a cat"]

    (line,) = lora.unseen(captions)
    assert line.startswith("the trigger_phrase 'zebra' is in none of the first 2 captions")
    assert asked == [200]
    (plain,) = built("sd", bases["sd"]).attached.trainables.values()
    assert plain.unseen(captions) == []
    assert asked == [200], "nothing is read where nothing is looked for"


def test_the_header_says_what_it_is(bases, tmp_path):
    file = exported(built("sd", bases["sd"], "adapter.trigger_phrase=sks dog"), tmp_path / "out")
    with safe_open(file, "pt") as opened:
        header, names = opened.metadata(), list(opened.keys())
    assert header["ss_network_module"] == "networks.lora"
    assert (header["ss_network_dim"], header["ss_network_alpha"], header["ss_v2"]) == ("4", "2.5", "False")
    assert header["modelspec.trigger_phrase"] == "sks dog"
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert header["sshs_model_hash"] == hashlib.sha256(data[start:]).hexdigest()
    assert any(name.startswith("lora_te_text_model_encoder_layers_0_self_attn_q_proj.") for name in names)
    assert len({float(load_file(file)[name]) for name in names if name.endswith(".alpha")}) == 1
