"""Tensors cut in the ways that meshes cut them, with content that a number decides."""

from __future__ import annotations

import torch
from torch import Tensor

from daguerre.checkpoint.shard_reader import ShardReader
from daguerre.checkpoint.shards import Shard, ShardedTensor, in_order

SHAPES = {
    "uneven": (7, 5),
    "columns": (6, 8),
    "both": (8, 6),
    "gated": (16, 3),
    "kernel": (5, 4, 3, 3),
    "norm": (6,),
    "few": (2, 3),
    "scalar": (),
    "empty": (0, 4),
}
DTYPES = {"columns": torch.bfloat16, "norm": torch.float16, "scalar": torch.int64, "few": torch.float64}


def full(number: int, name: str) -> Tensor:
    """The whole tensor."""
    generator = torch.Generator().manual_seed(1000 * number + len(name) + sum(map(ord, name)))
    values = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64) * 100
    return values.to(DTYPES.get(name, torch.float32))


def content(number: int) -> dict[str, dict[str, Tensor]]:
    """All whole tensors, by group."""
    everything = {name: full(number, name) for name in SHAPES}
    return {"model": everything, "ema": {name: full(number + 500, name) for name in ("uneven", "gated", "norm")}}


def rows(length: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and length of a part of dim 0 as torch chunks it: the last ones may be short or empty."""
    each = -(-length // parts)
    begin = min(length, part * each)
    return begin, min(length, begin + each) - begin


def split(tensor: Tensor, name: str, rank: int, fsdp: int, tensor_parallel: int) -> ShardedTensor:
    """What a rank of a mesh holds of a tensor: a copy of its own, so that it can be filled."""
    shard, head = divmod(rank % (fsdp * tensor_parallel), tensor_parallel)
    shape = tuple(tensor.shape)
    if name in ("scalar", "norm"):
        return ShardedTensor.of(tensor.clone())
    if name in ("columns", "both"):
        width = shape[1] // tensor_parallel
        columns = tensor[:, head * width : (head + 1) * width]
        if name == "columns":  # tensor parallel alone
            return ShardedTensor(shape, tensor.dtype, [Shard((0, head * width), columns.clone())])
        begin, length = rows(shape[0], fsdp, shard)
        return ShardedTensor(
            shape, tensor.dtype, [Shard((begin, head * width), columns[begin : begin + length].clone())]
        )
    if name == "gated":  # the halves' rows interleaved over the tensor axis, then split once more
        order = torch.arange(shape[0]).reshape(2, tensor_parallel, -1).transpose(0, 1).reshape(-1)
        mine, held = shape[0] // tensor_parallel, tensor[order]
        begin, length = rows(mine, fsdp, shard)
        start = head * mine + begin
        return in_order(0, order, (start, 0), held[start : start + length].clone(), shape)
    begin, length = rows(shape[0], fsdp, shard)
    return ShardedTensor(
        shape, tensor.dtype, [Shard((begin, *(0 for _ in shape[1:])), tensor[begin : begin + length].clone())]
    )


def held(number: int, rank: int, fsdp: int, tensor_parallel: int) -> dict[str, dict[str, ShardedTensor]]:
    """What a rank of the mesh (any data degree, fsdp, tensor) holds."""
    return {
        group: {name: split(tensor, name, rank, fsdp, tensor_parallel) for name, tensor in tensors.items()}
        for group, tensors in content(number).items()
    }


def bits(tensor: Tensor) -> bytes:
    """What a tensor is in memory."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_alike(reader: ShardReader, number: int, rank: int, fsdp: int, tensor_parallel: int) -> None:
    """A rank's slices, read back, are those of `held(number, ...)` to the bit."""
    mine, right = (held(value, rank, fsdp, tensor_parallel) for value in (number + 92, number))
    reader.fill(mine)
    for group, named in right.items():
        for name, each in named.items():
            for got, true in zip(mine[group][name].pieces, each.pieces, strict=True):
                assert bits(got.tensor) == bits(true.tensor), (group, name)


def equal(found: dict[str, dict[str, Tensor]], number: int) -> bool:
    """Whether whole tensors are the content of a number, bit for bit."""
    expected = content(number)
    return {g: set(t) for g, t in found.items()} == {g: set(t) for g, t in expected.items()} and all(
        found[g][k].dtype == t.dtype and found[g][k].shape == t.shape and bits(found[g][k]) == bits(t)
        for g, ts in expected.items()
        for k, t in ts.items()
    )
