"""Names that programs have for layers in files of LoRAs, and for the factors of an addition to one.

Sources: huggingface/diffusers; huggingface/peft; kohya-ss/sd-scripts; KohakuBlueleaf/LyCORIS; Comfy-Org/ComfyUI
comfy/lora.py; Nerogar/OneTrainer (its formats Kohya, Legacy, Comfy, Original, Diffusers and OMI).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import nn

from daguerre.errors import UserError
from daguerre.models.lora_files.addition import ALPHA, COLUMNS, DIFF, DOWN, MAGNITUDE, MIDDLE, UP
from daguerre.models.network import facts_of
from daguerre.models.parts.text.names import of_others
from daguerre.models.weights.original_names import Spelling


class Place(NamedTuple):
    """The layers of the model that a name in a file means."""

    component: str
    layers: tuple[str, ...]
    """One, or those that the original layout has as one fused projection."""
    is_original: bool
    """Whether the name is of the original layout, whose halves may be in another order."""


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
# The longest first: some are the end of others.
_ENDINGS = sorted(_SPELLINGS, key=len, reverse=True)
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)\.(?!weight$|bias$)\w+(\.weight|\.bias|$)")
"""peft's names with that of the adapter in them, as a network with it has them."""
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:base_model\.model|module|_orig_mod)\.")
"""Levels of names that peft, several devices and a compiler add."""
_PROCESSOR = re.compile(r"\.(?:processor\.(to_[qkv]|to_out)|self_attn\.to_([qkv]|out))$")
"""Layers of attention in files of older versions of diffusers: of UNets, and of text encoders."""


def parted(name: str, path: Path) -> tuple[str, str]:
    """Name of the module, as the file has it but for levels that wrap it, and the factor that a tensor is. UserError
    for what is no factor."""
    plain = _ADAPTER.sub(r".\1\2", name)
    ending = next((each for each in _ENDINGS if plain.endswith(each) and plain != each), None)
    if ending is None:
        raise UserError(f"{path} has {name}, which is no part of a LoRA, LoHa or LoKr", code="unknown")
    stem = _WRAPPERS.sub("", plain.removesuffix(ending))
    return _PROCESSOR.sub(_today, stem), _SPELLINGS[ending]


def _today(match: re.Match[str]) -> str:
    of_unet, of_text = match.groups()
    if of_unet:
        return f".{of_unet}{'.0' if of_unet == 'to_out' else ''}"
    return f".self_attn.{of_text}_proj"


def layers(networks: Mapping[str, nn.Module]) -> dict[str, Place]:
    """The layers of the model by every name that a file may have for them, but for names that would mean two."""
    found: dict[str, Place] = {}
    double = set[str]()
    for component, network in networks.items():
        own = [name for name, module in network.named_modules() if _has_weight(module)]
        for name, meant, is_original in _spelt(component, networks, own):
            place = Place(component, meant, is_original)
            if found.setdefault(name, place)[:2] != place[:2]:
                double.add(name)
    return {name: place for name, place in found.items() if name not in double}


def _spelt(component: str, networks: Mapping[str, nn.Module], own: list[str]) -> Iterator[Spelling]:
    names = facts_of(networks[component]).names
    if names is None:
        yield from of_others(component, own)
    else:
        yield from names.spellings(component, networks, own)


def _has_weight(module: nn.Module) -> bool:
    """True of linear layers, convolutions and norms of any class: what files of this kind change."""
    if isinstance(module, nn.Linear | nn.Conv2d):  # of few bits, too, whose weight is no parameter but made when read
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 1
