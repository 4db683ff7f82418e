"""Starts of a LoRA that take a part of the base's weight: PiSSA (Meng et al. 2024, arXiv 2404.02948) and OLoRA
(Buyukakyuz 2024, arXiv 2406.01775).

peft subtracts that part from the base. Here the base stays what it is, and what was subtracted is added to the
trained factors, frozen and with the opposite sign: W + s (B A - B0 A0). The numbers are the same, other adapters and
programs can use the same base, and a file that holds both, of twice the rank, means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from torch import Tensor, nn

ADAPTER, START = "default", "start"
"""peft's names of what is trained, and of what it started from."""


@contextmanager
def unchanged(network: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Behind the context these layers have their weights again, the same tensors, whatever was done within it."""
    layers: list[Any] = [network.get_submodule(name) for name in names]
    weights = [layer.weight.data for layer in layers]
    for layer in layers:
        layer.weight.data = layer.weight.data.clone()
    yield
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight


@torch.no_grad()
def subtract_start(network: nn.Module, config: LoraConfig) -> None:
    """Adds minus the present addition to each layer, frozen: the network computes what its base does."""
    inject_adapter_in_model(replace(config, init_lora_weights=False, lora_dropout=0.0), network, START)
    for layer in _layers(network):
        layer.set_adapter([ADAPTER, START])
        for factors, sign in ((layer.lora_A, 1), (layer.lora_B, -1)):
            factors[START].weight.copy_(sign * factors[ADAPTER].weight)
            factors[START].weight.requires_grad_(False)


def whole(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that is added to a network, by peft's names, and peft's config of it: with what it started from as one
    addition of twice the rank and the same scale."""
    configs: Mapping[str, Any] = network.peft_config  # type: ignore[assignment]
    config: dict[str, Any] = {k: sorted(v) if isinstance(v, set) else v for k, v in configs[ADAPTER].to_dict().items()}
    added = get_peft_model_state_dict(network, adapter_name=ADAPTER, save_embedding_layers=False)
    if START not in configs:
        return added, config
    start = get_peft_model_state_dict(network, adapter_name=START, save_embedding_layers=False)
    both = {name: torch.cat([own, start[name]], 0 if "lora_A" in name else 1) for name, own in added.items()}
    of_alpha = 2**0.5 if config["use_rslora"] else 2
    config["r"], config["lora_alpha"] = 2 * config["r"], of_alpha * config["lora_alpha"]
    config["rank_pattern"] = {name: 2 * rank for name, rank in config["rank_pattern"].items()}
    config["alpha_pattern"] = {name: of_alpha * alpha for name, alpha in config["alpha_pattern"].items()}
    # diffusers would take the new layers' weights apart before it reads the file.
    return both, config | {"init_lora_weights": True}


def _layers(network: nn.Module) -> list[Any]:
    return [module for module in network.modules() if START in getattr(module, "lora_A", {})]
