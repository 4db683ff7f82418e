"""peft's layers with an addition, computed with fewer operations, to the bit as peft does.

peft widens inputs of 16 bits to the type of the factors, and autocast narrows them again; and it multiplies the
addition, which is as large as the layer's result, by its strength. Under autocast nothing is widened here. A strength
of 1 is not multiplied by, and another power of two is multiplied by between the two factors, where there are only r
features. That rounds nothing, so results and gradients stay equal (but for numbers below float16's normal range).
"""

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora.layer import Conv2d, Linear
from torch import Tensor, nn

_POWERS = tuple(2.0**i for i in range(-24, 25))


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The layer's result and what its active additions add."""
    result: Tensor = layer.base_layer(x)
    dtype = result.dtype
    for name in layer.active_adapters:
        if name in layer.lora_A:
            result = result + _addition(layer, name, x)
    return result.to(dtype)


def _addition(layer: Any, name: str, x: Tensor) -> Tensor:
    strength = layer.scaling[name]
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # there is no autocast without memory
        x = layer._cast_input_dtype(x, layer.lora_A[name].weight.dtype)
    inner = layer.lora_A[name](layer.lora_dropout[name](x))
    if strength != 1 and abs(strength) in _POWERS:
        inner, strength = inner * strength, 1
    added: Tensor = layer.lora_B[name](inner)
    return added if strength == 1 else added * strength


def _is_plain(layer: Any) -> bool:
    """True where factors are added, and nothing else is done with them (DoRA, a merged addition)."""
    return not (layer.disable_adapters or layer.merged or layer.lora_variant)


class _Linear(Linear):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As peft's."""
        plain = _is_plain(self) and not args and not kwargs
        return _forward(self, x) if plain else super().forward(x, *args, **kwargs)


class _Conv2d(Conv2d):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As peft's."""
        plain = _is_plain(self) and not args and not kwargs
        return _forward(self, x) if plain else super().forward(x, *args, **kwargs)


def lighten(layers: Iterable[nn.Module]) -> None:
    """Makes linear layers and convolutions with factors compute so, in place; others stay as they are."""
    for layer in layers:
        if type(layer) in (Linear, Conv2d):
            layer.__class__ = _Linear if type(layer) is Linear else _Conv2d
