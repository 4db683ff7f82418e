"""Files of additions to layers in the names of kohya's sd-scripts (and of LyCORIS), which ComfyUI and A1111 read.

A module is `lora_unet_` and its path with underscores for dots, of SDXL's UNet the path of the original layout; text
encoders are `lora_te_`, or `lora_te1_` and `lora_te2_`. Programs multiply an addition by alpha / rank, and some take
one alpha for all modules: every module of a file has the same one here, and the rest of its strength is multiplied into
one of its factors. Sources: kohya-ss/sd-scripts networks/lora.py; KohakuBlueleaf/LyCORIS; Comfy-Org/ComfyUI
comfy/lora.py.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from daguerre.models import sharding_axes
from daguerre.models.lora_files.addition import DOWN, UP, Addition
from daguerre.models.single_file import keys

ALPHA = "alpha"
NAMES = {DOWN: "lora_down.weight", UP: "lora_up.weight"}
"""Factors that sd-scripts calls otherwise than peft."""
_MOST_OFF = 1e-6
"""Of a factor's norm: more than a multiplication in float32 rounds."""


def has_names(network: nn.Module) -> bool:
    """True of networks for whose layers sd-scripts has names."""
    return type(network).__name__ in ("UNet2DConditionModel", "CLIPTextModel", "CLIPTextModelWithProjection")


def write(path: Path, networks: Mapping[str, nn.Module], additions: Mapping[str, list[Addition]]) -> None:
    """Writes a file of the additions of each component, and reads it back: what other programs make of it is what is
    applied here. RuntimeError if it is not."""
    main = next(iter(additions.values()))
    alpha = next((each.scale * each.rank for each in main if each.rank), 1.0)
    tensors: dict[str, Tensor] = {}
    expected: dict[str, tuple[Addition, str]] = {}
    for component, own in additions.items():
        names = module_names(component, networks, [each.layer for each in own])
        for each in own:
            factor = _strong_factor(each)
            for name, value in _named(each, factor, alpha).items():
                tensors[f"{names[each.layer]}.{name}"] = value.to("cpu", torch.float32, copy=True).contiguous()
            expected[names[each.layer]] = each, factor
    path.write_bytes(save(tensors, _metadata(tensors, networks, main, alpha)))
    _read_back(path, expected)


def module_names(component: str, networks: Mapping[str, nn.Module], layers: Iterable[str]) -> dict[str, str]:
    """kohya's name of each layer of a component."""
    texts = sorted(name for name in networks if name.startswith("text_encoder"))
    if component in texts:
        prefix = f"te{texts.index(component) + 1}" if len(texts) > 1 else "te"
        paths = {layer: keys.with_wrapper(layer) for layer in layers}
    elif _is_sdxl(networks):
        prefix, hosts = "unet", [sharding_axes.host(name) for name, _ in networks[component].named_parameters()]
        original = {link.names[0]: link.original for link in keys.unet(name for name, factor in hosts if not factor)}
        paths = {layer: original[f"{layer}.weight"].removesuffix(".weight") for layer in layers}
    else:
        prefix, paths = "unet", {layer: layer for layer in layers}
    return {layer: f"lora_{prefix}_{path.replace('.', '_')}" for layer, path in paths.items()}


def _is_sdxl(networks: Mapping[str, nn.Module]) -> bool:
    configs = [getattr(network, "config", None) for network in networks.values()]
    return any(getattr(config, "addition_embed_type", None) == "text_time" for config in configs)


def _strong_factor(addition: Addition) -> str:
    """The factor into which the strength is multiplied."""
    return next(name for name in (UP, "hada_w1_a", "lokr_w1", "lokr_w1_a") if name in addition.factors)


def _named(addition: Addition, factor: str, alpha: float) -> dict[str, Tensor]:
    """Factors by kohya's names, such that alpha / rank times their product is what is added."""
    given = addition.scale * addition.rank / alpha if addition.rank else addition.scale
    found = {name: value * given if name == factor else value for name, value in addition.factors.items()}
    return {NAMES.get(name, name): value for name, value in found.items()} | {ALPHA: torch.tensor(alpha)}


def _metadata(
    tensors: Mapping[str, Tensor], networks: Mapping[str, nn.Module], main: list[Addition], alpha: float
) -> dict[str, str]:
    """Those by which other programs show and sort files; the hash is of the tensors, as sd-scripts computes it."""
    ranks = {each.rank for each in main}
    is_lora = DOWN in main[0].factors
    v2 = not _is_sdxl(networks) and any(_width(network) == 1024 for network in networks.values())
    found = {
        "ss_network_module": "networks.lora" if is_lora else "lycoris.kohya",
        "ss_network_dim": str(ranks.pop()) if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": str(alpha),
        "ss_base_model_version": "sdxl_base_v1-0" if _is_sdxl(networks) else "sd_v2" if v2 else "sd_v1",
        "ss_v2": str(v2),
    }
    if not is_lora:
        algorithm = "loha" if "hada_w1_a" in main[0].factors else "lokr"
        found["ss_network_args"] = json.dumps({"algo": algorithm})
    return found | _hashes(tensors, found)


def _width(network: nn.Module) -> int | None:
    """Width of the text that a UNet reads."""
    return getattr(getattr(network, "config", None), "cross_attention_dim", None)


def _hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """`sshs_model_hash`: SHA-256 of what follows the header. `sshs_legacy_hash`: the first 8 digits of that of the
    bytes 0x100000 to 0x110000 of a file with the `ss_` metadata alone."""
    data = save(dict(tensors), dict(metadata))
    start = 8 + int.from_bytes(data[:8], "little")
    return {
        "sshs_model_hash": hashlib.sha256(data[start:]).hexdigest(),
        "sshs_legacy_hash": hashlib.sha256(data[0x100000:0x110000]).hexdigest()[:8],
    }


def _read_back(path: Path, expected: Mapping[str, tuple[Addition, str]]) -> None:
    """Compares what a program applies of the file with what was trained: each factor, with the strength."""
    with safe_open(path, "pt") as file:
        modules = {name.partition(".")[0] for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        if modules != expected.keys():
            raise RuntimeError(f"{path.name} has other modules than were trained")
        for module, (addition, strong) in expected.items():
            alpha = float(file.get_tensor(f"{module}.{ALPHA}"))
            applied = alpha / addition.rank if addition.rank else 1.0
            for name, value in addition.factors.items():
                mine = value.detach().cpu().double() * (addition.scale if name == strong else 1.0)
                read = file.get_tensor(f"{module}.{NAMES.get(name, name)}").double()
                its = read * (applied if name == strong else 1.0)
                if not (its - mine).norm() <= _MOST_OFF * mine.norm():
                    raise RuntimeError(f"{path.name} does not hold {module} with the strength that was trained")
