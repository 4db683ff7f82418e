"""Folders of additions as peft's `PeftModel.from_pretrained` reads them: one for each component."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from daguerre.checkpoint.atomic import make_folder
from daguerre.models.lora_files import peft_config
from daguerre.models.lora_files.addition import Addition
from daguerre.models.weights.files import write_compared

WEIGHTS, CONFIG, STEM = "adapter_model.safetensors", "adapter_config.json", "base_model.model."


def write(folder: Path, additions: Mapping[str, list[Addition]]) -> None:
    """Writes a folder of each component's additions."""
    for component, own in additions.items():
        tensors = {f"{each.layer}.{factor}": value for each in own for factor, value in each.factors.items()}
        write_component(folder / component, tensors, peft_config.of(own))


def write_component(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Writes tensors in the names of a component and peft's config of them. OSError if the file holds others."""
    make_folder(folder)
    named = {f"{STEM}{name}": value.detach().cpu() for name, value in tensors.items()}
    write_compared(folder / WEIGHTS, named)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text, encoding="utf-8")
