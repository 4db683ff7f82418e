"""The factors of all layers of a network in autocast's type, cast at once, and layers that compute with them.

Autocast casts each factor by itself, and each gradient back; the strength is a product by itself, and so is the sum.
For 560 layers that is most of what a GPU is asked to do, and at batch 1 it waits for the asking. Here all casts of a
pass are one launch, all gradients another, a strength that is a power of two goes into B meanwhile, and B's product
adds to what the layer itself has computed. The result is rounded once, not twice; all else keeps its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

POWERS = tuple(2.0**i for i in range(-24, 25))
"""Strengths by which numbers are multiplied without rounding."""
_Factors = Mapping[str, tuple[Tensor, Tensor]]
"""A and B of a layer by their adapters' names."""


def is_plain(layer: Any) -> bool:
    """True where factors are added, and nothing else is done with them (DoRA, a merged addition)."""
    return not (layer.disable_adapters or layer.merged or layer.lora_variant)


class Together:
    """The cast factors of a network's layers, from the beginning of a pass to the end of its backward pass."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers, self._held, self._passing = layers, dict[Any, _Factors](), False
        for layer in layers:
            layer.together = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Together:
        """A copy of a layer or of the network casts each factor by itself."""
        return Together(())

    def watch(self, network: nn.Module) -> None:
        """Casts before each pass of the network under autocast."""
        network.register_forward_pre_hook(self._before)
        network.register_forward_hook(self._behind, always_call=True)

    def of(self, layer: Any, x: Tensor) -> _Factors | None:
        """The factors of a layer, None where it computes without them. A block that is computed again for its backward
        pass gets the same ones; a layer that is called outside of a pass gets its own, by the same operators."""
        if not torch.is_autocast_enabled(x.device.type):
            return None
        again = torch._C._current_graph_task_id() != -1
        if (self._passing or again) and (held := self._held.get(layer)) is not None:
            return held
        return _cast([layer], torch.get_autocast_dtype(x.device.type), lambda: None)[0] if _fits(layer) else None

    def _before(self, network: nn.Module, inputs: Any) -> None:
        self._drop()
        device = next(network.parameters()).device.type
        layers = [layer for layer in self._layers if is_plain(layer) and _fits(layer)]
        if layers and torch.is_autocast_enabled(device):
            cast = _cast(layers, torch.get_autocast_dtype(device), self._drop)
            self._held, self._passing = dict(zip(layers, cast, strict=True)), True

    def _behind(self, network: nn.Module, inputs: Any, outputs: Any) -> None:
        self._passing = False
        if not torch.is_grad_enabled():
            self._drop()

    def _drop(self) -> None:
        self._held = {}


def _fits(layer: Any) -> bool:
    """True where all factors that are added are float32, without a bias, and no weight is split among devices."""
    factors = [own[name] for own in (layer.lora_A, layer.lora_B) for name in _names(layer)]
    plain = all(factor.weight.dtype == torch.float32 and factor.bias is None for factor in factors)
    return plain and not any(isinstance(p, DTensor) for p in layer.parameters())


def forward(layer: Any, factors: _Factors, x: Tensor) -> Tensor:
    """The result of a layer and what its active additions add, under autocast."""
    dtype = torch.get_autocast_dtype(x.device.type)
    if type(layer.base_layer) is nn.Linear:
        # In place: on a GPU addmm first copies what it adds to. Of rows: a view of the result would have its whole
        # gradient copied.
        rows = x.flatten(0, -2).to(dtype)
        result: Tensor = layer.base_layer(rows)
        for name, (a, b) in factors.items():
            drop = layer.lora_dropout[name]
            # What is dropped follows from type and strides: a dropout gets the input as it came.
            inner = F.linear(rows if isinstance(drop, nn.Identity) else drop(x).flatten(0, -2), a)
            result = result.addmm_(inner, b.t(), alpha=_rest(layer, name, dtype))
        return result.unflatten(0, x.shape[:-1])
    result = layer.base_layer(x)
    for name, (a, b) in factors.items():
        inner = _product(layer.lora_A[name], a, layer.lora_dropout[name](x))
        added, rest = _product(layer.lora_B[name], b, inner), _rest(layer, name, dtype)
        result = result + (added if rest == 1 else added * rest)
    return result


def _product(factor: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """A factor's own operator with another weight."""
    return factor._conv_forward(x, weight, None) if isinstance(factor, nn.Conv2d) else F.linear(x, weight)


def _names(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _within(strength: float, dtype: torch.dtype) -> float:
    """The part of a strength that goes into B and rounds nothing there; float16 would lose small numbers."""
    return strength if dtype == torch.bfloat16 and abs(strength) in POWERS else 1.0


def _rest(layer: Any, name: str, dtype: torch.dtype) -> float:
    """The part of a strength that is left."""
    strength: float = layer.scaling[name]
    return strength / _within(strength, dtype)


def _cast(layers: Sequence[Any], dtype: torch.dtype, done: Callable[[], None]) -> list[_Factors]:
    """The factors of each layer in the type of its products. `done` is called when all have their gradients."""
    pairs = [(layer, name) for layer in layers for name in _names(layer)]
    weights = [own[name].weight for layer, name in pairs for own in (layer.lora_A, layer.lora_B)]
    scales = [scale for layer, name in pairs for scale in (1.0, _within(layer.scaling[name], dtype))]
    made = iter(_Cast.apply(dtype, scales, done, *weights))
    return [{name: (next(made), next(made)) for name in _names(layer)} for layer in layers]


class _Cast(torch.autograd.Function):
    """Copies of float32 weights in another type, each times a power of two, and their gradients in float32."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, scales: Sequence[float], done: Callable[[], None], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.scales, ctx.done = scales, done
        ctx.set_materialize_grads(False)
        made = _copies(weights, dtype, scales)
        ctx.mark_non_differentiable(
            *(own for own, weight in zip(made, weights, strict=True) if not weight.requires_grad)
        )
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.done()
        there = {i: grad for i, grad in enumerate(grads) if grad is not None}
        wide = dict(zip(there, _copies([*there.values()], torch.float32, [ctx.scales[i] for i in there]), strict=True))
        return None, None, None, *(wide.pop(i, None) for i in range(len(grads)))


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype, scales: Sequence[float]) -> list[Tensor]:
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, list(tensors))
    if scaled := [(own, scale) for own, scale in zip(made, scales, strict=True) if scale != 1]:
        torch._foreach_mul_([own for own, _ in scaled], [scale for _, scale in scaled])
    return made
