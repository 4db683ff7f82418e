"""Weights that autocast need not cast one by one, and frozen networks that encode in bf16.

Autocast casts each float32 weight by itself, and each gradient back; a GPU, which waits for launches at small batches
and in large networks, may get those of a block at once, to the same numbers. Of an autoencoder the encoder and text
encoders may be narrow: results stay float32, so that nothing behind them sees a change but in the numbers, and weights,
unless their files have bfloat16. What decodes is left alone.
"""

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from diffusers.models.autoencoders.vae import Encoder
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from daguerre import deferred
from daguerre.types import CAST_APART, waits

_TABLES = "cast_by_block"
"""Name under which a block keeps the tables of parameters of its layers."""
LARGEST = 2**25
"""Most weights that are cast at once: their copies take memory."""


def enable(networks: Iterable[nn.Module], device: torch.device, at_once: bool = False) -> int:
    """Makes the frozen encoders among these networks compute in bf16 on this device; returns how many there are.
    `at_once`: weights are cast block by block, not one by one."""
    frozen = [network for network in networks if not any(p.requires_grad for p in network.parameters())]
    found: list[nn.Module] = [m for network in frozen for m in network.modules() if type(m) is Encoder]
    found += [network for network in frozen if isinstance(network, PreTrainedModel)]
    for network in found:
        # Of a language model only the decoder is called, or what sees: networks of the same kind inside it.
        for module in {network, *(m for m in network.modules() if isinstance(m, PreTrainedModel))}:
            # A bound method: a copy of the module gets one of its own.
            setattr(module, "forward", MethodType(_narrow(device.type), module))  # noqa: B010
        if at_once:
            cast_by_block(network, device)
    return len(found)


@torch.no_grad()
def store(network: nn.Module) -> bool:
    """Stores the weights of a frozen text encoder's linear layers and convolutions in bfloat16, the type in which
    `enable` has them multiplied: its results are the same to the bit. Embeddings and norms stay float32. False, and
    nothing is changed, for weights that bfloat16 cannot represent: an export would lose them; one that is found when
    it is read sets all of them back."""
    chosen, others = dict[int, nn.Parameter](), set[int]()
    for module in network.modules():
        for p in module.parameters(recurse=False):
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                chosen[id(p)] = p
            else:
                others.add(id(p))
    # An output layer may be the embedding, whose rows are summed in float32.
    own = [p for key, p in chosen.items() if key not in others]
    if not all(p.is_meta or torch.equal(p.bfloat16().float(), p) for p in own if deferred.of(p) is None):
        return False

    def widen() -> None:
        for p in own:
            deferred.store(p, torch.float32)

    for p in own:
        deferred.store(p, torch.bfloat16)
        if (weight := deferred.of(p)) is not None:
            weight.narrow_if(widen)
    return True


def cast_by_block(network: nn.Module, device: torch.device) -> None:
    """Under autocast the weights of a block of this network are cast in one call, and their gradients in another."""
    for part in _parts(network):
        setattr(part, "forward", MethodType(_at_once(device.type), part))  # noqa: B010


def _narrow(device_type: str) -> Callable[..., Any]:
    """The forward pass of a module's type, in bf16."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=torch.bfloat16):
            return _widened(type(self).forward(self, *args, **kwargs))

    return forward


def _parts(network: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that are called and have not more than LARGEST weights, inside of networks that are
    narrow."""
    for module in network.children():
        if isinstance(module, nn.ModuleList | PreTrainedModel) or sum(p.numel() for p in module.parameters()) > LARGEST:
            yield from _parts(module)
        else:
            yield module


def _at_once(device_type: str) -> Callable[..., Any]:
    """The forward pass of a module's type, under autocast with copies of its weights that need no cast."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        slots: list[tuple[dict[str, Any], str, Any]] = []
        if torch.is_autocast_enabled(device_type):
            if (tables := self.__dict__.get(_TABLES)) is None:  # looked up once: a GPU waits for the host
                layers = [module for module in self.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
                own = [module for module in layers if not getattr(module, CAST_APART, False)]
                tables = self.__dict__[_TABLES] = [module._parameters for module in own]
            slots = [(table, name, p) for table in tables for name, p in table.items() if _is_wide(p)]
        copies = _Cast.apply(torch.get_autocast_dtype(device_type), *(p for *_, p in slots)) if slots else ()
        try:
            for (table, name, _), copy in zip(slots, copies, strict=True):
                table[name] = copy
            return type(self).forward(self, *args, **kwargs)
        finally:
            for table, name, p in slots:
                table[name] = p

    return forward


class _Cast(torch.autograd.Function):
    """Copies of weights in another type."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        copies = [torch.empty_like(p, dtype=dtype) for p in weights]
        torch._foreach_copy_(copies, list(weights))
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [g for g in gradients if g is not None]
        wide = [torch.empty_like(g, dtype=torch.float32) for g in found]
        if found:
            torch._foreach_copy_(wide, found)
        rest = iter(wide)
        return None, *(None if g is None else next(rest) for g in gradients)


def _is_wide(p: Tensor | None) -> bool:
    # What waits in the host's memory is on the device inside of its block alone.
    return p is not None and p.dtype == torch.float32 and not isinstance(p, DTensor) and not waits(p)


def _widened(found: Any) -> Any:
    """The same results, in float32."""
    if isinstance(found, Tensor):
        return found.float() if found.is_floating_point() else found
    if isinstance(found, dict):  # transformers' outputs
        return type(found)(**{name: _widened(value) for name, value in found.items()})
    if isinstance(found, tuple):
        return tuple(_widened(value) for value in found)
    return found
