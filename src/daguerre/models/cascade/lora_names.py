"""Names of Stable Cascade's layers in files of LoRAs: those of ComfyUI and OneTrainer, and Stability's numbers.

ComfyUI and OneTrainer have Stability's names of layers, but for attention, whose fused product is `to_q`, `to_k` and
`to_v` there. Stability's own `lora.safetensors` numbers the layers in the order of its modules, and says neither their
names nor alpha, which is 1. Sources: Comfy-Org/ComfyUI comfy/lora.py; Nerogar/OneTrainer
convert_stable_cascade_lora.py; Stability-AI/StableCascade modules/lora.py.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from daguerre.errors import UserError

CLASS = "StableCascadeUNet"
CONFIGS = (".yaml", ".yml")
OFFSETS, IDS = "embeddings.embeddings", "embeddings.indices"
"""Trained words in Stability's files: what is added to the embeddings of these numbers of the vocabulary."""
_NUMBERED = re.compile(r"weights\.(\d+)\.lora_(down|up)")
_KINDS = {
    "attn": (r"attention\.to_(q|k|v|out\.0)",),
    "kv_mapper": (r"kv_mapper\.1",),
    "channelwise": (r"channelwise\.[04]",),
    "mapper": (r"mapper(_sca|_crp)?",),
}
"""Kinds of linear layers in the blocks, by parts of their names that `module_filters` chooses them by."""


@dataclass(frozen=True)
class Config:
    """A config of Stability's code that trains a LoRA, or generates with one."""

    file: Path
    """The LoRA's numbered file."""
    words: tuple[tuple[str, str | None], ...]
    """Each word that is trained beside it, and the pattern of what it starts from: `train_tokens`."""


def config(path: Path) -> Config | None:
    """Reads such a config; None for any other file. UserError where its LoRA is not there."""
    if path.suffix not in CONFIGS or not path.is_file():
        return None
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", code="damaged") from error
    if not isinstance(said, dict) or "module_filters" not in said:
        raise UserError(f"{path} is no config of a LoRA of Stability's code: it has no module_filters", code="unknown")
    given = said.get("lora_checkpoint_path")
    if given is None and (folder := said.get("checkpoint_path")) is not None:
        given = f"{folder}/{said.get('experiment_id')}/lora.safetensors"
    if given is None:
        raise UserError(f"{path} does not say where its LoRA is: add lora_checkpoint_path: FILE", code="missing")
    places = [Path(given).expanduser(), path.parent / given]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise UserError(f"{path} says that its LoRA is {given}, and there is no such file", code="missing")
    words = said.get("train_tokens") or []
    if not all(isinstance(each, list) and len(each) == 2 for each in words):
        raise UserError(f"{path}: train_tokens must be pairs such as ['[rex]', '^dog</w>']", code="damaged")
    return Config(file, tuple((str(name), start) for name, start in words))


def is_new(word: str) -> bool:
    """True of a new word of `train_tokens`, `[rex]` or `<rex>`; others are patterns of tokens of the vocabulary."""
    return (word[:1], word[-1:]) in (("[", "]"), ("<", ">"))


def is_one(network: nn.Module) -> bool:
    """True of Stage C and Stage B."""
    return type(network).__name__ == CLASS


def is_stage_c(network: nn.Module) -> bool:
    """True of Stage C, of the two."""
    return hasattr(network, "clip_txt_mapper")


def prefix(network: nn.Module) -> str:
    """The start of the names of a stage's layers: ComfyUI has one of its own for Stage C, and its usual one for B."""
    return "lora_prior_unet" if is_stage_c(network) else "lora_unet"


def path(network: nn.Module, layer: str) -> str:
    """Name of a layer in ComfyUI and OneTrainer, with dots."""
    named = re.sub(r"\.attention\.(to_[qkv])$", r".attention.attn.\1", layer)
    named = named.replace(".attention.to_out.0", ".attention.attn.out_proj")
    return named if is_stage_c(network) else named.replace("clip_txt_pooled_mapper", "clip_mapper")


def is_numbered(names: Iterable[str]) -> bool:
    """True of the tensors of a LoRA that Stability's code has written."""
    return any(_NUMBERED.fullmatch(name) for name in names)


def named(
    file: Path, tensors: Mapping[str, Tensor], component: str, network: nn.Module, words_are_named: bool = False
) -> dict[str, Tensor]:
    """A numbered file's tensors by layer: attention's fused products have one factor A, which q, k and v share.

    Raises:
        UserError: if the layers cannot be told by their shapes, and for trained words whose names nothing says.
    """
    offsets = tensors.get(OFFSETS)
    if not words_are_named and offsets is not None and offsets.numel() and bool(offsets.ne(0).any()):
        numbers = ", ".join(str(int(each)) for each in tensors.get(IDS, torch.zeros(0)))
        raise UserError(
            f"{file} has trained words beside its layers (numbers {numbers} of the vocabulary), whose names and starts "
            "are only in the YAML that trained them: give that YAML in place of the file, with lora_checkpoint_path: "
            f"{file} in it",
            code="unsupported",
        )
    pairs: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if match := _NUMBERED.fullmatch(name):
            pairs.setdefault(int(match[1]), {})[match[2]] = value
    if sorted(pairs) != list(range(len(pairs))) or any(len(pair) != 2 for pair in pairs.values()):
        raise UserError(f"{file}: some of its numbered layers are missing", code="damaged")
    found: dict[str, Tensor] = {}
    for number, layers in enumerate(_chosen(file, pairs, network)):
        down, up = pairs[number]["down"], pairs[number]["up"]
        for layer, part in zip(layers, up.chunk(len(layers)), strict=True):
            stem = f"{component}.{layer}"
            own = {"lora_A.weight": down, "lora_B.weight": part.contiguous(), "alpha": torch.tensor(1.0)}
            found |= {f"{stem}.{factor}": value for factor, value in own.items()}
    return found


def _chosen(file: Path, pairs: Mapping[int, Mapping[str, Tensor]], network: nn.Module) -> list[tuple[str, ...]]:
    """The layers of each number: those of the one choice of kinds whose shapes are the file's."""
    given = [(len(pairs[number]["up"]), pairs[number]["down"].shape[1]) for number in range(len(pairs))]
    fits = []
    for count in range(1, len(_KINDS) + 1):
        for kinds in combinations(_KINDS, count):
            layers = _in_order(network, [pattern for kind in kinds for pattern in _KINDS[kind]])
            if [_shape(network, each) for each in layers] == given:
                fits.append((kinds, layers))
    if len(fits) == 1:
        return fits[0][1]
    raise UserError(
        f"{file} numbers its {len(pairs)} layers without their names, and they are not those of {', '.join(_KINDS)}, "
        "or of several of these, in this model: give the model that it was trained on, or convert it where it was made",
        code="unsupported",
    )


def _in_order(network: nn.Module, patterns: list[str]) -> list[tuple[str, ...]]:
    """The chosen layers as Stability's modules follow each other: attention's output before its fused product."""
    found: list[tuple[str, ...]] = []
    for name, module in network.named_modules():
        last = re.search(r"(?:down|up)_blocks\.\d+\.\d+\.(.+)", name)
        if not isinstance(module, nn.Linear) or last is None or not any(re.fullmatch(p, last[1]) for p in patterns):
            continue
        stem, _, product = name.rpartition(".to_")
        if not stem:
            found.append((name,))
        elif product == "out.0":
            found += [(name,), tuple(f"{stem}.to_{part}" for part in "qkv")]
    return found


def _shape(network: nn.Module, layers: tuple[str, ...]) -> tuple[int, int]:
    """Rows of these layers in all, and columns."""
    weights: list[Any] = [network.get_submodule(layer).weight for layer in layers]
    return sum(len(weight) for weight in weights), weights[0].shape[1]
