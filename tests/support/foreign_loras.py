"""LoRAs that diffusers and peft write themselves, with random numbers, for tests of files and of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

FILE = "pytorch_lora_weights.safetensors"


def add(pipe: Any, targets: Mapping[str, Sequence[str]], seed: int, size: float = 0.1, **config: Any) -> None:
    """Adds a LoRA with an effect to components of a pipeline, by the ends of layers' names."""
    generator = torch.Generator().manual_seed(seed)
    for component, own in targets.items():
        network = getattr(pipe, component)
        network.add_adapter(LoraConfig(target_modules=list(own), **config))
        with torch.no_grad():
            for name, p in network.named_parameters():
                if "lora_" in name:
                    p.copy_(torch.randn(p.shape, generator=generator) * size)


def tensors(pipe: Any, components: Sequence[str]) -> dict[str, Tensor]:
    """peft's tensors below each component's name."""
    states = {name: get_peft_model_state_dict(getattr(pipe, name)) for name in components}
    return {f"{name}.{key}": v.contiguous() for name, state in states.items() for key, v in state.items()}


def save(pipe: Any, folder: Path, components: Sequence[str]) -> Path:
    """Writes what `save_lora_weights` writes, with the configs in the header, and returns the file."""
    states = {f"{name}_lora_layers": get_peft_model_state_dict(getattr(pipe, name)) for name in components}
    numbers = {
        f"{name}_lora_adapter_metadata": getattr(pipe, name).peft_config["default"].to_dict() for name in components
    }
    pipe.save_lora_weights(folder, **states, **numbers)
    return folder / FILE
