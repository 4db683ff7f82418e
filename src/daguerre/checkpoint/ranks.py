"""What processes that save together say to one another: bytes gathered on rank 0, bytes told to all.

Two small callables, so that threads can stand for processes; `over` makes them of a process group of
torch.distributed. JSON only: the object collectives of torch are pickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from daguerre.checkpoint.manifest import CheckpointError

_T = TypeVar("_T")


class RanksGone(CheckpointError):
    """Another rank did not answer in time, or is dead. The group is of no further use: the process should end."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that save together."""

    rank: int
    count: int
    gather: Callable[[bytes], list[bytes]]
    """On rank 0 what each rank gave, in order; elsewhere anything. All ranks call it. RanksGone."""
    broadcast: Callable[[bytes], bytes]
    """What rank 0 gave, on every rank. All ranks call it. RanksGone."""

    def collect(self, document: Any) -> list[Any]:
        """Each rank's JSON on rank 0, an empty list elsewhere."""
        found = self.gather(json.dumps(document).encode())
        return [json.loads(data) for data in found] if self.rank == 0 else []

    def tell(self, document: Any = None) -> Any:
        """Rank 0's JSON, on every rank."""
        return json.loads(self.broadcast(json.dumps(document).encode()))

    def led(self, act: Callable[[], Any], help_with: Callable[[Any], object] | None = None) -> Any:
        """Rank 0 acts; all get its JSON result, or its CheckpointError. What else rank 0 tells meanwhile, the others
        `help_with`."""
        if self.rank:
            while not {"result", "error"} & (told := self.tell()).keys():
                assert help_with is not None, told
                help_with(told)
            if "error" in told:
                raise CheckpointError(told["error"])
            return told["result"]
        told = {"error": "rank 0 was stopped by an error of its own"}
        try:
            told = {"result": json.loads(json.dumps(act()))}
        except RanksGone:
            told = {}
            raise
        except CheckpointError as error:
            told = {"error": str(error)}
            raise
        finally:
            if told:
                self.tell(told)
        return told["result"]


ALONE = Ranks(0, 1, lambda data: [data], lambda data: data)
"""One process."""


def over(group: dist.ProcessGroup) -> Ranks:
    """The ranks of a gloo group that is used for nothing else, so that saving can go on beside training.

    Make it with `dist.new_group(backend="gloo", timeout=...)`: the time-out is what a save waits for the slowest
    disk of all ranks.
    """
    rank, count = dist.get_rank(group), dist.get_world_size(group)

    def gather(data: bytes) -> list[bytes]:
        return _answered(lambda: _gather(data, group, rank, count))

    def broadcast(data: bytes) -> bytes:
        return _answered(lambda: _broadcast(data, group, rank))

    return Ranks(rank, count, gather, broadcast)


def _gather(data: bytes, group: dist.ProcessGroup, rank: int, count: int) -> list[bytes]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = _tensor(data)
    all_of_them = [torch.empty_like(mine) for _ in range(count)] if rank == 0 else None
    dist.gather(mine, all_of_them, group=group, group_dst=0)
    return [_bytes(each[: int(size)]) for each, size in zip(all_of_them or [], sizes, strict=False)]


def _broadcast(data: bytes, group: dist.ProcessGroup, rank: int) -> bytes:
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=0)
    content = _tensor(data) if rank == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=0)
    return _bytes(content)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _answered(exchange: Callable[[], _T]) -> _T:
    try:
        return exchange()
    except RuntimeError as error:  # what gloo raises for a time-out and for a connection that is closed
        raise RanksGone(f"another rank does not answer: {error}") from error
