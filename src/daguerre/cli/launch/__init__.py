"""Start a run on many devices: of this machine, or of a cluster.

usage: daguerre launch VERB RECIPE [key=value ...]

  daguerre launch local sdxl processes=8 run_name=first
  daguerre launch slurm sdxl nodes=16 time=96:00:00 output_dir=/shared/runs run_name=first

`daguerre launch VERB --help` shows more. docs/launching.md explains signals, processes that die
or hang, and how to start a run with torchrun or srun.
"""

from collections.abc import Sequence
from dataclasses import replace

from daguerre import credentials
from daguerre.cli.train import check_trains
from daguerre.config import config as configs
from daguerre.config import overrides
from daguerre.config.config import Loaded
from daguerre.config.place import own_place
from daguerre.distributed import sharding_rules
from daguerre.run import resume, storage


def trainable(recipe: str, given: Sequence[str], devices: int, nodes: int) -> Loaded:
    """The recipe as its processes will have it, with what to know of its batches and its mesh among the notices.
    UserError for what they would refuse."""
    loaded = configs.load(recipe, [*given, *own_place(recipe, given)])
    check_trains(loaded.config, recipe)
    mesh = loaded.config.mesh.resolved(devices, nodes)
    notices = sharding_rules.check(loaded.config.mesh.logical_axis_rules, mesh)
    home = storage.of(loaded.config.output_dir, loaded.config.run_name)
    sizes = resume.foreseen_sizes(loaded, home, mesh)
    return replace(loaded, notices=(*loaded.notices, *(sizes.notices if sizes else ()), *notices))


def without_secrets(override: str) -> str:
    """`key=value` without the secrets of the addresses in the value."""
    key, text = overrides.pair(override)
    stripped = credentials.redact(text)
    return override if stripped == text else f"{key}={stripped}"
