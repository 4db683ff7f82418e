"""A network that several devices train together, as training/sharding.py wants it: over a mesh, in whichever way
distributed/parallelize.py has split it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from daguerre.distributed import collectives, parallelize
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.rank0 import Agreement
from daguerre.distributed.sharding_rules import ParameterSplit, own_region
from daguerre.training.sharding import Sharding, ShardRegion, exchange


class MeshSharding(Sharding):
    """This process among those of a mesh. `net` must have been split already; all calls are collective."""

    def __init__(
        self,
        net: nn.Module,
        mesh: Mesh,
        placed: Sequence[ParameterSplit],
        split: parallelize.Split,
        rank: int,
        agreement: Agreement,
    ) -> None:
        self.mesh, self._split, self._agreement = mesh, split, agreement
        self.rank, self.ranks = mesh.batch_rank(rank), mesh.batch_ranks
        self._net = net
        self._parameters = dict(net.named_parameters())
        # Asked now: while FSDP2 has parameters gathered, the network shows those and not the parts.
        self._held = dict(zip(self._parameters, parallelize.own_parts(list(self._parameters.values())), strict=True))
        self._state_names = list(net.state_dict())
        self._buffers = dict(net.named_buffers())
        self._parts = {
            each.name: _part(each, mesh, rank, split)
            for each in placed
            if each.tensor is not None or each.fsdp is not None
        }
        self._kinds = {self._held[name]: collectives.split_over(p) for name, p in self._parameters.items()}
        self._groups = [split.mesh[axis].get_group() for axis in ("data", "fsdp") if mesh.degree(axis) > 1]
        self._reducer: collectives.Reducer | None = None
        if mesh.degree("data") > 1 and mesh.degree("fsdp") == 1:
            trained = [p for p in self._parameters.values() if p.requires_grad]
            self._reducer = collectives.Reducer(trained, split.mesh["data"].get_group())

    @property
    def splits(self) -> bool:
        """True if a device holds only a part of some parameters."""
        return bool(self._parts)

    def held(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """This device's part of each parameter, in the memory of the parameter."""
        self._expect(net)
        return dict(self._held)

    def weights(self, net: nn.Module) -> dict[str, Tensor]:
        """The same by the names of the state dict, buffers included."""
        self._expect(net)
        return {
            name: self._held[name].detach() if name in self._held else self._buffers[name] for name in self._state_names
        }

    def part(self, name: str) -> ShardRegion | None:
        """The part of a parameter that is held; None for all of it."""
        return self._parts.get(name)

    def rewritten(self, net: nn.Module) -> None:
        """Drops what FSDP2 has gathered."""
        parallelize.drop_gathered(net)

    def total(self, count: int) -> int:
        """Sum over the parts of the batch; the devices of a tensor group have the same one."""
        return self._agreement.total(count) // self.mesh.degree("tensor")

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the parts of the batch, in place."""
        for group in self._groups:
            dist.all_reduce(value, group=group)
        return value

    def before_backward(self, net: nn.Module, last: bool) -> None:
        """Gradients stay on each device until the last micro-batch of an update."""
        parallelize.sync_gradients(net, last)
        if self._reducer is not None:
            self._reducer.now = last

    def after_backward(self) -> None:
        """Gradients of the held parts are the sums over the whole batch."""
        if self._reducer is not None:
            self._reducer.finish()
        parallelize.hand_over(list(self._parameters.values()), list(self._held.values()))

    def norm(self, held: Sequence[nn.Parameter]) -> Tensor:
        """The norm of all gradients, each number counted once."""
        kinds: dict[frozenset[str], list[Tensor]] = {}
        for p in held:
            if p.grad is not None:
                kinds.setdefault(self._kinds[p], []).append(p.grad)
        if not kinds:  # on every device: an update leaves parameters idle on all of them
            return torch.zeros((), device=held[0].device)
        return collectives.squared_norm(kinds, self._split.mesh).sqrt()

    @contextmanager
    def swapped(self, net: nn.Module, held: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
        """Exchanges what is the network's own parameter; what is a DTensor's memory (a part of it, or a copy that
        each device of a tensor group has) is copied, as the network reads that."""
        copied = {name: value for name, value in values.items() if self._held[name] is not self._parameters[name]}
        moved = {name: value for name, value in values.items() if name not in copied}
        before = {name: held[name].detach().clone() for name in copied}
        exchange(held, moved)
        self._put(held, copied)
        try:
            yield
        finally:
            exchange(held, moved)
            self._put(held, before)

    @torch.no_grad()
    def _put(self, held: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            held[name].copy_(value)
        self.rewritten(self._net)

    def gather(self, document: Any) -> list[Any]:
        """A document of each part of the batch."""
        everyone = self._agreement.gather([self.rank, document])
        by_rank = {rank: its for rank, its in reversed(everyone)}  # noqa: C416 (of a tensor group the first)
        return [by_rank[rank] for rank in range(self.ranks)]

    def whole(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """These weights of the state dict, one after the other, in their own order; each exists whole for a moment."""
        for name in [name for name in self._state_names if name in names]:
            if name in self._parameters:
                yield name, self._split.own_order(name, parallelize.whole(self._parameters[name].detach()))
            else:
                yield name, self._buffers[name]

    def _expect(self, net: nn.Module) -> None:
        if net is not self._net:
            raise ValueError("this is not the network that was split")


def _part(placed: ParameterSplit, mesh: Mesh, rank: int, split: parallelize.Split) -> ShardRegion:
    offsets, _ = own_region(placed, mesh, rank)
    return ShardRegion(offsets, placed.shape, split.orders.get(placed.name))
