"""In which type CUDA's autocast computes norms, for counting memory on a machine without a GPU.

Autocast of a CPU and of a GPU agree on products, convolutions and attention. They differ in norms: a GPU takes and
returns them in float32, which doubles what is kept of them for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def enable(network: nn.Module) -> int:
    """From now on norms of `network` have a GPU's types under autocast of a CPU; returns how many there are. Norms that
    a kernel of ours computes have their own."""
    found = [module for module in network.modules() if type(module) in (nn.GroupNorm, nn.LayerNorm)]
    for module in found:
        module.register_forward_pre_hook(_wide)
    return len(found)


def _wide(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
