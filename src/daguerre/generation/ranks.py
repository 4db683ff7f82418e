"""Which part of a list this process draws: what the command says, or what a launcher set in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from daguerre.distributed.launch import environment
from daguerre.distributed.launch.environment import Launcher
from daguerre.errors import UserError

_SAID: dict[Launcher, tuple[str, str, str]] = {
    "torchrun": ("torchrun", "RANK", "WORLD_SIZE"),
    "slurm": ("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
}
"""A launcher for people, and its variables for the number of the process and how many there are."""


@dataclass(frozen=True)
class Part:
    """Part `index` of `count` equal ones."""

    index: int = 0
    count: int = 1
    local: int | None = None
    """Number of this process on its machine: which GPU is its own."""
    said: str = ""
    """For people: where that comes from."""

    def __contains__(self, number: int) -> bool:
        return number % self.count == self.index

    def share(self, total: int) -> int:
        """How many of the numbers 0 to `total` - 1 are in it."""
        return len(range(self.index, total, self.count))


def part(shard: str | None, environ: Mapping[str, str] = os.environ) -> Part:
    """What `shard=I/N` says, I counted from 1; else the launcher; else everything."""
    if shard is not None:
        return _of_command(shard)
    try:
        here = environment.read(environ)
    except UserError as error:
        raise UserError(f"{error}; or give shard=I/N") from error
    if here.size == 1:
        return Part()
    launcher, number, count = _SAID[here.launcher]
    said = f"{launcher}: {number}={here.rank}, {count}={here.size}; shard=1/1 draws all"
    return Part(here.rank, here.size, here.local_rank, f"part {here.rank + 1} of {here.size} ({said})")


def _of_command(shard: str) -> Part:
    found = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise UserError(f"shard={shard}: write which part of how many, counted from 1, such as shard=2/8")
    return Part(index - 1, count, None, f"part {index} of {count}" if count > 1 else "")


def use_own_gpu(own: Part) -> None:
    """Processes of one machine take a GPU each, in turn."""
    if own.local is not None and torch.cuda.is_available():
        torch.cuda.set_device(own.local % torch.cuda.device_count())
