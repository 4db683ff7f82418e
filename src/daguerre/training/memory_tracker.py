"""Counts the memory that tensors hold at once while something is computed, operation by operation.

Works on real tensors and on torch's fake ones, which have shapes and no memory. Memory that a kernel takes and gives
back before it returns is not seen.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_elsewhere = False


@contextmanager
def elsewhere() -> Iterator[None]:
    """Memory that is taken within the context is the host's where a device is counted."""
    global _elsewhere
    before, _elsewhere = _elsewhere, True
    try:
        yield
    finally:
        _elsewhere = before


class Live(TorchDispatchMode):
    """Within it, the bytes of all memory under tensors that operations return (and of what was noted before)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are held."""
        self.peak = 0
        """Most bytes that were held at once, since the last `reset`."""
        self._known: set[int] = set()

    def reset(self) -> None:
        """From here on the peak is that of what follows."""
        self.peak = self.now

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that exist already."""
        for tensor in tensors:
            self._note(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        # By storage: views share one, and must not count again.
        key, count = memory._cdata, memory.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        if _elsewhere:
            weakref.finalize(memory, self._known.discard, key)
            return
        self.now += count
        self.peak = max(self.peak, self.now)
        # torch keeps one Python object for a storage as long as it lives, so that its end is the end of the memory.
        weakref.finalize(memory, self._freed, key, count)

    def _freed(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.now -= count


def use_cuda_types(network: nn.Module) -> int:
    """From now on norms of `network` have a GPU's types under autocast of a CPU; returns how many there are.

    Autocast of a CPU and of a GPU agree on products, convolutions and attention. A GPU takes and returns norms in
    float32, which doubles what is kept of them for the backward pass. Norms that a kernel of ours computes have their
    own types.
    """
    # The exact types: subclasses are kernels of ours, which choose their types themselves.
    norms = [module for module in network.modules() if type(module) in (nn.GroupNorm, nn.LayerNorm)]
    for module in norms:
        module.register_forward_pre_hook(_wide)
    return len(norms)


def _wide(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
