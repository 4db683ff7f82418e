"""Transformers with fused layers split over a mesh, compared with one process: run by test_fused_layers.py.

python fused_ranks.py FOLDER RANKS; forks the ranks, so that everything is imported once
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import forked
from fused_networks import BATCH, KINDS, known, network, output, with_lora
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from daguerre.checkpoint.shard_reader import opened
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.shards import Groups, Shard, ShardedTensor, in_order
from daguerre.distributed import collectives, parallelize
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import DEFAULT, ParameterSplit, own_region
from daguerre.models.placement import placement
from daguerre.ranks import over

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
MESHES = {2: [(1, 1, 2), (1, 2, 1)], 4: [(1, 2, 2), (2, 1, 2)]}
CASES = [(kind, lora) for kind in KINDS for lora in (False, True)]
RATE = 1e-3


def build(kind: str, lora: bool) -> Any:
    return with_lora(network(kind)) if lora else network(kind)


class Trained:
    """A network on a mesh, and what an update of it gives, whole and in its library's order."""

    def __init__(self, kind: str, lora: bool, mesh: Mesh, rank: int) -> None:
        self.net, self.mesh, self.rank, self.kind = build(kind, lora), mesh, rank, kind
        own = known(kind, self.net)
        self.placed = {each.name: each for each in placement(own, DEFAULT, mesh).placed}
        devices = parallelize.device_mesh(mesh, "cpu")
        self.trained = {name: p.requires_grad for name, p in self.net.named_parameters()}
        facts = own.facts
        self.split = parallelize.apply(self.net, mesh, [*self.placed.values()], devices, facts.blocks, {facts.heads})
        self.parameters = dict(self.net.named_parameters())
        self.parts = dict(zip(self.parameters, parallelize.own_parts([*self.parameters.values()]), strict=True))
        self.reducer = None
        if mesh.degree("fsdp") == 1 and mesh.degree("data") > 1:
            trained = [p for p in self.parameters.values() if p.requires_grad]
            self.reducer = collectives.Reducer(trained, devices["data"].get_group())

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A parameter, or its gradient, of its parts."""
        p = self.parameters[name]
        if isinstance(p, DTensor):
            made = DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            part = parallelize.whole(made)
        return self.split.own_order(name, part)

    def update(self) -> tuple[Tensor, dict[str, Tensor], float]:
        """This rank's outputs, all gradients and their norm, in two micro-batches; moves the weights."""
        own = BATCH // self.mesh.batch_ranks
        first = self.mesh.batch_rank(self.rank) * own
        outputs = []
        for begin in range(first, first + own, max(1, own // 2)):
            last = begin + max(1, own // 2) >= first + own
            parallelize.sync_gradients(self.net, last)
            if self.reducer is not None:
                self.reducer.now = last
            y = output(self.kind, self.net, slice(begin, begin + max(1, own // 2)))
            (y.square().sum() / BATCH).backward()
            outputs.append(y.detach())
        if self.reducer is not None:
            self.reducer.finish()
        parallelize.hand_over([*self.parameters.values()], [*self.parts.values()])
        gradients = {name: self.whole(name, p.grad) for name, p in self.parts.items() if p.grad is not None}
        kinds: dict[frozenset[str], list[Tensor]] = {}
        for name, p in self.parts.items():
            if p.grad is not None:
                kinds.setdefault(collectives.split_over(self.parameters[name]), []).append(p.grad)
        norm = collectives.squared_norm(kinds, self.split.mesh).sqrt().item()
        torch.optim.AdamW([p for p in self.parts.values() if p.requires_grad], lr=RATE, eps=1e-6).step()
        return torch.cat(outputs), gradients, norm

    def weights(self) -> dict[str, Tensor]:
        parallelize.drop_gathered(self.net)
        return {name: self.whole(name, p.detach()) for name, p in self.parts.items()}

    def groups(self) -> Groups:
        """What this rank holds, as views."""
        return {"model": {name: self._sliced(self.placed[name], p.detach()) for name, p in self.parts.items()}}

    def _sliced(self, placed: ParameterSplit, local: Tensor) -> ShardedTensor:
        offsets, shape = own_region(placed, self.mesh, self.rank)
        assert tuple(local.shape) == shape, (placed.name, local.shape, shape)
        if placed.name in self.split.orders:
            return in_order(*self.split.orders[placed.name], offsets, local, placed.shape)
        return ShardedTensor(placed.shape, local.dtype, [Shard(offsets, local)])


def alone(kind: str, lora: bool) -> tuple[nn.Module, Tensor, dict[str, Tensor], float]:
    """The same update on one device."""
    net = build(kind, lora)
    y = output(kind, net)
    (y.square().sum() / BATCH).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=RATE, eps=1e-6).step()
    return net, y.detach(), gradients, norm


def apart(mine: Tensor, theirs: Tensor) -> float:
    return ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)).item()


def compared(kind: str, lora: bool, shape: tuple[int, ...], rank: int) -> dict[str, float]:
    """The largest differences to one process, relative to the largest number of each tensor; and the elements of what
    rank 0 holds, of all."""
    mesh = Mesh(ONE, dict(zip(ONE, shape, strict=True)))
    net, y, expected, norm = alone(kind, lora)
    here = Trained(kind, lora, mesh, rank)
    now = {name: p.requires_grad for name, p in here.net.named_parameters()}
    assert now == here.trained, (kind, shape, now.items() ^ here.trained.items())
    outputs, gradients, own_norm = here.update()
    assert gradients.keys() == expected.keys()
    part = BATCH // mesh.batch_ranks
    weights = here.weights()
    return {
        "outputs": apart(outputs, y[mesh.batch_rank(rank) * part :][:part]),
        "gradients": max(apart(gradients[name], expected[name]) for name in expected),
        "norm": abs(own_norm / norm - 1),
        "weights": max(apart(weights[name], p.detach()) for name, p in net.named_parameters()),
        "share": sum(p.numel() for p in here.parts.values()) / sum(p.numel() for p in net.parameters()),
    }


def saved_and_read(kind: str, lora: bool, rank: int, folder: Path) -> dict[str, bool]:
    """Saved at tensor 2, read whole and at tensor 2 again, to the bit."""
    mesh = Mesh(ONE, {**ONE, "tensor": 2})
    here = Trained(kind, lora, mesh, rank)
    here.update()
    expected = here.weights()
    assert dist.group.WORLD is not None
    store = ShardedStore(folder / f"{kind}-{lora}", over(dist.group.WORLD))
    saved = store.commit(store.plan("step-00000001", here.groups(), {}))
    again = Trained(kind, lora, mesh, rank)
    with opened(saved) as reader:
        read = {name: reader.read("model", name) for name in expected}
        reader.fill(again.groups())
    weights = again.weights()
    return {
        "whole": all(torch.equal(read[name], expected[name]) for name in expected),
        "again": all(torch.equal(weights[name], expected[name]) for name in expected),
    }


def work(rank: int, ranks: int, folder: Path, cases: list[tuple[str, bool]], saves: bool) -> dict[str, Any]:
    shapes = MESHES[ranks] if saves else MESHES[ranks][:1]
    found: dict[str, Any] = {
        f"{kind} {'lora' if lora else 'full'} {shape}": compared(kind, lora, shape, rank)
        for kind, lora in cases
        for shape in shapes
    }
    if ranks == 2 and saves:
        found |= {f"{kind} {lora} saved": saved_and_read(kind, lora, rank, folder) for kind, lora in cases}
    return found


def together(ranks: int, folder: Path, cases: list[tuple[str, bool]], saves: bool = False) -> dict[str, Any]:
    """What rank 0 of so many forked processes has found."""
    found: dict[str, Any] = forked(ranks, folder, lambda rank: work(rank, ranks, folder, cases, saves))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(together(int(sys.argv[2]), Path(sys.argv[1]), CASES, saves=True)))
