"""peft's layers with an addition, computed with fewer operations, to the bit as peft does.

peft widens inputs of 16 bits to the type of the factors, and autocast narrows them again; and it multiplies the
addition, which is as large as the layer's result, by its strength. Under autocast nothing is widened here. A strength
of 1 is not multiplied by, and another power of two is multiplied by between the two factors, where there are only r
features. That rounds nothing, so results and gradients stay equal (but for numbers below float16's normal range).

On a GPU, which waits for launches at small batches, `cast_factors` goes further.
"""

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora.layer import Conv2d, Linear
from torch import Tensor, nn

from daguerre.adapters.lora_parts import cast_factors
from daguerre.adapters.lora_parts.noise_ranks import NoiseRanks
from daguerre.models.network import Network
from daguerre.types import CAST_APART


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The layer's result and what its active additions add."""
    if layer.together is not None and torch.is_autocast_enabled(x.device.type):
        together: Tensor | None = layer.together.result(layer, x)
        if together is not None:
            return together
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
    if layer.noise_ranks is not None:
        inner = layer.noise_ranks.masked(inner, layer.rank_dim)
    if strength != 1 and abs(strength) in cast_factors.POWERS:
        inner, strength = inner * strength, 1
    added: Tensor = layer.lora_B[name](inner)
    return added if strength == 1 else added * strength


class _Linear(Linear):
    rank_dim = -1
    noise_ranks: NoiseRanks | None = None
    together: cast_factors.Together | None = None
    unit: cast_factors.Unit | None = None
    place = 0

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As peft's."""
        plain = cast_factors.is_plain(self) and not args and not kwargs
        return _forward(self, x) if plain else super().forward(x, *args, **kwargs)


class _Conv2d(Conv2d):
    rank_dim = 1
    noise_ranks: NoiseRanks | None = None
    together: cast_factors.Together | None = None
    unit: cast_factors.Unit | None = None
    place = 0

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As peft's."""
        plain = cast_factors.is_plain(self) and not args and not kwargs
        return _forward(self, x) if plain else super().forward(x, *args, **kwargs)


def lighten(layers: Iterable[nn.Module]) -> None:
    """Makes linear layers and convolutions with factors compute so, in place; others stay as they are."""
    for layer in layers:
        if type(layer) in (Linear, Conv2d):
            layer.__class__ = _Linear if type(layer) is Linear else _Conv2d


def cast_together(networks: Iterable[Network]) -> int:
    """Makes networks cast all their factors at once (`cast_factors`), and compute layers that read one input as one
    product; returns how many layers do."""
    count = 0
    for network in networks:
        own = (m for m in network.module.modules() if type(m) in (_Linear, _Conv2d))
        layers: list[Any] = [layer for layer in own if layer.together is None]
        alone = {*layers}
        groups = [[layer for layer in group if layer in alone] for group in network.readers]
        alone.difference_update(*groups)
        if layers:
            cast_factors.Together([*groups, *([layer] for layer in layers if layer in alone)]).watch(network.module)
        for layer in filter(cast_factors.is_plain, layers):
            for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
                setattr(factor, CAST_APART, True)  # a block would cast them once more, for nobody
        count += len(layers)
    return count
