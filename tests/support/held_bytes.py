"""What four processes really hold of a tiny model in training, on several meshes, beside what was planned.

python held_bytes.py RANK RENDEZVOUS_FILE OUT.json RECIPE [key=value ...]: run by test_plan_processes.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from measured_peak import batch, peak
from torch import Tensor

from daguerre.assembly.batch_sizes import batch_sizes
from daguerre.assembly.parts import build
from daguerre.config import config as configs
from daguerre.config.config import Config
from daguerre.distributed import parallelize
from daguerre.distributed.mesh import AXES, Mesh
from daguerre.distributed.rank0 import Agreement
from daguerre.memory import estimate, static
from daguerre.models.placement import frozen_modules
from daguerre.run import distribute
from daguerre.training import step
from daguerre.training.state import TrainState

MESHES = [(4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)]


def storages(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory under these tensors, each piece once."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            memory = parallelize.local(tensor.detach()).untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


def held(config: Config, mesh: Mesh, rank: int) -> dict[str, int]:
    """Bytes by kind in an update on this rank, and the peak of another."""
    parts = build(config, trains=True)
    group = dist.group.WORLD
    assert group is not None
    agreement = Agreement(group)
    here: Any = SimpleNamespace(world=SimpleNamespace(rank=rank), agreement=agreement)
    sharding, _ = distribute.shard_networks(config, parts, here, mesh)
    state = TrainState.start(
        parts.net, parts.objective.learnt, config.optimizer, config.ema, parts.numerics, config.seed, sharding
    )
    state.net.train()
    sizes = batch_sizes(config, None, mesh.batch_ranks)
    given = batch(config, parts, sizes.micro)

    def update() -> None:
        step.update(
            state, [given] * sizes.accumulation, parts.loss, learning_rate=1e-4, max_grad_norm=1.0,
            autocast=parts.autocast,
        )  # fmt: skip

    update()
    step.backward(state.net, [given], parts.loss, 8, parts.autocast, state.see, state.scaler, sharding)
    gradients = storages(p.grad for p in state.parameters)
    state.optimizer.zero_grad()
    moments = [t for part in state.optimizer.parts for e in part.optimizer.state.values() for t in e.values()]
    buffers = {id(b): b for m in [*parts.family.components.values(), parts.net] for b in m.buffers()}
    frozen = [p for network in frozen_modules(parts.net, parts.networks).values() for p in network.parameters()]
    found = {
        "weights": storages(p for p in parts.net.parameters()),
        "gradients": gradients,
        "moments": storages(t for t in moments if isinstance(t, Tensor)),
        "averages": storages(t for some in [state.ema.averages, *state.ema.profiles.values()] for t in some.values()),
        "frozen": storages(frozen),
        "quantized": 0,
        "buffers": storages(buffers.values()),
    }
    inputs = storages([given.pixels_BCHW, *given.draws.values()])
    return found | {"peak": sum(found.values()) - gradients + inputs + peak(update)}


def mesh_of(shape: tuple[int, int, int]) -> Mesh:
    return Mesh(dict.fromkeys(AXES, 1), dict(zip(AXES, shape, strict=True)))


def main(rank: int, rendezvous: str, out: str, recipe: str, given: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4)
    config = configs.load(recipe, given).config
    found = {}
    for shape in MESHES:
        mesh = mesh_of(shape)
        found[str(shape)] = {"held": held(config, mesh, rank)}
        if rank == 0:
            target = estimate.of(config, mesh, None)
            parts = target.parts()
            count = static.count(target.config, parts, mesh)
            planned = {kind: count.bytes_of(kind) for kind in static.KINDS}
            found[str(shape)]["planned"] = planned | {"peak": estimate.step(target, parts, count).peak.whole}
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5], sys.argv[5:])
