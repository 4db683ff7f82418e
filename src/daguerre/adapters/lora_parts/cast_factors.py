"""The factors of all layers of a network in autocast's type, cast at once, and layers that compute with them.

Autocast casts each factor by itself, and each gradient back; the strength is a product by itself, and so is the sum.
For 560 layers that is most of what a GPU is asked to do, and at batch 1 it waits for the asking. Here all casts of a
pass are one launch, all gradients another, a strength that is a power of two goes into B meanwhile, and B's product
adds to what the layer itself has computed. Layers that read one input are computed as one (`one_product`). The result
is rounded once, not twice, and so is the gradient of an input; all else keeps its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from daguerre.adapters.lora_parts import one_product
from daguerre.types import waits

POWERS = tuple(2.0**i for i in range(-24, 25))
"""Strengths by which numbers are multiplied without rounding."""
_Factors = Mapping[str, tuple[Tensor, Tensor]]
"""A and B by their adapters' names; of n layers [n, rank, in] and [n, out, rank]."""


def is_plain(layer: Any) -> bool:
    """True where factors are added, and nothing else is done with them (DoRA, a merged addition)."""
    return not (layer.disable_adapters or layer.merged or layer.lora_variant)


@dataclass(eq=False)
class Unit:
    """A layer with its factors for a pass, or several that read one input and are computed as one product."""

    factors: _Factors
    product: tuple[Tensor, Tensor | None, float] | None
    """Weight and bias of the bases of all layers, and the strength; None of a layer that is no such product."""
    _read: Tensor | None = None
    """The input that the first layer has read."""
    _waiting: dict[int, Tensor] = field(default_factory=dict)
    """Results for it that the other layers have not asked for yet, by their places."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a layer gets factors of its own."""

    def has(self, place: int, x: Tensor) -> bool:
        """False for a layer that reads another input than the first one."""
        return place == 0 or (x is self._read and place in self._waiting)

    def result(self, layer: Any, place: int, x: Tensor) -> Tensor:
        """The result of a layer and what its active additions add, under autocast. The first layer computes those of
        all."""
        if self.product is None:
            return _sum(layer, self.factors, x)
        if place:
            result = self._waiting.pop(place)
            self._read = x if self._waiting else None  # else the inputs of all blocks would stay in memory
            return result
        ((a, b),), (weight, bias, strength) = self.factors.values(), self.product
        if torch.compiler.is_compiling():
            rows = x.flatten(0, -2).to(a.dtype)
            made = one_product.traced(rows, weight, bias, a, b, strength)
        else:
            rows = layer.together.rows(x, a.dtype)
            made = one_product.Product.apply(rows, weight, bias, a, b, strength)
        first, *others = (y.unflatten(0, x.shape[:-1]) for y in made)
        self._read, self._waiting = x if others else None, dict(enumerate(others, 1))
        return first


class Together:
    """The cast factors of a network's layers, from the beginning of a pass to the end of its backward pass."""

    def __init__(self, groups: Sequence[Sequence[Any]]) -> None:
        """`groups`: layers that read one input, in the order in which they are called, or one layer."""
        self._groups, self._passing = groups, False
        self._rows: tuple[Tensor, Tensor] | None = None
        for layer in chain.from_iterable(groups):
            layer.together = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Together:
        """A copy of a layer or of the network casts each factor by itself."""
        return Together(())

    def watch(self, network: nn.Module) -> None:
        """Casts before each pass of the network under autocast."""
        network.register_forward_pre_hook(self._before)
        network.register_forward_hook(self._behind, always_call=True)

    def result(self, layer: Any, x: Tensor) -> Tensor | None:
        """The result of a layer under autocast; None for a layer that computes as peft does. A block that is computed
        again for its backward pass gets the same factors; a layer that is called outside of a pass gets its own, by
        the same operators."""
        if layer.unit is not None and self._acts and layer.unit.has(layer.place, x):
            return layer.unit.result(layer, layer.place, x)
        alone = _alike([[layer]])
        if not alone:
            return None
        (unit,) = _cast(alone, torch.get_autocast_dtype(x.device.type), lambda: None)
        return unit.result(layer, 0, x)

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows [rows, in] of x [..., in] in a type. What all attentions read, such as the features of a text, is
        cast once if it has no gradient."""
        if x.dtype == dtype or x.requires_grad or not self._acts:
            return x.flatten(0, -2).to(dtype)
        if self._rows is None or self._rows[0] is not x:
            self._rows = x, x.flatten(0, -2).to(dtype)
        return self._rows[1]

    @property
    def _acts(self) -> bool:
        """True within a pass, and while blocks of it are computed again. What is compiled is called in passes alone."""
        return torch.compiler.is_compiling() or self._passing or torch._C._current_graph_task_id() != -1

    def _before(self, network: nn.Module, inputs: Any) -> None:
        self._drop()
        device = next(p.device.type for p in network.parameters() if not waits(p))
        if torch.is_autocast_enabled(device):
            groups = _alike(self._groups)
            units = _cast(groups, torch.get_autocast_dtype(device), self._drop)
            for unit, (layers, _) in zip(units, groups, strict=True):
                for place, layer in enumerate(layers):
                    vars(layer).update(unit=unit, place=place)  # nn.Module's own way takes the host longer
            self._passing = True

    def _behind(self, network: nn.Module, inputs: Any, outputs: Any) -> None:
        self._passing = False
        if not torch.is_grad_enabled():
            self._drop()

    def _drop(self) -> None:
        self._rows = None
        for layer in chain.from_iterable(self._groups):
            vars(layer)["unit"] = None


def _alike(groups: Iterable[Sequence[Any]]) -> list[tuple[Sequence[Any], bool]]:
    """The layers whose factors can be cast, and whether they are one product: the given groups where all layers are and
    differ in nothing but their numbers, else each layer by itself."""
    units: list[tuple[Sequence[Any], bool]] = []
    for group in groups:
        facts = [_facts(layer) for layer in group]
        if len(group) > 1 and facts[0] and all(each == facts[0] for each in facts):
            units.append((group, True))
        else:
            units += [([layer], bool(each)) for layer, each in zip(group, facts, strict=True) if each is not None]
    return units


def _facts(layer: Any) -> tuple[Any, ...] | None:
    """Facts of a layer that are equal in all layers of one product; () if it cannot be one, and None if it computes as
    peft does: more is done than that factors are added, or they are not float32, have a bias, or have weights that
    several devices share."""
    base, names = layer.base_layer, _names(layer)
    factors = [module[name] for module in (layer.lora_A, layer.lora_B) for name in names]
    weights, frozen = [factor.weight for factor in factors], [p for p in base._parameters.values() if p is not None]
    if not is_plain(layer) or any(factor.bias is not None for factor in factors):
        return None
    if any(weight.dtype != torch.float32 for weight in weights):
        return None
    if any(isinstance(p, DTensor) for p in (*weights, *frozen)):
        return None
    # Of a block that waits in the host's memory weights are known once it is called.
    if any(waits(p) for p in frozen):
        return ()
    if type(base) is not nn.Linear or len(names) != 1 or type(layer.lora_dropout[names[0]]) is not nn.Identity:
        return ()
    if layer.noise_ranks is not None:  # what lies between A and B is changed
        return ()
    if any(p.requires_grad for p in frozen):
        return ()
    return names[0], layer.scaling[names[0]], *((t.shape, t.dtype, t.requires_grad) for t in (*weights, *frozen))


def _sum(layer: Any, factors: _Factors, x: Tensor) -> Tensor:
    """The result of a layer whose additions are not one product with it."""
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
            if layer.noise_ranks is not None:
                inner = layer.noise_ranks.masked(inner.unflatten(0, x.shape[:-1]), layer.rank_dim).flatten(0, -2)
            result = result.addmm_(inner, b.t(), alpha=_rest(layer, name, dtype))
        return result.unflatten(0, x.shape[:-1])
    result = layer.base_layer(x)
    for name, (a, b) in factors.items():
        inner = _product(layer.lora_A[name], a, layer.lora_dropout[name](x))
        if layer.noise_ranks is not None:
            inner = layer.noise_ranks.masked(inner, layer.rank_dim)
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


def _cast(groups: Sequence[tuple[Sequence[Any], bool]], dtype: torch.dtype, done: Callable[[], None]) -> list[Unit]:
    """Each group with its factors in the type of its products. `done` is called when all have their gradients."""
    named = [(layers, name) for layers, _ in groups for name in _names(layers[0])]
    sets = [
        [getattr(each, of)[name].weight for each in layers] for layers, name in named for of in ("lora_A", "lora_B")
    ]
    scales = [scale for layers, name in named for scale in (1.0, _within(layers[0].scaling[name], dtype))]
    made = iter(_Cast.apply(dtype, scales, [len(each) for each in sets], done, *chain.from_iterable(sets)))
    return [
        Unit(
            {name: (next(made), next(made)) for name in _names(layers[0])},
            _base(layers, dtype) if is_product else None,
        )
        for layers, is_product in groups
    ]


def _base(layers: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor | None, float]:
    """Weight, bias and strength of layers that are one product."""
    bases, (name,) = [layer.base_layer for layer in layers], _names(layers[0])
    weight = one_product.joined([base.weight for base in bases])
    bias = None if bases[0].bias is None else one_product.joined([base.bias for base in bases])
    return weight, bias, _rest(layers[0], name, dtype)


class _Cast(torch.autograd.Function):
    """Copies of float32 weights in another type, each times a power of two, and their gradients in float32. A copy is
    of as many weights as its count says, [count, ...], or of one weight."""

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        scales: Sequence[float],
        counts: Sequence[int],
        done: Callable[[], None],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.scales, ctx.counts, ctx.done = scales, counts, done
        ctx.set_materialize_grads(False)
        rest = iter(weights)
        sets = [[*islice(rest, count)] for count in counts]
        made = [_room(each, dtype) for each in sets]
        _fill(_apart(made, counts), weights)
        _scale(made, scales)
        ctx.mark_non_differentiable(
            *(copy for copy, (first, *_) in zip(made, sets, strict=True) if not first.requires_grad)
        )
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.done()
        there = {i: grad for i, grad in enumerate(grads) if grad is not None}
        wide = {i: torch.empty_like(grad, dtype=torch.float32) for i, grad in there.items()}
        _fill([*wide.values()], [*there.values()])
        _scale([*wide.values()], [ctx.scales[i] for i in wide])
        return None, None, None, None, *_apart([wide.get(i) for i in range(len(grads))], ctx.counts)


def _room(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """An empty tensor for the copies of weights of one shape."""
    first, count = weights[0], len(weights)
    return torch.empty_like(first, dtype=dtype) if count == 1 else first.new_empty((count, *first.shape), dtype=dtype)


def _apart(tensors: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """The tensors of each weight; None where a weight has no such tensor."""
    return [
        part
        for tensor, count in zip(tensors, counts, strict=True)
        for part in ([tensor] * count if count == 1 or tensor is None else tensor.unbind())
    ]


def _fill(tensors: list[Tensor], sources: Sequence[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(tensors, [*sources])


def _scale(tensors: Sequence[Tensor], scales: Sequence[float]) -> None:
    """Multiplies in place, by what is not 1."""
    if scaled := [(tensor, scale) for tensor, scale in zip(tensors, scales, strict=True) if scale != 1]:
        torch._foreach_mul_([tensor for tensor, _ in scaled], [scale for _, scale in scaled])
