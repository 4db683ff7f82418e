"""The base of adapters, with its linear layers in few bits (training.base_precision)."""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from daguerre.distributed.parallelize import blocks
from daguerre.errors import UserError
from daguerre.formatting import counted, scaled
from daguerre.models.family import Family
from daguerre.models.hosts import host
from daguerre.models.network import Network
from daguerre.training.precision import quantized
from daguerre.training.precision.quantized import SETTING, EightBitLinear


def quantize(
    chosen: str,
    family: Family,
    cached: Collection[str] = (),
    device: torch.device | None = None,
    waiting: Iterable[nn.Module] = (),
) -> None:
    """Replaces, in place, the linear layers inside the blocks of networks that nothing trains; they are on `device`
    then. Convolutions, norms, embeddings, and layers outside the blocks (time embeddings) stay as they are, and so do
    the components `cached`: a cache has what the encoders of the files make. What is quantised inside of the blocks
    that are `waiting` goes back to the host's memory. UserError where the denoiser itself is trained."""
    if chosen == "no":
        return
    held_back = {id(module) for block in waiting for module in block.modules()}
    for component, network in family.networks.items():
        if network.role == "autoencoder" or component in cached:  # an autoencoder consists of convolutions
            continue
        if device is not None and any(p.is_meta for p in network.module.parameters()):
            continue  # left out of memory, as where only a cache is filled: there are no weights
        found = linear_layers(network)
        still = {name: layer for name, layer in found.items() if not layer.weight.requires_grad}
        if network.role == "denoiser" and not still:
            why = "its weights are trained, which codes of few bits cannot be" if found else "it has no blocks"
            raise UserError(
                f"{SETTING}={chosen} is for a base that adapters leave as it is (lora, tokens, controlnet), and of "
                f"{component} {why}: set {SETTING}=no, or choose such an adapter",
                code="conflict",
                setting=SETTING,
            )
        for name, layer in still.items():
            few_bits = quantized.quantized(layer, chosen, device)
            network.module.set_submodule(name, few_bits)
            if id(layer) in held_back and device is not None:
                few_bits.to("cpu")


def linear_layers(network: Network) -> dict[str, nn.Linear]:
    """The linear layers inside the blocks, without the factors that adapters have added."""
    inside = {id(module) for block in blocks(network.module, network.facts.blocks) for module in block.modules()}
    return {
        name: module
        for name, module in network.module.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside and not host(f"{name}.weight")[1]
    }


def describe(components: Mapping[str, nn.Module]) -> list[str]:
    """A message for each network with quantised layers."""
    lines = []
    for component, network in components.items():
        if found := [layer for _, layer in quantized.layers(network)]:
            count, held = sum(layer.numbers for layer in found), sum(layer.held_bytes for layer in found)
            size = scaled(held, {" GB": 1e9, " MB": 1e6, " kB": 1e3}, " B", ".2f")
            multiplied = sum(isinstance(layer, EightBitLinear) for layer in found)
            lines.append(
                f"{component}: {counted(len(found), 'linear layer')} in {found[0].form}, {size} for {count:,} weights "
                f"({8 * held / count:.2f} bits each)"
                + (f", {multiplied} of them multiplied in 8 bits" if multiplied else "")
            )
    return lines
