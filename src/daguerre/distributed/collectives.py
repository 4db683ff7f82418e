"""Sums over ranks: of gradients along the data axis, of squared norms, of counts. All are collective calls."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from daguerre.distributed.parallelize import local
from daguerre.training.sharding import norms

_BUCKET_BYTES = 25 << 20


class Reducer:
    """Sums gradients along the data axis while the backward pass goes on, in buckets, as DDP does.

    For networks that FSDP2 does not hold. Parameters come in the reverse of their order, which is about the order in
    which their gradients are ready.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.now = False
        """True if the next backward pass shares gradients; `finish` must follow it."""
        self._group = group
        self._buckets = _buckets(parameters)
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._ready = [0] * len(self._buckets)
        self._works: dict[int, tuple[dist.Work, Tensor, list[Tensor]]] = {}
        for p in self._bucket_of:
            p.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        if not self.now:
            return
        index = self._bucket_of[parameter]  # type: ignore[index]  # the hook hands its parameter back
        self._ready[index] += 1
        if self._ready[index] == len(self._buckets[index]):
            self._begin(index)

    def _begin(self, index: int) -> None:
        gradients = [local(p.grad) for p in self._buckets[index] if p.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._works[index] = (work, flat, gradients)

    def finish(self) -> None:
        """After the last backward pass of an update: waits, and puts the sums in place of the gradients."""
        for index in range(len(self._buckets)):
            if index not in self._works:  # some of its parameters took no part in the loss, or `now` was not set
                self._begin(index)
            self._end(index - 1)  # one is on its way meanwhile: all of them would be a copy of all gradients
        self._end(len(self._buckets) - 1)
        self._ready = [0] * len(self._buckets)
        self.now = False

    def _end(self, index: int) -> None:
        if index not in self._works:
            return
        work, flat, gradients = self._works.pop(index)
        work.wait()
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one type of number that together fill a bucket, in reverse order."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(parameters):
        size = local(p).nbytes
        if not found or size > room or found[-1][0].dtype != p.dtype:
            found.append([])
            room = _BUCKET_BYTES
        found[-1].append(p)
        room -= size
    return found


def squared_norm(kinds: Mapping[frozenset[str], Sequence[Tensor]], devices: DeviceMesh) -> Tensor:
    """Sum of squares of all gradients, 0-dim float32 (float64 of such), the same on every rank.

    `kinds` are the parts of gradients that this rank holds, by the axes along which they are split: summed over these,
    and over no other, each number is counted once. All ranks have the same kinds, as they hold the same network.
    """
    ordered = sorted(kinds, key=sorted)
    sums = {kind: norms(kinds[kind]).square().sum() for kind in ordered}
    for axis in devices.mesh_dim_names or ():
        split = [kind for kind in ordered if axis in kind]
        if devices[axis].size() > 1 and split:
            over = torch.stack([sums[kind] for kind in split])
            dist.all_reduce(over, group=devices[axis].get_group())
            sums |= zip(split, over.unbind(), strict=True)
    return torch.stack([*sums.values()]).sum()


def split_over(parameter: Tensor) -> frozenset[str]:
    """The axes along which a parameter, and so its gradient, is split."""
    if not isinstance(parameter, DTensor):
        return frozenset()
    names = parameter.device_mesh.mesh_dim_names or ()
    return frozenset(
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if not isinstance(placement, Replicate)
    )
