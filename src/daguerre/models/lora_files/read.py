"""Reads files of LoRA and its kin: diffusers' and peft's, kohya's and LyCORIS', whatever program wrote them.

Every tensor of a file is applied, with the strength that the file's writer gave it, or the file is refused with what is
wrong: a layer that the model does not have, a factor that is missing, a shape of another model, a number that is none.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.cascade import lora_names
from daguerre.models.lora_files import header, kohya, peft
from daguerre.models.lora_files.addition import (
    ALPHA,
    COLUMNS,
    DIFFUSERS_FILE,
    DOWN,
    KOHYA_FILE,
    MAGNITUDE,
    METADATA,
    MIDDLE,
    UP,
    Addition,
)
from daguerre.models.lora_files.strangers import check_is_lora
from daguerre.models.single_file.keys import with_wrapper
from daguerre.models.weights.files import opened, read_json

_SPELLINGS = {
    ".lora_down.weight": DOWN,
    ".lora_up.weight": UP,
    ".lora_mid.weight": MIDDLE,
    ".lora_A.weight": DOWN,
    ".lora_B.weight": UP,
    ".lora_A.default.weight": DOWN,
    ".lora_B.default.weight": UP,
    ".lora.down.weight": DOWN,
    ".lora.up.weight": UP,
    ".lora_linear_layer.down.weight": DOWN,
    ".lora_linear_layer.up.weight": UP,
    "_lora.down.weight": DOWN,
    "_lora.up.weight": UP,
    ".lora_magnitude_vector.weight": MAGNITUDE,
    ".lora_magnitude_vector": MAGNITUDE,
    **{f".{name}": name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
    **{f".{name}": name for name in ("lokr_t2", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1")},
    ".hada_t2": "hada_t2",
    ".dora_scale": COLUMNS,
    ".alpha": ALPHA,
}
"""Ends of tensors' names, and the factors that they are."""
_ENDINGS = sorted(_SPELLINGS, key=len, reverse=True)
_WHOLE = ({DOWN, UP}, {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"})
_REFUSED = {
    ".diff": "a difference of a whole weight (LyCORIS full), which is not supported",
    ".diff_b": "a difference of a whole bias (LyCORIS full), which is not supported",
    ".lora_B.bias": "a bias (peft's lora_bias), which is not supported",
    ".oft_blocks": "an OFT, which is not supported",
    ".boft_R": "a BOFT: merge it with peft, or `daguerre convert export RUN format=diffusers`",
}
_PROCESSOR = re.compile(r"\.processor\.(to_[qkv]|to_out)$")
"""Layers of attention in files of older versions of diffusers."""
_Place = tuple[str, str]
"""(component, layer)"""


class Contents(NamedTuple):
    """Tensors and header of a file, or of a folder of peft's."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    numbers: dict[str, Any]
    """peft's configs, by component and key joined by a dot; empty where there are none."""


def read(path: Path, networks: Mapping[str, nn.Module], *, tokens_apart: bool = False) -> dict[str, list[Addition]]:
    """The additions of a file, or of a folder that holds one, by component and the networks' layers.

    Args:
        networks: all components of the model, without additions of their own.
        tokens_apart: new tokens in the file are read as well, by `token_files`; else they are refused.

    Raises:
        UserError: for a file that is not wholly understood, or made for another model.
    """
    place = find(path)
    contents = _with_names(place, contents_of(place), networks)
    if tokens_apart:
        kept = {name: value for name, value in contents.tensors.items() if not name.startswith("bundle_emb.")}
        contents = contents._replace(tensors=kept)
    cascade = any(map(lora_names.is_one, networks.values()))
    check_is_lora(place, [name for name in contents.tensors if not (cascade and name.startswith("lora_prior_"))])
    layers = _layers(networks)
    modules: dict[_Place, dict[str, tuple[str, Tensor]]] = {}
    unknown = set[str]()
    for name, value in contents.tensors.items():
        stem, factor = _parted(name, place)
        if (layer := layers.get(stem)) is None:
            unknown.add(stem)
            continue
        _check_numbers(place, name, value)
        own = modules.setdefault(layer, {})
        if factor in own:
            raise UserError(f"{place} has {'.'.join(layer)} twice: {own[factor][0]} and {name}", code="conflict")
        own[factor] = name, value
    if unknown:
        raise UserError(_lost(place, sorted(unknown), layers, contents.metadata), code="unknown")
    if not modules:
        raise UserError(f"{place} has no additions in it", code="empty")
    scales = {component: _Scales(place, component, contents.numbers) for component in networks}
    found: dict[str, list[Addition]] = {}
    for (component, layer_name), named in modules.items():
        factors = {factor: value for factor, (_, value) in named.items()}
        addition = _addition(place, component, layer_name, factors, scales[component])
        _check_shape(place, component, addition, networks[component])
        found.setdefault(component, []).append(addition)
    return {component: found[component] for component in networks if component in found}


def _instead(path: Path) -> str:
    """The use of a folder without a LoRA, as a part of a message."""
    for place in (path, path / "adapter", path / "pipeline"):
        if (place / "model_index.json").is_file():
            return "it is a whole model, and `daguerre convert extract` makes a LoRA of its difference from a base"
        if (config := place / "config.json").is_file() and b"ControlNetModel" in config.read_bytes():
            return f"it is a ControlNet, which `daguerre generate` takes as controlnets='{{{path}: 1}}'"
    return "give a .safetensors file, or the folder of a LoRA's run"


def _with_names(place: Path, contents: Contents, networks: Mapping[str, nn.Module]) -> Contents:
    """The tensors of a file of Stability's by the names of Stage C's layers, which it only numbers."""
    if not lora_names.is_numbered(contents.tensors):
        return contents
    is_config = place.suffix in lora_names.CONFIGS
    for component, network in networks.items():
        if lora_names.is_one(network):
            tensors = lora_names.named(place, contents.tensors, component, network, words_are_named=is_config)
            return contents._replace(tensors=tensors)
    raise UserError(f"{place} is a LoRA for Stage C of Stable Cascade, which this model is not", code="unsupported")


def find(path: Path) -> Path:
    """The file of a LoRA: itself, or the one in a run's folder or in what it exports; a folder of peft's, and a config
    of Stability's code that names the file, as they are. UserError if there is none."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path}: there is no such file", code="missing")
        return path
    for place in (path, path / "adapter", path / "pipeline"):  # runs of older versions have it in pipeline/
        inner = sorted(each for each in place.iterdir() if each.is_dir()) if place.is_dir() and place != path else []
        own = _in(place)  # beside it folders hold the same for peft
        found = [own] if own else [file for folder in inner if (file := _in(folder))]
        if len(found) > 1:
            folders = ", ".join(str(each if each.is_dir() else each.parent) for each in found)
            raise UserError(f"{path} holds several LoRAs: give one of {folders}", code="conflict")
        if found:
            return found[0]
    raise UserError(f"{path} holds no LoRA: {_instead(path)}", code="missing")


def _in(folder: Path) -> Path | None:
    """The file of a LoRA in a folder; kohya's first, whose strength every program reads alike."""
    named = next((folder / name for name in (KOHYA_FILE, DIFFUSERS_FILE) if (folder / name).is_file()), None)
    return named or (folder if peft_folders(folder) else None)


def peft_folders(folder: Path) -> list[Path]:
    """The folders of components in peft's layout: below a folder, or itself."""
    inner = sorted(path.parent for path in folder.glob(f"*/{peft.WEIGHTS}"))
    return inner or ([folder] if (folder / peft.WEIGHTS).is_file() else [])


def files_of(place: Path) -> list[Path]:
    """The files of tensors of what `find` gives."""
    if (config := lora_names.config(place)) is not None:
        return [config.file]
    return [folder / peft.WEIGHTS for folder in peft_folders(place)] if place.is_dir() else [place]


def contents_of(place: Path) -> Contents:
    """All of a file, mapped from it, or of a folder of peft's. UserError for one that is damaged, or pickled."""
    if place.is_dir():
        tensors, numbers = dict[str, Tensor](), dict[str, Any]()
        for folder in peft_folders(place):
            own = _file(folder / peft.WEIGHTS).tensors
            tensors |= {f"{folder.name}.{name.removeprefix(peft.STEM)}": value for name, value in own.items()}
            numbers |= {f"{folder.name}.{key}": v for key, v in read_json(folder / peft.CONFIG).items()}
        return Contents(tensors, {}, numbers)
    return _file(*files_of(place))


def _file(path: Path) -> Contents:
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: only .safetensors files are read: others can run code when they are opened")
    with opened(path) as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    try:
        numbers = json.loads(metadata.get(METADATA, "{}"))
    except ValueError:
        numbers = None
    if not isinstance(numbers, dict):
        raise UserError(f"{path}: {METADATA} in its header is not a JSON object", code="damaged")
    return Contents(tensors, metadata, numbers)


def _parted(name: str, path: Path) -> tuple[str, str]:
    """Name of the module, as the file has it, and the factor that a tensor is."""
    for mark, why in _REFUSED.items():
        if name.endswith(mark):
            raise UserError(f"{path} has {name}: {why}", code="unsupported")
    ending = next((each for each in _ENDINGS if name.endswith(each)), None)
    if ending is None:
        raise UserError(f"{path} has {name}, which is no part of a LoRA, LoHa or LoKr", code="unknown")
    stem = name.removesuffix(ending).removeprefix(peft.STEM)
    stem = _PROCESSOR.sub(lambda match: f".{match[1]}{'.0' if match[1] == 'to_out' else ''}", stem)
    return stem, _SPELLINGS[ending]


def _check_numbers(path: Path, name: str, value: Tensor) -> None:
    """UserError for NaN, and for an alpha of which programs make different things."""
    if not torch.isfinite(value).all():
        raise UserError(f"{path}: {name} has NaN or infinity in it", code="damaged")
    if name.endswith(".alpha") and (value.numel() != 1 or float(value) == 0):
        given = (
            "0, which sd-scripts takes for the rank and others for no addition" if value.numel() == 1 else "no number"
        )
        raise UserError(f"{path}: {name} is {given}: write the file again with another alpha", code="damaged")


def _layers(networks: Mapping[str, nn.Module]) -> dict[str, _Place]:
    """(component, layer) by every name that a file may have for it."""
    found: dict[str, _Place] = {}
    for component, network in networks.items():
        own = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
        for layer in own:
            for spelling in (layer, layer.removeprefix("text_model."), with_wrapper(layer)):
                found[f"{component}.{spelling}"] = component, layer
        if kohya.has_names(network):
            for name, layer in _kohya_names(component, networks, own):
                found[name] = component, layer
    return found


def _kohya_names(component: str, networks: Mapping[str, nn.Module], layers: list[str]) -> Iterable[tuple[str, str]]:
    """Names of sd-scripts and LyCORIS, and the layer of each; of a UNet all that ComfyUI has for it."""
    for layer, name in kohya.module_names(component, networks, layers).items():
        yield name, layer
        if lora_names.is_one(networks[component]):  # and with diffusers' names of attention's products
            yield f"{lora_names.prefix(networks[component])}_{layer.replace('.', '_')}", layer
        elif name.startswith("lora_unet_"):
            flat = layer.replace(".", "_")
            yield from ((f"lora_unet_{flat}", layer), (f"lycoris_{flat}", layer))
        else:  # sd-scripts and LyCORIS write so with transformers 5.6 and later
            yield name.replace("_text_model_", "_", 1), layer
    if type(networks[component]).__name__ == "UNet2DConditionModel":
        for layer, original in _originals(networks[component]).items():
            yield f"diffusion_model.{original}", layer
            yield f"lora_unet_{original.replace('.', '_')}", layer


def _originals(unet: nn.Module) -> dict[str, str]:
    """Names in the original layout; none of a UNet for which that has no place."""
    try:
        return kohya.original_names(unet)
    except UserError:
        return {}


def _lost(path: Path, unknown: list[str], layers: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(unknown[0], layers, n=2)
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    named = header.architecture(metadata)
    return (
        f"{path} was made for another model{f' ({named})' if named else ''}: this one has no {unknown[0]} "
        f"({len(unknown):,} of the file's modules are unknown{hint})"
    )


class _Scales:
    """The scales that peft's config gives the layers of a component."""

    def __init__(self, path: Path, component: str, numbers: Mapping[str, Any]) -> None:
        own = {key.removeprefix(f"{component}."): v for key, v in numbers.items() if key.startswith(f"{component}.")}
        self.is_rslora = bool(own.get("use_rslora"))
        try:
            self.alpha, self.alphas = _of_config(own, "lora_alpha" if "lora_alpha" in own else "alpha", "alpha_pattern")
            self.rank, self.ranks = _of_config(own, "r", "rank_pattern")
        except (re.error, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: peft's config of {component} cannot be read: {error}", code="damaged") from error

    def of(self, layer: str, rank: int | None) -> float:
        """alpha / rank, or alpha / sqrt(rank); by the config's rank for factors that show none. 1 without a config."""
        alpha = _of_layer(layer, self.alpha, self.alphas)
        rank_or_config = rank or _of_layer(layer, self.rank, self.ranks)
        if alpha is None or rank_or_config is None:
            return 1.0
        return alpha / (rank_or_config**0.5 if self.is_rslora else rank_or_config)


_Patterns = list[tuple[re.Pattern[str], float]]


def _of_config(config: Mapping[str, Any], key: str, patterns: str) -> tuple[float | None, _Patterns]:
    """A number of peft's config, and those of layers by patterns of their names."""
    usual, given = config.get(key), (config.get(patterns) or {}).items()
    by_pattern = [(re.compile(rf"(.*\.)?({pattern})"), float(number)) for pattern, number in given]
    return None if usual is None else float(usual), by_pattern


def _of_layer(layer: str, usual: float | None, patterns: _Patterns) -> float | None:
    """The number of the first pattern that fits a layer, else the usual one."""
    names = (layer, with_wrapper(layer))
    return next((number for pattern, number in patterns if any(map(pattern.fullmatch, names))), usual)


def _addition(path: Path, component: str, layer: str, factors: dict[str, Tensor], scales: _Scales) -> Addition:
    """One layer's, with the scale that the file gives it: alpha / rank, of files without alpha 1."""
    given = factors.pop(ALPHA, None)
    if COLUMNS in factors:
        lengths = factors.pop(COLUMNS)
        factors[_axis(path, f"{component}.{layer}", lengths)] = lengths.flatten()
    names = factors.keys() - {MAGNITUDE, COLUMNS, MIDDLE, "hada_t1", "hada_t2"}
    has_kronecker = {"lokr_w1", "lokr_w1_b"} & names and {"lokr_w2", "lokr_w2_b"} & names
    if names not in _WHOLE and not has_kronecker:
        parts = ", ".join(sorted(names)) or "an alpha"
        raise UserError(f"{path}: {component}.{layer} has only {parts}: parts are missing", code="damaged")
    rank = Addition(layer, factors, 1.0).rank
    if given is None:
        return Addition(layer, factors, scales.of(layer, rank))
    return Addition(layer, factors, float(given) / rank if rank else 1.0)  # LyCORIS: of two whole matrices it is 1


def _axis(path: Path, layer: str, lengths: Tensor) -> str:
    """The factor that a `dora_scale` is: [out, 1, ...] or [1, in, ...], as LyCORIS and OneTrainer write it."""
    others = {MAGNITUDE: lengths.shape[1:], COLUMNS: (lengths.shape[:1] + lengths.shape[2:])}
    found = [name for name, sizes in others.items() if lengths.dim() > 1 and all(size == 1 for size in sizes)]
    if not found:
        raise UserError(
            f"{path}: {layer}.dora_scale is {list(lengths.shape)}, which does not say whether outputs or inputs are "
            "scaled: write it again as [out, 1] or [1, in]",
            code="unsupported",
        )
    return found[0]


def _check_shape(path: Path, component: str, addition: Addition, network: nn.Module) -> None:
    weight = network.get_submodule(addition.layer).weight
    assert isinstance(weight, Tensor)
    expected = tuple(weight.shape)
    try:
        addition.to("meta").weight(torch.empty(expected, device="meta"))
    except RuntimeError:
        shapes = {name: tuple(value.shape) for name, value in addition.factors.items()}
        raise UserError(
            f"{path} was made for another model: {component}.{addition.layer} is {expected} here, and the file has "
            f"{shapes} for it",
            code="unsupported",
        ) from None
