"""Names that programs have for layers in files of LoRAs, and for the factors of an addition to one.

Sources: huggingface/diffusers; huggingface/peft; kohya-ss/sd-scripts; KohakuBlueleaf/LyCORIS; Comfy-Org/ComfyUI
comfy/lora.py; Nerogar/OneTrainer (its formats Kohya, Legacy, Comfy, Original, Diffusers and OMI).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from daguerre.errors import UserError
from daguerre.models.cascade import lora_names
from daguerre.models.lora_files import kohya
from daguerre.models.lora_files.addition import ALPHA, COLUMNS, DIFF, DOWN, MAGNITUDE, MIDDLE, UP
from daguerre.models.single_file.keys import with_wrapper

Place = tuple[str, str]
"""(component, layer)"""
BIAS, BIAS_OF_UP = "diff_b", "lora_B.bias"
"""What is added to a bias: as it is, or multiplied by the scale of the same layer's product."""
_SPELLINGS = {
    ".lora_down.weight": DOWN,
    ".lora_up.weight": UP,
    ".lora_mid.weight": MIDDLE,
    ".lora_A.weight": DOWN,
    ".lora_B.weight": UP,
    ".lora.down.weight": DOWN,
    ".lora.up.weight": UP,
    ".lora_linear_layer.down.weight": DOWN,
    ".lora_linear_layer.up.weight": UP,
    "_lora.down.weight": DOWN,
    "_lora.up.weight": UP,
    ".lora_magnitude_vector.weight": MAGNITUDE,
    ".lora_magnitude_vector": MAGNITUDE,
    ".magnitude": MAGNITUDE,  # ai-toolkit's
    **{f".{name}": name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
    **{f".{name}": name for name in ("lokr_t2", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1")},
    ".hada_t2": "hada_t2",
    ".dora_scale": COLUMNS,
    ".alpha": ALPHA,
    ".diff": DIFF,
    ".w_norm": DIFF,
    ".diff_b": BIAS,
    ".b_norm": BIAS,
    ".lora_B.bias": BIAS_OF_UP,
}
"""Ends of tensors' names, and the factors that they are."""
_ENDINGS = sorted(_SPELLINGS, key=len, reverse=True)
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)\.(?!weight$|bias$)\w+(\.weight|\.bias|$)")
"""peft's names with that of the adapter in them, as a network with it has them."""
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:base_model\.model|module|_orig_mod)\.")
"""Levels of names that peft, several devices and a compiler add."""
_PROCESSOR = re.compile(r"\.(?:processor\.(to_[qkv]|to_out)|self_attn\.to_([qkv]|out))$")
"""Layers of attention in files of older versions of diffusers: of UNets, and of text encoders."""
_CLIP = re.compile(r"text_encoder(_\d)?")
_ORIGINALS = ("diffusion_model.", "model.diffusion_model.", "unet.", "")
"""Before names of the original layout: ComfyUI's and checkpoints', OneTrainer's OMI and Original."""


def parted(name: str, path: Path) -> tuple[str, str]:
    """Name of the module, as the file has it but for levels that wrap it, and the factor that a tensor is. UserError
    for what is no factor."""
    plain = _ADAPTER.sub(r".\1\2", name)
    ending = next((each for each in _ENDINGS if plain.endswith(each)), None)
    if ending is None:
        raise UserError(f"{path} has {name}, which is no part of a LoRA, LoHa or LoKr", code="unknown")
    stem = _WRAPPERS.sub("", plain.removesuffix(ending))
    return _PROCESSOR.sub(_today, stem).replace("unet.unet.", "unet.", 1), _SPELLINGS[ending]


def _today(match: re.Match[str]) -> str:
    of_unet, of_text = match.groups()
    if of_unet:
        return f".{of_unet}{'.0' if of_unet == 'to_out' else ''}"
    return f".self_attn.{of_text}_proj"


def layers(networks: Mapping[str, nn.Module]) -> dict[str, Place]:
    """(component, layer) by every name that a file may have for it, but for names that would mean two of them."""
    found: dict[str, Place] = {}
    double = set[str]()
    for component, network in networks.items():
        own = [name for name, module in network.named_modules() if _has_weight(module)]
        for name, layer in _spelt(component, networks, own):
            if found.setdefault(name, (component, layer)) != (component, layer):
                double.add(name)
    return {name: place for name, place in found.items() if name not in double}


def _has_weight(module: nn.Module) -> bool:
    """True of linear layers, convolutions and norms: what files of this kind change."""
    return isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm | nn.GroupNorm) and module.weight is not None


def _spelt(component: str, networks: Mapping[str, nn.Module], own: list[str]) -> Iterator[tuple[str, str]]:
    network = networks[component]
    if _CLIP.fullmatch(component):
        yield from _of_text(component, networks, own)
    elif lora_names.is_one(network):
        yield from _of_cascade(component, network, own)
    else:
        yield from ((f"{component}.{layer}", layer) for layer in own)
    if type(network).__name__ == "UNet2DConditionModel":
        yield from ((layer, layer) for layer in own)
        yield from ((f"{start}{layer.replace('.', '_')}", layer) for layer in own for start in _FLAT)
        for layer, original in _originals(network).items():
            yield from ((f"{start}{original}", layer) for start in _ORIGINALS)
            yield from ((f"{start}{original.replace('.', '_')}", layer) for start in _FLAT)


_FLAT = ("lora_unet_", "lycoris_")


def _of_text(component: str, networks: Mapping[str, nn.Module], own: list[str]) -> Iterator[tuple[str, str]]:
    texts = sorted(name for name in networks if _CLIP.fullmatch(name))
    number, alone = texts.index(component), len(texts) == 1
    clips = ("clip_l", "clip_h", "clip_g") if alone else (("clip_l", "clip_g")[number],)
    dotted = [
        f"{component}.",
        *(f"{clip}." for clip in clips),
        *(f"text_encoders.{clip}.transformer." for clip in clips),
    ]
    flat = ["lora_te_", "lora_te1_", "lora_prior_te_"] if alone else [f"lora_te{number + 1}_"]
    dotted += [""] if alone else []
    flat += ["lora_te_wrapped_transformer_"] if alone else []
    for layer in own:
        for spelling in {layer, layer.removeprefix("text_model."), with_wrapper(layer)}:
            yield from ((f"{start}{spelling}", layer) for start in dotted)
            yield from ((f"{start}{spelling.replace('.', '_')}", layer) for start in flat)


def _of_cascade(component: str, network: nn.Module, own: list[str]) -> Iterator[tuple[str, str]]:
    """Of Stage C or B: diffusers' names, Stability's with attention's products apart, and OneTrainer's numbers of
    these."""
    numbers = {"to_q": "0", "to_k": "1", "to_v": "2"}
    for layer in own:
        stability = lora_names.path(network, layer)
        stem, _, last = stability.rpartition(".attn.")
        spelt = {layer, stability, f"{stem}.attn.in_proj.{numbers[last]}" if last in numbers else stability}
        for spelling in spelt:
            yield from ((f"{start}{spelling}", layer) for start in (f"{component}.", *_ORIGINALS))
            yield from ((f"{start}{spelling.replace('.', '_')}", layer)
                        for start in {*_FLAT, f"{lora_names.prefix(network)}_"})  # fmt: skip


def _originals(unet: nn.Module) -> dict[str, str]:
    """Names in the original layout; none of a UNet for which that has no place."""
    try:
        return kohya.original_names(unet)
    except UserError:
        return {}
