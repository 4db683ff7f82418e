"""The launcher's variables: which of how many processes this one is, and where they meet.

A function of the environment alone: torchrun's variables, those of SLURM's srun, or none for a process on its own.
What is partial or does not fit together is refused by the names of the variables, and so are ranks of MPI. No torch
here; distributed/process_group.py makes the process group.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from daguerre.errors import UserError

Launcher = Literal["none", "torchrun", "slurm"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID")
_STEP_COUNTS = {"SLURM_NTASKS": "SLURM_STEP_NUM_TASKS", "SLURM_NNODES": "SLURM_STEP_NUM_NODES"}
"""The step's counts go before the job's."""
_NO_TASK_OF_SRUN = {"4294967290": "an interactive shell", "4294967291": "the batch script"}
"""Ids of steps that srun did not start for a program."""
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")
"""Counts of processes, as MPI's launchers set them: Open MPI, all with PMI (MPICH, Intel MPI, Cray), MVAPICH, jsrun."""
_PMIX_RANK = "PMIX_RANK"
"""All that a launcher sets which speaks PMIx and nothing else."""
_NODES = re.compile(r"(?:[^\[\],]|\[(?:\d+-\d+|\w+)(?:,(?:\d+-\d+|\w+))*\])+")
"""Each name in a list of nodes."""
FIRST_PORT, PORTS = 12000, 16000
"""Ports below those that systems hand out for connections of their own."""


@dataclass(frozen=True)
class World:
    """This process among those of a run. Ranks are numbered node by node."""

    rank: int = 0
    local_rank: int = 0
    """Number on its node."""
    size: int = 1
    """Processes of the run."""
    local_size: int = 1
    """Processes of each node."""
    nodes: int = 1
    node_rank: int = 0
    launcher: Launcher = "none"
    address: str = ""
    """Host of rank 0; empty if the launcher says nothing."""
    port: int | None = None

    def __str__(self) -> str:
        if self.size == 1:
            return "one process"
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} x {self.local_size}"
        return f"{self.size} processes ({nodes}, by {self.launcher})"


def read(environ: Mapping[str, str] = os.environ) -> World:
    """Reads the launcher's variables. UserError, by their names, for sets that are partial or do not fit."""
    own = {name: _number(environ, name) for name in _TORCHRUN if environ.get(name)}
    slurm = _slurm(environ)
    if "WORLD_SIZE" not in own:
        _refuse_ranks_of_mpi(environ, 1 if slurm is None else slurm.size)
    if slurm is None and not own:
        _refuse_job_without_srun(environ)
        return World()
    if slurm is not None and not environ.get("TORCHELASTIC_RUN_ID") and _repeats(own, slurm):
        return slurm
    torchrun = _torchrun(environ, own)
    if slurm is not None and (slurm.local_rank != 0 or slurm.size not in (1, torchrun.nodes)):
        raise UserError(
            f"two launchers at once: torchrun set {_told(environ, _TORCHRUN)}, srun set {_told(environ, _SLURM)}. "
            "Start torchrun with one task a node, or use srun alone (and unset torchrun's variables)",
            code="conflict",
        )
    return torchrun


def _repeats(own: Mapping[str, int], slurm: World) -> bool:
    """True if torchrun's variables, where there are any, were filled from SLURM's, as scripts do."""
    same = dict(zip(_TORCHRUN, (slurm.rank, slurm.size, slurm.local_rank, slurm.local_size), strict=True))
    return all(same[name] == number for name, number in own.items())


def _torchrun(environ: Mapping[str, str], own: Mapping[str, int]) -> World:
    missing = [name for name in _TORCHRUN if name not in own]
    if missing and own.get("WORLD_SIZE") == 1 and not any(own.get(name) for name in ("RANK", "LOCAL_RANK")):
        return _with_address(World(launcher="torchrun"), environ)
    if missing:
        raise UserError(
            f"{_told(environ, _TORCHRUN)} in the environment, but not {', '.join(missing)}: start with torchrun, which "
            "sets all of them, or unset them for one process",
            code="missing",
        )
    rank, size, local_rank, local_size = (own[name] for name in _TORCHRUN)
    if size < 1 or local_size < 1 or size % local_size:
        raise UserError(
            f"WORLD_SIZE={size} is not a multiple of LOCAL_WORLD_SIZE={local_size}: every node must run as many "
            "processes as the others",
            code="conflict",
        )
    node_rank, place = divmod(rank, local_size)
    if not 0 <= rank < size or place != local_rank or _number(environ, "GROUP_RANK", node_rank) != node_rank:
        raise UserError(
            f"{_told(environ, (*_TORCHRUN, 'GROUP_RANK'))} are inconsistent: ranks are numbered from 0, node by "
            "node, and every node runs as many processes as the others",
            code="conflict",
        )
    world = World(rank, local_rank, size, local_size, size // local_size, node_rank, "torchrun")
    return _with_address(world, environ)


def _with_address(world: World, environ: Mapping[str, str]) -> World:
    port = _number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
    return replace(world, address=environ.get("MASTER_ADDR", ""), port=port)


def _slurm(environ: Mapping[str, str]) -> World | None:
    """Reads srun's variables; None for a process that srun did not start."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step or step in _NO_TASK_OF_SRUN or not environ.get("SLURM_PROCID"):
        return None
    missing = [name for name in _SLURM if not environ.get(name)]
    if missing:
        raise UserError(
            f"{_told(environ, _SLURM)} in the environment, but not {', '.join(missing)}: srun sets all", code="missing"
        )
    numbers = {name: _number(environ, _named(environ, name)) for name in _SLURM}
    rank, size, local_rank, nodes, node_rank = (numbers[name] for name in _SLURM)
    local_size = size // nodes if nodes else 0
    fits = 0 <= rank < size and local_size * nodes == size
    if not fits or local_rank >= local_size or rank != node_rank * local_size + local_rank:
        raise UserError(
            f"{_told(environ, _SLURM)} are inconsistent: every node must run as many tasks as the others (srun "
            "--ntasks-per-node), and ranks must be numbered node by node (srun --distribution=block)",
            code="conflict",
        )
    own = World(rank, local_rank, size, local_size, nodes, node_rank, "slurm")
    own = _with_address(own, environ)
    return replace(own, address=own.address or _first_node(environ), port=own.port or _port(environ))


def _named(environ: Mapping[str, str], name: str) -> str:
    """The variable that holds a count: the step's, else the job's."""
    of_step = _STEP_COUNTS.get(name, "")
    return of_step if environ.get(of_step) else name


def _first_node(environ: Mapping[str, str]) -> str:
    """The node of rank 0: the first of the step's."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            return first_node(environ[name])
    raise UserError(
        "SLURM_JOB_NODELIST is not set: set it, or MASTER_ADDR to the node of the first task", code="missing"
    )


def first_node(text: str) -> str:
    """The first of the nodes that SLURM lists, such as `node[001-003,007],gpu-[1-2]`. UserError for another text."""
    listed = text.strip()
    names = _NODES.findall(listed)
    if not names or ",".join(names) != listed:
        raise UserError(f"{listed!r} is not a list of nodes: SLURM writes node[001-003,007],other", code="invalid")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", names[0])


def _port(environ: Mapping[str, str]) -> int:
    """A port that follows from the ids of job and step, so that two of a node do not meet on one."""
    if not environ.get("SLURM_JOB_ID"):
        raise UserError(
            "SLURM_JOB_ID is not set: set it, or MASTER_PORT to a free port of the first task's node", code="missing"
        )
    return FIRST_PORT + (_number(environ, "SLURM_JOB_ID") + 97 * _number(environ, "SLURM_STEP_ID")) % PORTS


def _refuse_job_without_srun(environ: Mapping[str, str]) -> None:
    """UserError where a job has several tasks and this process does not belong to them: the others would never come."""
    if not environ.get("SLURM_JOB_ID") or _number(environ, "SLURM_NTASKS", 1) <= 1:
        return
    step = environ.get("SLURM_STEP_ID", "")
    where = _NO_TASK_OF_SRUN.get(step, "SLURM_STEP_ID or SLURM_PROCID is not set")
    raise UserError(
        f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but srun did not start this process ({where}): put `srun` before the "
        "command to use all tasks of the job, or SLURM_NTASKS=1 for one process",
        code="conflict",
    )


def _refuse_ranks_of_mpi(environ: Mapping[str, str], known: int) -> None:
    """UserError for a process that MPI's launcher started as one of several, where the other variables tell of `known`
    processes: each would train alone. Those of srun's tasks have the same count, or are what srun sets for each."""
    several = [name for name in _MPI if _number(environ, name, known) not in (1, known)]
    if not several and known == 1 and not any(environ.get(name) for name in _MPI):
        several = [_PMIX_RANK] if _number(environ, _PMIX_RANK, 0) else []
    if several:
        raise UserError(
            f"{_told(environ, tuple(several))}: MPI's launcher (mpirun, mpiexec, prterun) started this process as one "
            "of several. Daguerre does not read its variables, so each would train alone, in one folder. Start with "
            "torchrun, srun or `daguerre launch`; or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT for each process as torchrun does (WORLD_SIZE=1 for processes that share no run)",
            code="unsupported",
        )


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not re.fullmatch(r"\d+", text):
        raise UserError(f"{name}={text!r} in the environment is not a number")
    return int(text)


def _told(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    real = [_named(environ, name) for name in names]
    return ", ".join(f"{name}={environ[name]}" for name in real if environ.get(name)) or "nothing"
