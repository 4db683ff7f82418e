"""Networks split over meshes of four processes, saved together and loaded on other meshes: run by test_parts.py.

python saved_meshes.py FOLDER some|all; forks the ranks, so that everything is imported once
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from known_networks import BLOCKS, HEADS, placed_children
from splits import MESHES, ONE, Both, build

from daguerre.checkpoint.shard_reader import opened
from daguerre.checkpoint.sharded import ShardedStore
from daguerre.checkpoint.shards import Groups, Shard, ShardedTensor, in_order
from daguerre.checkpoint.store import Store
from daguerre.distributed import parallelize, sharding_rules
from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import own_region
from daguerre.ranks import over

CHAINS = {"some": {"sd": [(1, 2, 2), (1, 4, 1)]}}
"""Each mesh loads what the one before it saved."""
CHAINS["all"] = {kind: [*MESHES, MESHES[0]] for kind in ("sd", "sdxl")}


def slices_of(
    net: Both, placed: list[sharding_rules.ParameterSplit], split: parallelize.Split, mesh: Mesh, rank: int
) -> Groups:
    """What a rank holds of each parameter, as views of it."""
    where, found = {each.name: each for each in placed}, {}
    for name, p in net.named_parameters():
        local, (offsets, shape) = parallelize.local(p.detach()), own_region(where[name], mesh, rank)
        assert tuple(local.shape) == shape, (name, local.shape, shape)
        if name in split.orders:
            found[name] = in_order(*split.orders[name], offsets, local, where[name].shape)
        else:
            found[name] = ShardedTensor(where[name].shape, p.dtype, [Shard(offsets, local)])
    return {"model": found}


def split_net(kind: str, mesh: Mesh) -> tuple[Both, list[sharding_rules.ParameterSplit], parallelize.Split]:
    net = build(kind)
    placed = list(placed_children(net, mesh).placed)
    return (
        net,
        placed,
        parallelize.apply(net, mesh, placed, parallelize.device_mesh(mesh, "cpu"), BLOCKS, HEADS),
    )


def work(rank: int, folder: Path, chain: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    assert dist.group.WORLD is not None
    store = ShardedStore(folder / "checkpoints", over(dist.group.WORLD))
    for kind, meshes in CHAINS[chain].items():
        reference = dict(build(kind).named_parameters())
        before = None
        for number, shape in enumerate(meshes):
            mesh = Mesh(ONE, dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
            net, placed, split = split_net(kind, mesh)
            groups = slices_of(net, placed, split, mesh, rank)
            if before is not None:  # what another mesh saved
                with torch.no_grad():
                    for p in net.parameters():
                        parallelize.local(p).zero_()
                with opened(before) as reader:
                    reader.fill(groups)
            for name, p in net.named_parameters():
                assert torch.equal(split.own_order(name, parallelize.whole(p.detach())), reference[name]), (shape, name)
            before = store.commit(store.plan(f"{kind}-{number:08d}", groups, {}))
    dist.barrier()
    if rank == 0:
        loads = {}
        for name in Store(store.root).names():
            reference = dict(build(name.partition("-")[0]).named_parameters())
            tensors = Store(store.root).load(store.root / name).tensors["model"]
            loads[name] = set(tensors) == set(reference) and all(torch.equal(tensors[k], reference[k]) for k in tensors)
        print(json.dumps(loads))


if __name__ == "__main__":
    torch.set_num_threads(1)
    pids = []
    for rank in range(4):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                work(rank, Path(sys.argv[1]), sys.argv[2])
                code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
