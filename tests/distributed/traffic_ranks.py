"""The bytes of one update's collectives, counted where they leave for the process group: run by test_traffic.py.

python traffic_ranks.py RANK RANKS RENDEZVOUS_FILE OUT.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from known_networks import BLOCKS, HEADS, placed_children
from tiny_models import TINY_UNET
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from daguerre.distributed import collectives, parallelize
from daguerre.distributed.mesh import Mesh

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
MESHES = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)]}
SAMPLES, PIXELS, WIDTH, TOKENS = 2, 8, 48, 7
"""Of one device's micro-batch; side of the latents, width and length of the text."""
MICRO_BATCHES = 2
KINDS = {
    "c10d::allreduce_": "sum",
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "scatter",
    "_c10d_functional::all_reduce": "sum",
    "_c10d_functional::all_gather_into_tensor": "gather",
    "_c10d_functional::reduce_scatter_tensor": "scatter",
}

MOVE_NOTHING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class Net(nn.Module):
    """A UNet as a family's net holds it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unet = UNet2DConditionModel(**{"cross_attention_dim": WIDTH} | TINY_UNET)

    def forward(self, *given: Any) -> Any:
        return self.unet(*given, return_dict=False)[0]


class Counted(TorchDispatchMode):
    """Counts payloads by kind and group, and whatever collective it does not know by its name."""

    def __init__(self, axes: dict[tuple[int, ...], str]) -> None:
        super().__init__()
        self.axes, self.bytes, self.calls = axes, Counter(), Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes back with plain tensors
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name.startswith(("c10d::", "_c10d_functional::")) and name not in MOVE_NOTHING:
            self._count(name, args, out)
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        kind = KINDS.get(name, name)
        if name.startswith("c10d::"):
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            tensors = [a for a in args if isinstance(a, torch.Tensor)] or list(args[0])
        else:
            group = dist.distributed_c10d._resolve_process_group([a for a in args if isinstance(a, str)][-1])
            tensors = [out, args[0]]
        size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
        where = f"{kind} {self.axes[tuple(dist.get_process_group_ranks(group))]}"
        self.bytes[where] += size
        self.calls[where] += 1


def counted(shape: tuple[int, int, int]) -> dict[str, Any]:
    mesh = Mesh(ONE, dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    net, devices = Net(), parallelize.device_mesh(mesh, "cpu")
    parallelize.apply(net, mesh, placed_children(net, mesh).placed, devices, BLOCKS, HEADS)
    reducer = None
    if mesh.degree("data") > 1 and mesh.degree("fsdp") == 1:
        reducer = collectives.Reducer(list(net.parameters()), devices["data"].get_group())
    axes = {
        tuple(dist.get_process_group_ranks(devices[axis].get_group())): axis for axis in ONE if mesh.degree(axis) > 1
    }
    given = [torch.randn(SAMPLES, 4, PIXELS, PIXELS), torch.rand(SAMPLES), torch.randn(SAMPLES, TOKENS, WIDTH)]
    with Counted(axes) as count:
        for number in range(MICRO_BATCHES):
            parallelize.sync_gradients(net, number == MICRO_BATCHES - 1)
            if reducer is not None:
                reducer.now = number == MICRO_BATCHES - 1
            net(*given).square().mean().backward()
        if reducer is not None:
            reducer.finish()
    return {"bytes": count.bytes, "calls": count.calls}


def main(rank: int, ranks: int, rendezvous: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    found = {",".join(map(str, shape)): counted(shape) for shape in MESHES[ranks]}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
