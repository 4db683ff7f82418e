"""Files of LoRAs as diffusers' `load_lora_weights` reads them: peft's names by component, and configs in the header.

Sources: huggingface/diffusers loaders/lora_base.py, loaders/peft.py, utils/peft_utils.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from daguerre.checkpoint.atomic import write_durably
from daguerre.checkpoint.safetensors import encode
from daguerre.models.export.about import UNKNOWN, About
from daguerre.models.lora_files import header, peft_config
from daguerre.models.lora_files.addition import MAGNITUDE, METADATA, Addition, stored
from daguerre.models.parts.text.names import hub_name
from daguerre.models.weights import seals


def write(
    path: Path, networks: Mapping[str, nn.Module], additions: Mapping[str, list[Addition]], about: About = UNKNOWN
) -> None:
    """Writes a file of the additions of each component, of a kind that diffusers has: LoRA or DoRA."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, object] = {}
    for component, own in additions.items():
        for each in own:
            for factor, value in each.factors.items():
                name = f"{component}.{_name(networks[component], f'{each.layer}.{factor}')}"
                tensors[name] = stored(value, value.dtype)
        numbers |= {f"{component}.{key}": value for key, value in peft_config.of(own).items()}
    metadata = header.modelspec(networks, about) | header.hashes(tensors, {})
    kept = {name: value for name, value in metadata.items() if not name.startswith("sshs_")}
    write_durably(
        path, encode(seals.finite(tensors), {METADATA: json.dumps(numbers, indent=2, sort_keys=True), **kept})
    )


def _name(network: nn.Module, name: str) -> str:
    """The name under which diffusers finds a component's tensor. Without `.weight`, transformers 5 leaves the lengths
    of DoRA's rows as they started, and says nothing."""
    name = hub_name(network, name)
    return f"{name}.weight" if name.endswith(MAGNITUDE) and isinstance(network, PreTrainedModel) else name
