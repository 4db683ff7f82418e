"""Activations that wait in the host's memory between the forward and the backward pass (training.offload_activations).

What autograd keeps of a pass is copied to the host by a stream of its own as soon as it is kept, and back while
gradients of what came after it are computed. Copies have the numbers and strides of what was kept, so that the same
kernels compute the same gradients. Where blocks are recomputed, only what goes into them is kept, and copied.

On a CPU both memories are the host's: the same code runs, and tests count the bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from daguerre.training.memory_tracker import elsewhere
from daguerre.training.performance.swapping import Pool

LEAST_BYTES = 1 << 14
"""Smaller tensors stay on the device: copying them costs more than they take."""
_AHEAD = 4
"""So many tensors are on their way to the device while gradients are computed."""


class _Kept:
    """A tensor that was kept, in the host's memory."""

    def __init__(self, host: Tensor, stride: tuple[int, ...], number: int) -> None:
        self.host, self.stride, self.number = host, stride, number
        self.users = 1
        """Operations that have kept it and not asked for it yet."""
        self.sent: Tensor | None = None
        """Its copy on the device, which may be on its way."""
        self.arrived: torch.cuda.Event | None = None


class Offload:
    """Sends what is kept of passes to the host, and back."""

    def __init__(self, device: torch.device) -> None:
        self.host = Pool()
        self._where = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        return Offload(self._where)

    @contextmanager
    def passing(self, networks: Iterable[nn.Module]) -> Iterator[None]:
        """Within the context of a forward pass with gradients, what is kept is sent to the host, but for the weights of
        these networks, which are on the device anyway."""
        if not torch.is_grad_enabled():
            yield
            return
        own = _Pass(self, networks)
        with saved_tensors_hooks(own.pack, own.unpack):
            yield

    def leave(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in the host's memory, which may be on its way."""
        pins = self._stream is not None
        with elsewhere():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
        self.host.note(host)
        if self._stream is None:
            host.copy_(tensor)
            return host
        self._stream.wait_stream(torch.cuda.current_stream(self._where))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not given away before it was read
        return host

    def send(self, kept: _Kept) -> Tensor:
        """Its copy on the device, which may be on its way."""
        if kept.sent is None:
            made = torch.empty_strided(kept.host.shape, kept.stride, dtype=kept.host.dtype, device=self._where)
            if self._stream is None:
                made.copy_(kept.host)
            else:
                # What was queued before may still read the memory that the allocator has given out again.
                self._stream.wait_stream(torch.cuda.current_stream(self._where))
                with torch.cuda.stream(self._stream):
                    made.copy_(kept.host, non_blocking=True)
                    kept.arrived = self._stream.record_event()
            kept.sent = made
        return kept.sent

    def ready(self, kept: _Kept) -> Tensor:
        """Its copy on the device, behind which what computes may be queued."""
        sent = self.send(kept)
        if kept.arrived is not None:
            torch.cuda.current_stream(self._where).wait_event(kept.arrived)
            kept.arrived = None
        return sent


class _Pass:
    """The tensors that are kept of one forward pass, in their order."""

    def __init__(self, offload: Offload, networks: Iterable[nn.Module]) -> None:
        self._offload = offload
        weights = (t for network in networks for t in [*network.parameters(), *network.buffers()])
        self._weights = {t.untyped_storage()._cdata for t in weights}
        self._kept: list[weakref.ref[_Kept]] = []
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[_Kept]]] = {}
        """Several layers keep the same input: the memory it is in, and what was kept of it."""

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Any:
        """Returns what autograd keeps in place of a tensor."""
        # Without its graph: a result that an operation keeps of itself would never be freed.
        own = tensor.detach()
        if not self._goes(own):
            return own
        memory = own.untyped_storage()
        key = memory._cdata, own.storage_offset(), own.shape, own.stride(), own.dtype, own._version
        if key in self._known:
            of, before = (each() for each in self._known[key])
            if of is memory and before is not None:
                before.users += 1
                return before
        kept = _Kept(self._offload.leave(own), own.stride(), len(self._kept))
        self._kept.append(weakref.ref(kept))
        self._known[key] = weakref.ref(memory), weakref.ref(kept)
        return kept

    @torch.no_grad()
    def unpack(self, kept: Any) -> Tensor:
        """The tensor that was kept, on the device; what was kept before it is on its way."""
        if isinstance(kept, Tensor):
            return kept
        found = self._offload.ready(kept)
        kept.users -= 1
        if kept.users <= 0:
            kept.sent = None
        for number in range(kept.number - 1, max(-1, kept.number - 1 - _AHEAD), -1):
            earlier = self._kept[number]()
            if earlier is not None and earlier.users > 0:
                self._offload.send(earlier)
        return found

    def _goes(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DTensor) or tensor.nbytes < LEAST_BYTES:
            return False
        if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
            return False  # one number in several places: it is less than it looks
        return tensor.untyped_storage()._cdata not in self._weights
