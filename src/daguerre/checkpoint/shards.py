"""Tensors in rectangular slices: what a rank holds, who writes what, and the index that finds any slice again.

A slice is a region of a tensor: where it begins in each dim, and its shape. Ranks hold regions; equal ones are written
once. Knows nothing of meshes, files' contents or folders: plain data in, plain data out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daguerre.checkpoint.safetensors import dtype_name, dtype_of

INDEX = "slices.json"
"""The index's file in a checkpoint's folder."""
FORMAT = 1


class Region(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    """Its first element in each dim."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: Region) -> tuple[slice, ...]:
        """This region as indexes into a tensor that holds `outer`."""
        starts = [mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))

    def overlap(self, other: Region) -> Region | None:
        """The part that two regions share; None if they share nothing."""
        if self == other:  # nearly always, of one process
            return self if self.elements else None
        begins = [max(mine, its) for mine, its in zip(self.offsets, other.offsets, strict=True)]
        ends = [min(a + la, b + lb) for a, la, b, lb in zip(*self, *other, strict=True)]
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Region(tuple(begins), shape) if all(length > 0 for length in shape) else None


def full_region(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Shard:
    """A part of a tensor that this rank holds."""

    offsets: tuple[int, ...]
    tensor: Tensor
    """Its elements, on any device; a view is fine, and is what loading fills."""

    @property
    def region(self) -> Region:
        """Its place in the tensor."""
        return Region(tuple(self.offsets), tuple(self.tensor.shape))


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of which this rank holds some parts, or none."""

    shape: tuple[int, ...]
    """Of all of it."""
    dtype: torch.dtype
    pieces: Sequence[Shard]

    @classmethod
    def of(cls, tensor: Tensor) -> ShardedTensor:
        """A tensor that this rank holds whole."""
        return cls(tuple(tensor.shape), tensor.dtype, [Shard((0,) * tensor.dim(), tensor)])

    def slice(self, region: Region) -> Tensor:
        """The elements of a region that lies in one of the pieces, as a view."""
        piece = next(each for each in self.pieces if each.region.overlap(region) == region)
        return piece.tensor[region.within(piece.region)]


Groups = Mapping[str, Mapping[str, ShardedTensor]]
"""Tensors by group and name."""


def in_order(dim: int, order: Tensor, offsets: Sequence[int], local: Tensor, shape: Sequence[int]) -> ShardedTensor:
    """A tensor whose elements along a dim were put into another order before it was split.

    `order[i]` is the element, as its library counts them, that stands at place i; `local` is the part whose first
    element stands at `offsets`. The pieces are views of `local`, one for each stretch of elements that follow one
    another.
    """
    places = order[offsets[dim] : offsets[dim] + local.shape[dim]].tolist()
    cuts = [0, *(place for place, (a, b) in enumerate(pairwise(places), 1) if b != a + 1), len(places)]
    pieces = [
        Shard((*offsets[:dim], places[start], *offsets[dim + 1 :]), local.narrow(dim, start, end - start))
        for start, end in pairwise(cuts)
        if end > start
    ]
    return ShardedTensor(tuple(shape), local.dtype, pieces)


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[str, str, Region], ...]
    """File, key in it, region. Together they are the whole, without overlap."""


Index = dict[str, dict[str, Stored]]
"""All tensors of a checkpoint, by group and name."""


def file_of(group: str, rank: int, ranks: int) -> str:
    """The file in which a rank writes its parts of a group."""
    return f"{group}-{rank:05d}-of-{ranks:05d}.safetensors"


def key_of(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def holding(groups: Groups) -> Any:
    """This rank's regions as JSON: [shape, dtype, regions] by group and name. ValueError for what cannot be saved."""
    found: dict[str, dict[str, Any]] = {}
    for group, tensors in groups.items():
        found[group] = {}
        for name, each in tensors.items():
            wrong = [piece.tensor.dtype for piece in each.pieces if piece.tensor.dtype != each.dtype]
            if wrong:
                raise ValueError(f"tensor {name!r} of {group!r} is {each.dtype}, a piece of it is {wrong[0]}")
            found[group][name] = [each.shape, dtype_name(each.dtype, name), [piece.region for piece in each.pieces]]
    return found


Tensors = dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors, by group and name."""
Holders = dict[tuple[str, str, Region], list[int]]
"""The ranks that hold each region of a tensor."""


def _gathered(holdings: Sequence[Any]) -> tuple[Tensors, Holders]:
    tensors: Tensors = {}
    holders: Holders = {}
    for rank, held in enumerate(holdings):
        for group, named in held.items():
            for name, (shape, dtype, regions) in named.items():
                about = tuple(shape), dtype_of(dtype)
                if tensors.setdefault((group, name), about) != about:
                    raise ValueError(f"tensor {name!r} of {group!r} is {about} on rank {rank}, elsewhere it is not")
                for offsets, extent in regions:
                    region = Region(tuple(offsets), tuple(extent))
                    if region.elements and rank not in (ranks := holders.setdefault((group, name, region), [])):
                        ranks.append(rank)
    return tensors, holders


def plan(holdings: Sequence[Any]) -> Index:
    """Assigns writers, from what each rank holds: every element once, bytes balanced over the ranks.

    A region that only one rank holds is written by it. One that several hold goes to the one of them that has least to
    write so far, the largest first; a very large one is cut. ValueError where ranks disagree about a tensor, or where
    their regions overlap or leave a gap.
    """
    tensors, holders = _gathered(holdings)
    regions_of: dict[tuple[str, str], list[Region]] = {key: [] for key in tensors}
    for group, name, region in holders:
        regions_of[group, name].append(region)
    for (group, name), found in regions_of.items():
        _check_tiles(f"{name!r} of {group!r}", tensors[group, name][0], found)
    written = _assign(holders, {key: dtype.itemsize for key, (_, dtype) in tensors.items()}, len(holdings))
    index: Index = {group: {} for held in holdings for group in held}
    if len(holdings) == 1 and all(found == [full_region(tensors[key][0])] for key, found in regions_of.items()):
        # Whole tensors under their own names, a file a group.
        for (group, name), (shape, dtype) in sorted(tensors.items()):
            index[group][name] = Stored(shape, dtype, ((f"{group}.safetensors", name, full_region(shape)),))
        return index
    for (group, name), (shape, dtype) in sorted(tensors.items()):
        parts = sorted((region, rank) for region, rank in written.get((group, name), []))
        index[group][name] = Stored(
            shape,
            dtype,
            tuple((file_of(group, rank, len(holdings)), key_of(name, at.offsets), at) for at, rank in parts),
        )
    return index


def is_unsharded(index: Index) -> bool:
    """True if these are whole tensors under their own names, so that nobody needs the index to find them."""
    return all(
        file == f"{group}.safetensors" for group in index for each in index[group].values() for file, _, _ in each.parts
    )


def _assign(
    holders: Holders, itemsize: Mapping[tuple[str, str], int], ranks: int
) -> dict[tuple[str, str], list[tuple[Region, int]]]:
    """Regions with the rank that writes each, by group and name."""
    fair = sum(region.elements * itemsize[group, name] for group, name, region in holders) / ranks
    jobs = []
    for (group, name, region), able in holders.items():
        pieces = min(len(able), math.ceil(region.elements * itemsize[group, name] / max(fair, 1)))
        jobs += [(part.elements * itemsize[group, name], group, name, part, able) for part in _cut(region, pieces)]
    load = [0] * ranks
    written: dict[tuple[str, str], list[tuple[Region, int]]] = {}
    # What has no choice first, then the largest: the usual greedy balance.
    for size, group, name, region, able in sorted(jobs, key=lambda job: (len(job[4]) > 1, -job[0], job[1:4])):
        rank = min(able, key=lambda candidate: (load[candidate], candidate))
        load[rank] += size
        written.setdefault((group, name), []).append((region, rank))
    return written


def _cut(region: Region, pieces: int) -> Iterable[Region]:
    """A region in at most so many parts of about the same size, along its longest dim."""
    if pieces < 2 or not region.shape:
        return [region]
    dim = max(range(len(region.shape)), key=lambda d: (region.shape[d], -d))
    pieces = min(pieces, region.shape[dim])
    bounds = [region.shape[dim] * i // pieces for i in range(pieces + 1)]
    put: Callable[[tuple[int, ...], int], tuple[int, ...]] = lambda t, value: (*t[:dim], value, *t[dim + 1 :])  # noqa: E731
    return [
        Region(put(region.offsets, region.offsets[dim] + start), put(region.shape, end - start))
        for start, end in pairwise(bounds)
    ]


def _check_tiles(what: str, shape: tuple[int, ...], regions: Sequence[Region]) -> None:
    """ValueError unless the regions are the tensor, each element once."""
    every = full_region(shape)
    if any(len(region.offsets) != len(shape) or region.overlap(every) != region for region in regions):
        raise ValueError(f"tensor {what}: a slice leaves its shape {list(shape)}")
    missing = every.elements - sum(region.elements for region in regions)
    # Regions that fill a grid cannot overlap; only others are compared one with one.
    cuts = [sorted({(region.offsets[d], region.shape[d]) for region in regions}) for d in range(len(shape))]
    grid = all(a + length <= b for dim in cuts for (a, length), (b, _) in pairwise(dim))
    if not grid and any(a.overlap(b) for a, b in combinations(regions, 2)):
        raise ValueError(f"tensor {what}: slices of different ranks overlap without being equal")
    if missing:
        raise ValueError(f"tensor {what}: {missing} of its {every.elements} elements are held by no rank")


def to_bytes(index: Index) -> bytes:
    groups: dict[str, Any] = {}
    for group, tensors in index.items():
        files = sorted({file for each in tensors.values() for file, _, _ in each.parts})
        number = {file: i for i, file in enumerate(files)}
        groups[group] = {
            "files": files,
            "tensors": {
                name: {
                    "shape": each.shape,
                    "dtype": dtype_name(each.dtype, name),
                    "parts": [[number[file], key, *region] for file, key, region in each.parts],
                }
                for name, each in tensors.items()
            },
        }
    return json.dumps({"format": FORMAT, "groups": groups}, separators=(",", ":")).encode() + b"\n"


def from_bytes(data: bytes) -> Index:
    """The index of a verified JSON file. ValueError for a format that this version does not know."""
    content = json.loads(data)
    if content["format"] != FORMAT:
        raise ValueError(f"{INDEX} has format {content['format']!r}, this version of daguerre reads {FORMAT}")
    index: Index = {}
    for group, about in content["groups"].items():
        index[group] = {
            name: Stored(
                tuple(each["shape"]),
                dtype_of(each["dtype"]),
                tuple(
                    (about["files"][file], key, Region(tuple(offsets), tuple(shape)))
                    for file, key, offsets, shape in each["parts"]
                ),
            )
            for name, each in about["tensors"].items()
        }
    return index
