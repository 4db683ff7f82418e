"""Train a recipe on the GPUs of this machine, one process each.

usage: daguerre launch local RECIPE [processes=N] [key=value ...]

Trains RECIPE as `daguerre train` does, with as many processes as this machine has GPUs, which share the work as the
section `mesh` says. The recipe is checked before anything starts; nothing is written by this command itself.

  daguerre launch local sdxl run_name=first
  daguerre launch local sdxl processes=4 mesh.ici_fsdp_parallelism=4 run_name=first
  daguerre launch local quickstart processes=2 training.device=cpu

  processes=N    how many (one a GPU)

Ctrl-C, SIGTERM, SIGUSR1 or a closed terminal: all processes save and leave together, and the same command goes on from
there. The exit code is that of `daguerre train`, or of the process that failed. docs/launching.md says more.
"""

import os
import sys

import torch
from pydantic import Field

from daguerre import credentials
from daguerre.cli.launch import trainable, without_secrets
from daguerre.config import options, overrides
from daguerre.config.config import Config
from daguerre.distributed.launch import local
from daguerre.errors import UserError
from daguerre.settings import Settings


class Options(Settings):
    """Options of `launch local` other than the recipe's settings."""

    processes: int | None = Field(None, ge=1)


def run(arguments: list[str]) -> int:
    given = overrides.split(arguments)
    own, rest = options.own_options(given.overrides, Options)
    count = own.processes or _gpus()
    _refuse_too_many(trainable(given.recipe, rest, count, 1).config, count)
    # Other users of this machine can read command lines, and no environment but their own.
    os.environ.update(credentials.environment())
    return local.run([sys.executable, "-m", "daguerre", "train", given.recipe, *map(without_secrets, rest)], count)


def _gpus() -> int:
    """Count of GPUs. UserError for none."""
    count = torch.cuda.device_count()
    if not count:
        raise UserError(
            "torch sees no GPU on this machine: set the number of processes, such as processes=2",
            code="missing",
            setting="processes",
        )
    return count


def _refuse_too_many(config: Config, count: int) -> None:
    """UserError where processes would have to share a GPU, or have none."""
    there = torch.cuda.device_count()
    wanted = config.training.device == "cuda" or (config.training.device == "auto" and there > 0)
    if wanted and count > there:
        raise UserError(
            f"processes={count}, but there are {there} GPUs, and each process uses one: set processes={there or 1}, "
            "or training.device=cpu",
            code="resources",
            setting="processes",
        )
