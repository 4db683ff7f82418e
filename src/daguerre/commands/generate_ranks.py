"""Which part of a list this process draws: what the command says, or what a launcher set in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from daguerre.errors import UserError

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
"""Variables of a launcher: number of the process, how many there are, its number on the machine."""


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
    for launcher, names in _LAUNCHERS.items():
        rank, world, local = (_number(environ, name) for name in names)
        if rank is None or world is None or world == 1:
            continue
        if not 0 <= rank < world:
            raise UserError(f"{names[0]}={rank} and {names[1]}={world} do not fit: give shard=I/N")
        said = f"part {rank + 1} of {world} ({launcher}: {names[0]}={rank}, {names[1]}={world}; shard=1/1 draws all)"
        return Part(rank, world, local, said)
    return Part()


def _of_command(shard: str) -> Part:
    found = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise UserError(f"shard={shard}: write which part of how many, counted from 1, such as shard=2/8")
    return Part(index - 1, count, None, f"part {index} of {count}" if count > 1 else "")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not re.fullmatch(r"\d+", text):
        raise UserError(f"{name}={text!r} in the environment is no number: mend it, or give shard=I/N")
    return int(text) if text else None


def use_own_gpu(own: Part) -> None:
    """Processes of one machine take a GPU each, in turn."""
    if own.local is not None and torch.cuda.is_available():
        torch.cuda.set_device(own.local % torch.cuda.device_count())
