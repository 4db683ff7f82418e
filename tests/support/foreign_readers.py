"""Programs that apply LoRAs: diffusers and peft themselves; ComfyUI and sd-scripts by their formulas, written here.

Written from docs and public code of Comfy-Org/ComfyUI (comfy/lora.py, comfy/weight_adapter) and kohya-ss/sd-scripts
(networks/lora.py), and apart from daguerre.models.lora_files: nothing here imports it. `tools/exchange_table.py` uses
them; that ComfyUI's own code gives the same weights is recorded in docs/adapters.md.

Each reader gets the weights of a model by (component, layer), and returns those that it has changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

Weights = dict[tuple[str, str], Tensor]


def weights_of(pipe: Any, components: list[str]) -> Weights:
    """Of all linear layers and convolutions, by names without what transformers left out."""
    found: Weights = {}
    for component in components:
        for name, module in getattr(pipe, component).named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and ".lora_" not in name:
                found[component, _short(name)] = module.weight.detach().double().clone()
    return found


def _short(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "").removeprefix("text_model.")


def changed(before: Weights, after: Weights) -> Weights:
    return {key: value for key, value in after.items() if not torch.equal(value, before[key])}


def by_diffusers(file: Path, pipe: Any, before: Weights) -> Weights:
    """`load_lora_weights` and `fuse_lora`. ValueError where it refuses."""
    components = sorted({component for component, _ in before})
    pipe.load_lora_weights(file.parent, weight_name=file.name)
    pipe.fuse_lora(components=[name for name in components if getattr(getattr(pipe, name), "peft_config", None)])
    return changed(before, weights_of(pipe, components))


def by_peft(folder: Path, pipe: Any, before: Weights) -> Weights:
    """`PeftModel.from_pretrained` and `merge_and_unload`, for the folder of each component."""
    for path in sorted(folder.glob("*/adapter_config.json")):
        model = PeftModel.from_pretrained(getattr(pipe, path.parent.name), path.parent)
        setattr(pipe, path.parent.name, model.merge_and_unload())
    return changed(before, weights_of(pipe, sorted({component for component, _ in before})))


_RESNET = {"conv1": "in_layers.2", "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1"} | {
    "conv_shortcut": "skip_connection"
}
_ENDS = {"conv_in": "input_blocks.0.0", "conv_out": "out.2", "time_embedding.linear_1": "time_embed.0"} | {
    "time_embedding.linear_2": "time_embed.2", "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip
_MIDDLE = {"resnets.0": "0", "attentions.0": "1", "resnets.1": "2"}


def original(layer: str, unet: Any) -> str:
    """The name of a UNet's layer in the original layout, by the rule: n = layers_per_block + 1 blocks a level."""
    n = unet.config.layers_per_block + 1
    if layer in _ENDS:
        return _ENDS[layer]
    if match := re.fullmatch(r"mid_block\.((?:resnets|attentions)\.\d)\.(.*)", layer):
        return f"middle_block.{_MIDDLE[match[1]]}.{_RESNET.get(match[2], match[2])}"
    match = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.*)", layer)
    assert match is not None, layer
    way, level, part, number, rest = match[1], int(match[2]), match[3], int(match[4]), match[5]
    stem = "input_blocks" if way == "down" else "output_blocks"
    if part == "downsamplers":
        return f"{stem}.{(level + 1) * n}.0.op"
    if part == "upsamplers":
        attends = hasattr(unet.up_blocks[level], "attentions")
        return f"{stem}.{(level + 1) * n - 1}.{2 if attends else 1}.conv"
    at = 1 + level * n + number if way == "down" else level * n + number
    return f"{stem}.{at}.{int(part == 'attentions')}.{_RESNET.get(rest, rest)}"


def comfyui_names(pipe: Any, before: Weights) -> dict[str, tuple[str, str]]:
    """(component, layer) by the names that ComfyUI's key maps have: of text encoders those of the layers alone."""
    two, found = hasattr(pipe, "text_encoder_2"), {}
    for component, layer in before:
        flat = layer.replace(".", "_")
        if component == "unet":
            theirs, old = original(layer, pipe.unet), layer.replace(".to_", ".processor.to_").removesuffix(".0")
            old = old if layer.endswith("to_out.0") else layer.replace(".to_", ".processor.to_")
            names = [f"lora_unet_{flat}", f"lycoris_{flat}", f"lora_unet_{theirs.replace('.', '_')}"]
            names += [f"diffusion_model.{theirs}", old, f"unet.{old}"]
        elif layer.startswith("encoder.layers."):
            number = 2 if component.endswith("_2") else 1
            names = [f"lora_te{number}_text_model_{flat}", f"{component}.text_model.{layer}"]
            names += [f"lora_te_text_model_{flat}"] if number == 1 or not two else []
        elif component == "text_encoder_2" and layer == "text_projection":
            names = ["lora_te2_text_projection"]
        else:
            names = []
        found |= dict.fromkeys(names, (component, layer))
    return found


def by_comfyui(file: Path, pipe: Any, before: Weights) -> Weights:
    tensors = {name: value.double() for name, value in load_file(file).items()}
    found: Weights = {}
    for name, place in comfyui_names(pipe, before).items():
        delta = _comfyui_delta(name, tensors)
        if delta is not None:
            weight = before[place]
            found[place] = _comfyui_dora(tensors, name, weight, delta.reshape(weight.shape))
    return found


_COMFYUI = (
    (".lora_up.weight", ".lora_down.weight"), ("_lora.up.weight", "_lora.down.weight"),
    (".lora_B.weight", ".lora_A.weight"), (".lora.up.weight", ".lora.down.weight"),
    (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight"),
    (".lora_B.default.weight", ".lora_A.default.weight"),
)  # fmt: skip


def _comfyui_delta(name: str, t: dict[str, Tensor]) -> Tensor | None:
    """alpha / rank times the product; 1 where the file has no alpha, and of a product of two whole matrices."""
    alpha, rank, product = t.get(f"{name}.alpha"), None, None
    for up, down in _COMFYUI:
        if f"{name}{up}" in t:
            rank, product = len(t[f"{name}{down}"]), t[f"{name}{up}"].flatten(1) @ t[f"{name}{down}"].flatten(1)
    if f"{name}.hada_w1_a" in t:
        one, two = (t[f"{name}.hada_w{i}_a"] @ t[f"{name}.hada_w{i}_b"] for i in (1, 2))
        rank, product = len(t[f"{name}.hada_w1_b"]), one * two
    if f"{name}.lokr_w1" in t or f"{name}.lokr_w1_a" in t:
        rank, product = _kronecker(name, t)
    if product is None:
        return None
    return product * (float(alpha) / rank if alpha is not None and rank else 1.0)


def _kronecker(name: str, t: dict[str, Tensor]) -> tuple[int | None, Tensor]:
    parts, rank = [], None
    for i in (1, 2):
        if f"{name}.lokr_w{i}" in t:
            parts.append(t[f"{name}.lokr_w{i}"])
        else:
            rank = len(t[f"{name}.lokr_w{i}_b"])
            a, b = t[f"{name}.lokr_w{i}_a"], t[f"{name}.lokr_w{i}_b"]
            parts.append((a @ b.flatten(1)).reshape(a.shape[0], *b.shape[1:]))
    one, two = parts
    return rank, torch.kron(one[:, :, None, None] if two.dim() == 4 else one, two)


def _comfyui_dora(t: dict[str, Tensor], name: str, weight: Tensor, delta: Tensor) -> Tensor:
    """On the output axis it divides by the norms of the rows of the weight alone."""
    lengths = t.get(f"{name}.dora_scale")
    if lengths is None:
        return weight + delta
    shape = (-1, *(1 for _ in weight.shape[1:]))
    return (weight + delta) * (lengths.reshape(shape) / weight.flatten(1).norm(dim=1).reshape(shape))


def by_sd_scripts(file: Path, pipe: Any, before: Weights) -> Weights:
    """Of LoRA `merge_to`; LoHa and LoKr it leaves to LyCORIS, whose scale is 1 for two whole matrices, too."""
    tensors = {name: value.double() for name, value in load_file(file).items()}
    sdxl, found = hasattr(pipe, "text_encoder_2"), {}
    for (component, layer), weight in before.items():
        if not layer.startswith(("down_blocks.", "mid_block.", "up_blocks.", "encoder.layers.")):
            continue  # it has modules inside of transformers, residual blocks and what changes the size alone
        if component == "unet":
            stem = f"lora_unet_{(original(layer, pipe.unet) if sdxl else layer).replace('.', '_')}"
        else:
            number = ("2" if component.endswith("_2") else "1") if sdxl else ""
            stem = f"lora_te{number}_text_model_{layer.replace('.', '_')}"
        if f"{stem}.lora_up.weight" in tensors:
            found[component, layer] = weight + _merge_to(stem, tensors, weight)
        elif (delta := _comfyui_delta(stem, tensors)) is not None:
            found[component, layer] = weight + delta.reshape(weight.shape)
    return found


def _merge_to(stem: str, t: dict[str, Tensor], weight: Tensor) -> Tensor:
    up, down = t[f"{stem}.lora_up.weight"], t[f"{stem}.lora_down.weight"]
    alpha = float(t[f"{stem}.alpha"]) if f"{stem}.alpha" in t else 0.0
    scale = (alpha or len(down)) / len(down)  # no alpha, and 0, mean the rank
    if weight.dim() == 2:
        return scale * up @ down
    if down.shape[2:] == (1, 1):
        return scale * (up[:, :, 0, 0] @ down[:, :, 0, 0])[:, :, None, None]
    return scale * torch.nn.functional.conv2d(down.permute(1, 0, 2, 3), up).permute(1, 0, 2, 3)


READERS: dict[str, Callable[[Path, Any, Weights], Weights]] = {
    "diffusers": by_diffusers,
    "ComfyUI": by_comfyui,
    "sd-scripts": by_sd_scripts,
    "peft": by_peft,
}
