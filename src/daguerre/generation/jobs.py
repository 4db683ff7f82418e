"""The part of a list that a process generates, and what files and shards have in common as its output."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daguerre.distributed.launch import environment
from daguerre.errors import UserError
from daguerre.generation.contact_sheet import MOST
from daguerre.generation.generate import GeneratedImage, ImageRequest

Generate = Callable[[Iterable[ImageRequest]], Iterator[GeneratedImage]]
Describe = Callable[[ImageRequest], dict[str, Any]]
"""The JSON of an image."""
_VARIABLES = {"torchrun": ("torchrun", "RANK", "WORLD_SIZE"), "slurm": ("SLURM", "SLURM_PROCID", "SLURM_NTASKS")}
"""A launcher's name for people, and its variables for the number of the process and how many there are."""


@dataclass(frozen=True)
class TaskShard:
    """Part `index` of `count` equal ones."""

    index: int = 0
    count: int = 1
    local: int | None = None
    """Number of this process on its machine, which decides its GPU."""
    notice: str = ""
    """For people: where that comes from."""

    def __contains__(self, number: int) -> bool:
        return number % self.count == self.index

    def share(self, total: int) -> int:
        """Count of the numbers 0 to `total` - 1 that are in it."""
        return len(range(self.index, total, self.count))


WHOLE = TaskShard()
"""Everything, by one process."""


def task_shard(shard: str | None, environ: Mapping[str, str] = os.environ) -> TaskShard:
    """The part that `shard=I/N` says, I counted from 1; else the launcher's; else everything."""
    if shard is not None:
        found = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
        index, count = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= index <= count:
            raise UserError(f"shard={shard}: write part/parts, counted from 1, such as shard=2/8")
        return TaskShard(index - 1, count, None, f"part {index} of {count}" if count > 1 else "")
    try:
        here = environment.read(environ)
    except UserError as error:
        raise UserError(f"{error}; or give shard=I/N", code=error.code) from error
    if here.size == 1:
        return TaskShard()
    launcher, number, count_name = _VARIABLES[here.launcher]
    source = f"{launcher}: {number}={here.rank}, {count_name}={here.size}; shard=1/1 generates all"
    return TaskShard(here.rank, here.size, here.local_rank, f"part {here.rank + 1} of {here.size} ({source})")


def use_own_gpu(own: TaskShard) -> None:
    """Gives each process of a machine a GPU, in turn."""
    if own.local is not None and torch.cuda.is_available():
        torch.cuda.set_device(own.local % torch.cuda.device_count())


@dataclass
class Output:
    """The images of a list in a folder; `part` of them are this process's. Subclasses write files or shards."""

    folder: Path
    requests: Iterable[ImageRequest]
    """Read from the start each time."""
    total: int
    """Images of the whole list, over all processes."""
    part: TaskShard
    parameters: Mapping[str, Any]
    """Everything that decides the images."""
    kept: int = 0
    """Images of this part that were there already."""

    @cached_property
    def shown(self) -> frozenset[int]:
        """The numbers of the images on the contact sheet, evenly spread."""
        return frozenset(np.linspace(0, self.total - 1, min(self.total, MOST)).round().astype(int).tolist())
