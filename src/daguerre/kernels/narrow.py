"""Frozen networks that encode in bf16, by autocast: the encoder of an autoencoder, and text encoders.

Weights stay float32, and so do results, so that nothing behind them sees a change but in the numbers. What decodes is
left alone.
"""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from diffusers.models.autoencoders.vae import Encoder
from torch import Tensor, nn
from transformers import PreTrainedModel


def enable(networks: Iterable[nn.Module], device: torch.device) -> int:
    """Makes the frozen encoders among these networks compute in bf16 on this device; returns how many there are."""
    frozen = [network for network in networks if not any(p.requires_grad for p in network.parameters())]
    found: list[nn.Module] = [m for network in frozen for m in network.modules() if type(m) is Encoder]
    found += [network for network in frozen if isinstance(network, PreTrainedModel)]
    for module in found:
        # A bound method: a copy of the module gets one of its own.
        setattr(module, "forward", MethodType(_narrow(device.type), module))  # noqa: B010
    return len(found)


def _narrow(device_type: str) -> Callable[..., Any]:
    """The forward pass of a module's type, in bf16."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=torch.bfloat16):
            return _widened(type(self).forward(self, *args, **kwargs))

    return forward


def _widened(found: Any) -> Any:
    """The same results, in float32."""
    if isinstance(found, Tensor):
        return found.float() if found.is_floating_point() else found
    if isinstance(found, dict):  # transformers' outputs
        return type(found)(**{name: _widened(value) for name, value in found.items()})
    if isinstance(found, tuple):
        return tuple(_widened(value) for value in found)
    return found
