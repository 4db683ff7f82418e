"""Blocks of denoisers that wait in the host's memory (training.swap_blocks), chosen for a recipe."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from daguerre.config.config import Config
from daguerre.distributed.parallelize import blocks
from daguerre.errors import UserError
from daguerre.formatting import format_size
from daguerre.models.family import Family
from daguerre.models.hosts import host
from daguerre.models.network import Network
from daguerre.training.performance.swapping import AT_ONCE, Swap
from daguerre.types import wait

SETTING = "training.swap_blocks"
AUTO = "auto"
Chosen = Mapping[str, Sequence[nn.Module]]
"""The blocks that wait, by component."""


def chosen(config: Config, family: Family, trains: bool) -> Chosen:
    """The blocks of the denoiser that wait, and as many of a teacher's; {} without the setting. UserError where there
    are no such blocks, fewer than are asked for, so few are asked for that none would wait, or where what `trains` them
    moves all weights at once."""
    if not config.training.swap_blocks:
        return {}
    if config.training.swap_blocks == AUTO:
        raise UserError(
            f"{SETTING}={AUTO} is for `daguerre train` and `daguerre plan`, which find a number: give it, or 0, here",
            code="unsupported",
            setting=SETTING,
        )
    found = {}
    for name, network in family.networks.items():
        if network.denoises:
            every = _outermost(network)
            count = _count(config.training.swap_blocks, len(every))
            if network.role == "denoiser":
                _check(config, name, network, every, count)
                _check_trained(config, name, every if trains else ())
            # At even distances: while the blocks between two of them compute, the next one is copied.
            found[name] = [every[(i + 1) * len(every) // count - 1] for i in range(count)] if every else []
    return found


def fixed(config: Config, count: int) -> Config:
    """The config with this number of blocks that wait."""
    return config.model_copy(update={"training": config.training.model_copy(update={"swap_blocks": count})})


def there(family: Family) -> int:
    """The blocks of the denoiser that could wait."""
    return sum(len(_outermost(each)) for each in family.networks.values() if each.role == "denoiser")


def mark(found: Chosen, family: Family) -> None:
    """Marks the tensors of these blocks, so that no call moves them to the device: their weights, but not what adapters
    have added, which is small, trained, and stays there."""
    for component, modules in found.items():
        own = {id(t) for module in modules for t in [*module.parameters(), *module.buffers()]}
        inside = {id(module) for block in modules for module in block.modules()}
        shared = {
            id(tensor)
            for module in family.components[component].modules()
            if id(module) not in inside
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        }
        for block in modules:
            for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
                if id(tensor) in own - shared and not host(name)[1]:
                    wait(tensor)


def begin(found: Chosen, family: Family, device: torch.device) -> dict[str, Swap]:
    """Lets the blocks wait, once kernels and recomputing are in their places."""
    return {name: Swap(family.components[name], own, device) for name, own in found.items() if own}


def notices(config: Config, swaps: Mapping[str, Swap], processes: int = 1) -> list[str]:
    """A line about each network with blocks that wait, with what a node of so many processes holds."""
    lines = []
    for name, swap in swaps.items():
        on_node = f" ({format_size(processes * swap.held_bytes)} on a node)" if processes > 1 else ""
        moved = ", and what their moments and averages take" if swap.trains else ""
        lines.append(
            f"{SETTING}={config.training.swap_blocks}: {len(swap)} blocks of {name} wait in the host's memory, "
            f"{format_size(swap.held_bytes)} of each process{on_node}{moved}; {AT_ONCE} of them are on the device at "
            f"once, {format_size(swap.largest_bytes)}"
        )
    return lines


def _outermost(network: Network) -> list[nn.Module]:
    """The blocks of a network that are in no other block."""
    every = blocks(network.module, network.facts.blocks)
    within = {id(module) for block in every for module in block.modules() if module is not block}
    return [block for block in every if id(block) not in within]


def _count(asked: int | str, there: int) -> int:
    """The number of blocks that a setting asks for."""
    return asked if isinstance(asked, int) else min(there, round(float(asked.rstrip("%")) * there / 100))


def _check_trained(config: Config, name: str, every: Sequence[nn.Module]) -> None:
    own = (each for block in every for each in block.named_parameters() if not host(each[0])[1])
    if config.optimizer.in_backward or not any(p.requires_grad for _, p in own):
        return
    raise UserError(
        f"{SETTING}={config.training.swap_blocks} cannot act: the weights of {name} are trained, and those that wait "
        "in the host's memory are moved on the device during the backward pass, while they are there: set "
        "optimizer.in_backward=after_norm (the same updates), or train a LoRA, or remove the setting",
        code="conflict",
        setting=SETTING,
    )


def _check(config: Config, name: str, network: Network, every: Sequence[nn.Module], count: int) -> None:
    asked, why, way = config.training.swap_blocks, "", ""
    if not every:
        why, way = f"{name} has no blocks that could wait", "remove the setting"
    elif count > len(every):
        why, way = f"{name} has {len(every)} blocks", f"set at most {len(every)}"
    elif count <= AT_ONCE:
        why = f"that is {count} of the {len(every)} blocks of {name}, and {AT_ONCE} are on the device at once"
        way = f"set at least {AT_ONCE + 1}, or remove the setting"
    if why:
        raise UserError(f"{SETTING}={asked} cannot act: {why}: {way}", code="conflict", setting=SETTING)
