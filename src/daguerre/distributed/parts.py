"""Which part of each parameter a rank holds, by arithmetic alone: no device, no process group, no DTensor.

Tensor parallel cuts first and evenly, FSDP2 then cuts each such part into chunks of which the last may be short or
empty. For checkpoints, which store slices and are read by meshes of other shapes.
"""

from __future__ import annotations

from daguerre.distributed.mesh import Mesh
from daguerre.distributed.sharding_rules import Placed

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part begins in each dim, and its shape."""


def own_region(placed: Placed, mesh: Mesh, rank: int) -> Region:
    """The part that a rank holds, also of the parameter's averages and moments.

    Of parameters in `Split.rows` the rows count in the order that they were put into.
    """
    offsets, shape, place = [0] * len(placed.shape), list(placed.shape), mesh.place(rank)
    for axis, dim in (("tensor", placed.tensor), ("fsdp", placed.fsdp)):
        if dim is not None:
            begin, shape[dim] = _chunk(shape[dim], mesh.degree(axis), place[axis])
            offsets[dim] += begin
    return tuple(offsets), tuple(shape)


def _chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and length of a part, as torch.chunk cuts."""
    each = -(-length // parts)
    begin = min(length, part * each)
    return begin, min(length - begin, each)
