"""JSON documents between the processes of a run, and actions of rank 0 whose result, or error, is everybody's.

Two small callables carry bytes, so that threads can stand for processes; `over_group` and `over` make them of a process
group of torch.distributed. JSON only: the object collectives of torch are pickle.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from daguerre.errors import UserError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FACTS = ("code", "setting", "exit_code")
"""What another rank's copy of an error needs in addition to its message."""


class RanksGone(UserError):
    """Another rank did not answer in time, or is dead. The group is of no further use: the process should end."""

    code = "failed"


@dataclass(frozen=True)
class Ranks:
    """This process among others. All ranks call each of the methods."""

    rank: int
    count: int
    gather: Callable[[bytes], list[bytes]]
    """On rank 0 what each rank gave, in order; elsewhere anything."""
    broadcast: Callable[[bytes], bytes]
    """Rank 0's bytes, on every rank."""

    def collect(self, document: Any) -> list[Any]:
        """Each rank's JSON on rank 0, an empty list elsewhere."""
        found = self.gather(json.dumps(document).encode())
        return [json.loads(data) for data in found] if self.rank == 0 else []

    def share(self, document: Any = None) -> Any:
        """Rank 0's JSON, on every rank."""
        return json.loads(self.broadcast(json.dumps(document).encode()))

    def led(
        self,
        act: Callable[[], Any],
        shared: type[Exception],
        stopped: str = "",
        help_with: Callable[[Any], object] | None = None,
    ) -> Any:
        """Rank 0 acts; all get its JSON result, or its error if that is one of `shared`.

        Args:
            stopped: what the others raise for any other error of rank 0; empty: nothing, for ranks that are ended then.
            help_with: called elsewhere with each document that rank 0 tells while it acts.
        """
        if self.rank:
            while not {"result", "error"} & (message := self.share()).keys():
                assert help_with is not None, message
                help_with(message)
            if "error" in message:
                raise _rebuilt(shared, message)
            return message["result"]
        answer: dict[str, Any] = {"error": stopped} if stopped else {}
        try:
            answer = {"result": json.loads(json.dumps(act()))}
        except RanksGone:
            answer = {}
            raise
        except shared as error:
            facts = {name: getattr(error, name) for name in _FACTS if hasattr(error, name)}
            answer = {"error": str(error), "facts": facts}
            raise
        finally:
            if answer:
                self.share(answer)
        return answer["result"]


def _rebuilt(kind: type[Exception], message: dict[str, Any]) -> Exception:
    error = kind(message["error"])
    vars(error).update(message.get("facts", {}))
    return error


ALONE = Ranks(0, 1, lambda data: [data], lambda data: data)
"""One process."""


def over(group: dist.ProcessGroup) -> Ranks:
    """The ranks of a gloo group that is used for nothing else, so that saving can go on during training. RanksGone.

    Make it with `dist.new_group(backend="gloo", timeout=...)`: the time-out is what a save waits for the slowest
    disk of all ranks.
    """
    ranks = over_group(group)
    return Ranks(ranks.rank, ranks.count, _answered(ranks.gather), _answered(ranks.broadcast))


def over_group(group: dist.ProcessGroup) -> Ranks:
    """The ranks of a gloo group. RuntimeError, as gloo raises for a time-out and for a connection that is closed."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)

    def gather(data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        own = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in range(count)] if rank == 0 else None
        dist.gather(own, everyone, group=group, group_dst=0)
        return [each[: int(size)].numpy().tobytes() for each, size in zip(everyone or [], sizes, strict=False)]

    def broadcast(data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=group, group_src=0)
        content = torch.empty(int(size), dtype=torch.uint8)
        if rank == 0:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(content, group=group, group_src=0)
        return content.numpy().tobytes()

    return Ranks(rank, count, gather, broadcast)


def _answered(exchange: Callable[_P, _T]) -> Callable[_P, _T]:
    @wraps(exchange)
    def explained(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return exchange(*args, **kwargs)
        except RuntimeError as error:
            raise RanksGone(f"another rank does not respond: {error}") from error

    return explained
