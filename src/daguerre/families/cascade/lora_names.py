"""Names of Stable Cascade's layers in files of LoRAs: those of ComfyUI and OneTrainer, and Stability's numbers.

ComfyUI and OneTrainer have Stability's names of layers, but for attention, whose fused product is `to_q`, `to_k` and
`to_v` there. Stability's own `lora.safetensors` numbers the layers in the order of its modules, and says neither their
names nor alpha, which is 1. Sources: Comfy-Org/ComfyUI comfy/lora.py; Nerogar/OneTrainer
convert_stable_cascade_lora.py; Stability-AI/StableCascade modules/lora.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.lora_files.numbered import Config
from daguerre.models.network import Architecture
from daguerre.models.weights.original_names import FLAT, PREFIXES, Layers, Spelling, flat, spelled

CLASS = "StableCascadeUNet"
CONFIGS = (".yaml", ".yml")
OFFSETS, IDS = "embeddings.embeddings", "embeddings.indices"
"""Trained words in Stability's files: what is added to the embeddings of these numbers of the vocabulary."""
_NUMBERED = re.compile(r"weights\.(\d+)\.lora_(down|up)")
_FILTERS = (".attn", ".kv_mapper", ".channelwise", ".mapper", ".depthwise")
"""Kinds of layers in the blocks, as `module_filters` chooses them: by a part of their names."""
_ORDER = (
    *("clip_txt_mapper", "clip_txt_pooled_mapper", "clip_img_mapper", "embedding", "down_blocks", "down_downscalers"),
    *("down_repeat_mappers", "up_blocks", "up_upscalers", "up_repeat_mappers", "clf"),
)
"""Parts of Stage C in the order of Stability's modules."""
_PLACES = {part: place for place, part in enumerate(_ORDER)}


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
    filters = said["module_filters"]
    if filters is not None and not (isinstance(filters, list) and all(isinstance(each, str) for each in filters)):
        raise UserError(f"{path}: module_filters must be a list of parts of names, such as ['.attn']", code="damaged")
    pairs = tuple((str(name), start) for name, start in words)
    return Config(file, pairs, None if filters is None else tuple(filters))


def is_new(word: str) -> bool:
    """True of a new word of `train_tokens`, `[rex]` or `<rex>`; others are patterns of tokens of the vocabulary."""
    return (word[:1], word[-1:]) in (("[", "]"), ("<", ">"))


def is_one(network: nn.Module) -> bool:
    """True of Stage C and Stage B."""
    return type(network).__name__ == CLASS


def is_stage_c(network: nn.Module) -> bool:
    """True of Stage C, of the two."""
    return hasattr(network, "clip_txt_mapper")


@dataclass(frozen=True)
class StageNames:
    """Names of the layers of Stage C and B: diffusers', Stability's with attention's products apart, and OneTrainer's
    numbers of these."""

    text_encoders: str = "prior_te"
    swapped: frozenset[str] = frozenset()

    def spellings(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> Iterator[Spelling]:
        network, numbers = networks[component], {"to_q": "0", "to_k": "1", "to_v": "2"}
        flattened = {*FLAT, f"{prefix(network)}_"}
        for layer in layers:
            stability = path(network, layer)
            stem, _, last = stability.rpartition(".attn.")
            names = {layer, stability, f"{stem}.attn.in_proj.{numbers[last]}" if last in numbers else stability}
            for name in names:
                yield from spelled(name, (layer,), (f"{component}.", *PREFIXES, "unet."), flattened, is_original=True)

    def kohya(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> dict[str, Layers]:
        network = networks[component]
        return {f"{prefix(network)}_{flat(path(network, layer))}": (layer,) for layer in layers}


def architecture(network: nn.Module, prediction: str) -> Architecture:
    """Stage C or B; sd-scripts has no name for them."""
    return Architecture(f"stable-cascade-v1-{'prior' if is_stage_c(network) else 'stage-b'}")


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
    file: Path, tensors: Mapping[str, Tensor], component: str, network: nn.Module, said: Config | None = None
) -> dict[str, Tensor]:
    """A numbered file's tensors by layer: attention's fused products have one factor A, which q, k and v share.

    Args:
        said: the config that trained it, if that is known: it says which layers there are, and names the words.

    Raises:
        UserError: if the layers cannot be distinguished by their shapes, and for trained words whose names nothing
        says.
    """
    offsets = tensors.get(OFFSETS)
    if said is None and offsets is not None and offsets.numel() and bool(offsets.ne(0).any()):
        numbers = ", ".join(str(int(each)) for each in tensors.get(IDS, torch.zeros(0)))
        raise UserError(
            f"{file} also has trained words (numbers {numbers} of the vocabulary), whose names and starts are only in "
            "the YAML that trained them: give that YAML in place of the file, with lora_checkpoint_path: "
            f"{file} in it",
            code="unsupported",
        )
    if strange := [name for name in tensors if name not in (OFFSETS, IDS) and not _NUMBERED.fullmatch(name)]:
        raise UserError(f"{file} has {strange[0]}, which is no part of a LoRA of Stability's code", code="unknown")
    pairs: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if match := _NUMBERED.fullmatch(name):
            pairs.setdefault(int(match[1]), {})[match[2]] = value
    whole = all(len(pair) == 2 and all(each.dim() == 2 for each in pair.values()) for pair in pairs.values())
    if sorted(pairs) != list(range(len(pairs))) or not whole:
        raise UserError(f"{file}: some of its numbered layers are missing, or no pairs of matrices", code="damaged")
    found: dict[str, Tensor] = {}
    for number, layers in enumerate(_chosen(file, pairs, network, said)):
        down, up = pairs[number]["down"], pairs[number]["up"]
        kernel = _weight(network, layers[0]).shape[2:]  # the same is added at each place of a kernel
        down = down.reshape(*down.shape, *(1 for _ in kernel)).expand(*down.shape, *kernel).contiguous()
        for layer, part in zip(layers, up.chunk(len(layers)), strict=True):
            stem = f"{component}.{layer}"
            own = {"lora_A.weight": down, "lora_B.weight": part.contiguous(), "alpha": torch.tensor(1.0)}
            found |= {f"{stem}.{factor}": value for factor, value in own.items()}
    return found


def _chosen(
    file: Path, pairs: Mapping[int, Mapping[str, Tensor]], network: nn.Module, said: Config | None
) -> list[tuple[str, ...]]:
    """The layers of each number: those that the config chooses, else of the one choice of kinds whose shapes are the
    file's."""
    given = [(len(pairs[number]["up"]), pairs[number]["down"].shape[1]) for number in range(len(pairs))]
    every = _in_order(network)
    if said is not None:
        layers = [own for name, own in every if said.filters is None or any(part in name for part in said.filters)]
        if [_shape(network, each) for each in layers] == given:
            return layers
        raise UserError(
            f"{file} has {len(pairs)} numbered layers, and module_filters={list(said.filters or [])} means "
            f"{len(layers)} in this model, or layers of other shapes: give the config and the model that trained it",
            code="unsupported",
        )
    fits = []
    for count in range(1, len(_FILTERS) + 1):
        for filters in combinations(_FILTERS, count):
            layers = [own for name, own in every if "_blocks." in name and any(part in name for part in filters)]
            if layers and [_shape(network, each) for each in layers] == given and layers not in fits:
                fits.append(layers)
    if len(fits) == 1:
        return fits[0]
    raise UserError(
        f"{file} numbers its {len(pairs)} layers without their names, and they are not those of "
        f"{', '.join(_FILTERS)}, or of several of these, in this model: give the model that it was trained on, or the "
        "YAML that trained it in place of the file (its module_filters says which layers)",
        code="unsupported",
    )


def _in_order(network: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    """Stability's name and the layers of each module that can have an addition there, as its modules follow each other:
    attention's output before its fused product."""
    found: list[tuple[str, tuple[str, ...]]] = []
    own = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    for name in sorted(own, key=lambda name: _PLACES.get(name.partition(".")[0], len(_PLACES))):
        stem, _, product = name.rpartition(".to_")
        if not stem:
            found.append((name, (name,)))
        elif product == "out.0":
            fused = tuple(f"{stem}.to_{part}" for part in "qkv")
            found += [(f"{stem}.attn.out_proj", (name,)), (f"{stem}.attn", fused)]
    return found


def _weight(network: nn.Module, layer: str) -> Tensor:
    weight = network.get_submodule(layer).weight
    assert isinstance(weight, Tensor)
    return weight


def _shape(network: nn.Module, layers: tuple[str, ...]) -> tuple[int, int]:
    """Rows of these layers in all, and columns."""
    weights = [_weight(network, layer) for layer in layers]
    return sum(len(weight) for weight in weights), weights[0].shape[1]
