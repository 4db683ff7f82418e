"""What four processes really hold of a tiny model in training, on several meshes, beside what was planned.

python held_bytes.py RANK RENDEZVOUS_FILE OUT.json RECIPE [key=value ...]: run by test_plan_processes.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from daguerre import config as configs
from daguerre.commands import plan_bytes
from daguerre.commands.parts import Parts, build, outline
from daguerre.commands.placement import frozen, of_net, placement
from daguerre.config import Config
from daguerre.parallel import apply
from daguerre.parallel.agreement import Alone
from daguerre.parallel.mesh import AXES, Mesh
from daguerre.parallel.sharding import MeshSharding
from daguerre.training import step
from daguerre.training.state import TrainState
from daguerre.types import Batch

MESHES = [(4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)]
PX = 16


def batch(parts: Parts, samples: int) -> Batch:
    keys = np.zeros((samples, 3), dtype=np.int64)
    pixels = torch.zeros(samples, 3, PX, PX, dtype=torch.uint8)
    names = [f"sample {i}" for i in range(samples)]
    sizes = np.full((samples, 6), PX, dtype=np.int32)
    made = Batch(keys, pixels, names, torch.ones(samples), names, sizes)
    return Batch(keys, pixels, names, torch.ones(samples), names, sizes, parts.draws(made))


def storages(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory under these tensors, each piece once."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            memory = apply.local(tensor.detach()).untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


def contiguous(network: nn.Module) -> None:
    """FSDP2 splits no others."""
    for p in network.parameters():
        p.data = p.data.contiguous()


def held(config: Config, shape: tuple[int, int, int], rank: int) -> dict[str, int]:
    """Bytes by kind after an update, on this rank."""
    parts = build(config)
    given = batch(parts, 2)
    x0, cond = parts.family.encode(given)
    mesh = mesh_of(shape)
    devices = apply.device_mesh(mesh, "cpu")
    parts.numerics.store(parts.net)
    axis_rules = config.mesh.logical_axis_rules
    whole = []
    for network in frozen(parts.net, parts.family.parts()).values():
        contiguous(network)
        apply.apply(network, mesh, placement(network, axis_rules, mesh).placed, devices)
        whole += list(network.parameters())
    contiguous(parts.net)
    placed = of_net(parts.net, parts.family.parts(), axis_rules, mesh).placed
    split = apply.apply(parts.net, mesh, placed, devices)
    for module in parts.net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    sharding = MeshSharding(parts.net, mesh, placed, split, rank, Alone())
    state = TrainState.start(parts.net, parts.objective, config.optimizer, config.ema, parts.numerics, 0, sharding)
    state.net.train()
    step.backward(
        state.net, [given], lambda net, some: parts.objective.loss(net, x0, cond, some.draws), 8, parts.autocast,
        state.meter, state.scaler, sharding,
    )  # fmt: skip
    gradients = storages(p.grad for p in state.parameters)
    state.optimizer.step(1e-4, torch.zeros((), dtype=torch.bool))
    moments = [t for part in state.optimizer.parts for e in part.optimizer.state.values() for t in e.values()]
    buffers = {id(b): b for m in [*parts.family.parts().values(), parts.net] for b in m.buffers()}
    return {
        "weights": storages(p for p in parts.net.parameters()),
        "gradients": gradients,
        "moments": storages(t for t in moments if isinstance(t, Tensor)),
        "averages": storages(t for some in [state.ema.averages, *state.ema.profiles.values()] for t in some.values()),
        "frozen": storages(whole),
        "buffers": storages(buffers.values()),
    }


def mesh_of(shape: tuple[int, int, int]) -> Mesh:
    return Mesh(dict.fromkeys(AXES, 1), dict(zip(AXES, shape, strict=True)))


def main(rank: int, rendezvous: str, out: str, recipe: str, given: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4)
    config = configs.load(recipe, given).config
    found = {}
    for shape in MESHES:
        planned = plan_bytes.count(config, outline(config), mesh_of(shape))
        found[str(shape)] = {
            "planned": {kind: planned.bytes_of(kind) for kind in plan_bytes.KINDS},
            "held": held(config, shape, rank),
        }
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5], sys.argv[5:])
