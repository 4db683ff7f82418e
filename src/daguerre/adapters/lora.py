"""LoRA (Hu et al. 2021, arXiv 2106.09685), computed by peft: y = W x + b + alpha / rank * B A x, with W frozen.

A [rank, in] starts at random and B [out, rank] at zero, so that training starts from the base. Only A and B are trained
and saved, in float32; the base keeps its weights, computes without dropout and has no gradients. The export is the file
that diffusers' `load_lora_weights` reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from pydantic import Field, field_validator
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from daguerre import keys
from daguerre.adapters.adapter import Trainable
from daguerre.adapters.settings import AdapterSettings
from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError

if TYPE_CHECKING:
    from daguerre.models.family import Family
    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings

FILE = "pytorch_lora_weights.safetensors"
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj", "SelfAttention.[qkvo]")
"""Names of attention's four products in diffusers, CLIP and T5."""
_ADAPTER = "default"
"""peft's name of the only adapter that it sees."""
_TEXT_PREFIX = "text_model."
"""A level of CLIP's text encoders that transformers 5 left out of the plain one, and other programs ask for."""


class Settings(AdapterSettings):
    """Trains low-rank additions to linear layers."""

    name: Literal["lora"] = "lora"
    """Name of the adapter."""
    rank: int = Field(16, ge=1)
    """Rank of the additions, in the component that is trained by default (of a pipeline the UNet)."""
    alpha: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Additions are multiplied by alpha / rank. null: by 1, in every component."""
    ranks: dict[str, int | None] = Field({})
    """Ranks of other components, such as {text_encoder: 8}; null: nothing is added to it."""
    targets: list[str] | None = None
    """Layers that get an addition: ends of their names, also patterns, such as [to_q, to_v] or ["attn2.to_?"]. null:
    attention's query, key, value and output."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of a layer's inputs that its addition does not see, in training."""

    @field_validator("ranks")
    @classmethod
    def _positive(cls, ranks: dict[str, int | None]) -> dict[str, int | None]:
        if wrong := [name for name, rank in ranks.items() if rank is not None and rank < 1]:
            raise ValueError(f"{', '.join(wrong)}: a rank is a whole number from 1, or null")
        return ranks

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        """The components that have a rank."""
        return tuple(self.by_component(trainable))

    def by_component(self, trainable: Sequence[str]) -> dict[str, int]:
        """The ranks of all components."""
        ranks = dict.fromkeys(trainable[:1], self.rank) | self.ranks
        return {name: rank for name, rank in ranks.items() if rank is not None}


@dataclass(frozen=True, eq=False)
class LoRA(Trainable):
    """Networks with additions."""

    net: nn.Module
    names: frozenset[str]
    networks: Mapping[str, Any]
    """The components that have additions."""
    float32 = True

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings) -> list[str]:
        """The file that diffusers' `load_lora_weights` reads, with the ranks and alphas in its header."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for component, network in self.networks.items():
            for name, value in get_peft_model_state_dict(network, save_embedding_layers=False).items():
                outer = _TEXT_PREFIX if type(network).__name__ == "CLIPTextModel" else ""
                key = f"{component}.{outer}{name.removeprefix(outer)}"
                tensors[key] = value.detach().to("cpu", torch.float32, copy=True).contiguous()
            config = network.peft_config[_ADAPTER].to_dict()  # as diffusers writes it
            plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
            numbers |= {f"{component}.{key}": value for key, value in plain.items()}
        header = {"format": "pt", "lora_adapter_metadata": json.dumps(numbers, indent=2, sort_keys=True)}
        with replaced(folder) as fresh:
            save_file(tensors, fresh / FILE, header)
            (fresh / "README.md").write_text(_CARD, encoding="utf-8")
        return []

    def merge(self) -> None:
        """W + alpha / rank * B A, in place of W."""
        for network in self.networks.values():
            for layer in network.modules():
                if isinstance(layer, LoraLayer):
                    layer.merge()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """The layers themselves stand in the places of those with additions."""
        places = [
            (owner, name, layer)
            for network in self.networks.values()
            for owner in network.modules()
            for name, layer in owner.named_children()
            if isinstance(layer, LoraLayer)
        ]
        for owner, name, layer in places:
            setattr(owner, name, layer.base_layer)
        try:
            yield
        finally:
            for owner, name, layer in places:
                setattr(owner, name, layer)


_CARD = """\
---
library_name: diffusers
tags: [lora]
---

A LoRA trained with Daguerre, for the base model that it was trained on:

```python
pipe.load_lora_weights("path/to/this/folder")
```

`lora_adapter_metadata` in the file's header holds ranks and alphas; a program that does not read it takes alpha = rank.
"""


def attach(settings: Settings, model: Family, seed: int) -> LoRA:
    """Freezes the components that it reaches, and gives their layers additions. UserError for targets that are not
    there."""
    networks, names, used = {}, set[str](), set[str]()
    for component, rank in settings.by_component(model.trainable).items():
        network: Any = model.components[component]
        targets = _targets(component, network, settings.targets or ATTENTION, {id(p) for p in model.unread}, used)
        if not targets:
            raise UserError(
                f"no layer of the LoRA's targets is in {component}: set targets, or ranks.{component}=null",
                code="empty",
            )
        numbers = LoraConfig(
            r=rank,
            lora_alpha=rank if settings.alpha is None else settings.alpha,  # type: ignore[arg-type]  # any number
            lora_dropout=settings.dropout,
            target_modules=targets,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(keys.words(seed, f"lora {component}", 0, count=1)[0] >> 1))
            inject_adapter_in_model(numbers, network)
        wrapped = [name for name, module in network.named_modules() if isinstance(module, LoraLayer)]
        assert sorted(wrapped) == sorted(targets), "peft has wrapped other layers than it was asked to"
        networks[component] = network
        names |= {f"{component}.{name}" for name, p in network.named_parameters() if p.requires_grad}
        _still(network)
    if not networks:
        raise UserError(
            "a LoRA cannot be used here: this family has no frozen network to add it to", code="unsupported"
        )
    if idle := [pattern for pattern in settings.targets or () if pattern not in used]:
        wrong = ", ".join(idle)
        raise UserError(f"the LoRA's targets {wrong} are no linear layers of {', '.join(networks)}", code="unknown")
    return LoRA(model.net, frozenset(names), networks)


def _targets(
    component: str, network: nn.Module, patterns: Sequence[str], unread: set[int], used: set[str]
) -> list[str]:
    """Names of the linear layers that the patterns mean, without those that no output depends on."""
    found = []
    for name, module in network.named_modules():
        if not isinstance(module, nn.Linear) or id(module.weight) in unread:
            continue
        meant = [
            p
            for p in patterns
            if fnmatchcase(f"{component}.{name}", p) or fnmatchcase(f".{component}.{name}", f"*.{p}")
        ]
        used |= {*meant}
        found += [name] if meant else []
    return found


def _still(network: nn.Module) -> None:
    """Keeps the base in evaluation mode for good. `train` reaches the additions' dropout alone, and layers of
    transformers, which ask by it whether they compute their activations again."""

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        dropouts = {id(each) for m in self.modules() if isinstance(m, LoraLayer) for each in m.lora_dropout.values()}
        for module in self.modules():
            module.training = mode and (id(module) in dropouts or isinstance(module, GradientCheckpointingLayer))
        return self

    setattr(network, "train", MethodType(train, network))  # noqa: B010
    network.train(False)
