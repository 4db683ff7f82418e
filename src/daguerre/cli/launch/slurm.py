"""Write an sbatch file that trains a recipe, and submit it.

usage: daguerre launch slurm RECIPE nodes=N [option=value ...] [key=value ...] [--submit]

Writes an sbatch file that trains RECIPE, to check and edit; with --submit it is also submitted. Anything that is not an
option below is a setting of the recipe and goes to `daguerre train`. The recipe is checked before anything is written.

  daguerre launch slurm sdxl nodes=16 time=96:00:00 output_dir=/shared/runs run_name=first
  daguerre launch slurm my.yaml nodes=2 gpus_per_node=4 partition=long account=lab mesh.ici_fsdp_parallelism=4 --submit

  daguerre launch slurm runs/first verb=evaluate gpus_per_node=1 --follow metrics=[fid] networks.inception=PATH \\
      reference=reference.safetensors

  verb=evaluate                measures a run, with the options of `daguerre evaluate` (docs/evaluate.md)
  nodes=1 gpus_per_node=8      machines, and GPUs of each; gpus_per_node=0 trains on CPUs
  tasks_per_node=N             processes on each node (one a GPU, or one)
  cpus_per_task=6              CPUs of each process; as many read data, unless the command says num_workers=N
  time=96:00:00                time limit (the partition's)
  partition, account, qos, constraint, mem     as sbatch has them
  job_name=NAME                name of the job (the run's name)
  chdir=FOLDER                 folder that the job runs in (where sbatch is called)
  output=slurm-%j.out, error=FILE    what is printed; messages and errors (the same file)
  exclusive=true               no other job on the nodes
  cpu_bind=verbose, accel_bind=gn    how srun binds processes to CPUs, and to GPUs and network cards
  signal=USR1@180              which signal comes how many seconds before the time limit: the run saves then
  requeue=true                 queues again when the time is up or a node fails; the run goes on where it was
  kill_wait=60                 seconds that the other processes have when one has ended
  timeout_seconds, stuck_seconds     of the run's `distributed` section
  setup="module load cuda"     a line before the run
  python=PATH                  interpreter that has daguerre, on every node (this one)
  out=FILE                     the file (JOB_NAME.sbatch)

The nodes must share the disk with the recipe, the data and the run folder. docs/launching.md says more.
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from daguerre import credentials
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.cli.launch import trainable, without_secrets
from daguerre.cli.options import evaluate_options
from daguerre.cli.parts import out_file
from daguerre.config import merge, options, overrides
from daguerre.config.config import Config, Loaded
from daguerre.config.errors import ConfigError
from daguerre.config.recipe import shipped
from daguerre.distributed.launch.slurm import (
    Location,
    SlurmSettings,
    batch_file,
    check_options,
    job_name,
    submit_command,
)
from daguerre.errors import UserError
from daguerre.foreign.names import lookup


class Options(SlurmSettings):
    """The file's options, and where it goes."""

    out: Location | None = None
    """The file. Default: JOB_NAME.sbatch, and so named after the run."""


def run(arguments: list[str]) -> int:
    """Writes the file; with --submit the exit code of sbatch."""
    given = overrides.split(arguments, flags=("--submit", evaluate_options.FOLLOW))
    own, rest = options.own_options(given.overrides, Options)
    recipe, name = whole(given.recipe), f"{Path(given.recipe).name}-evaluate"
    if own.verb == "train":
        loaded = checked(given.recipe, rest, own)
        for notice in loaded.notices:
            print(notice)
        name = loaded.config.run_name
    else:
        if evaluate_options.FOLLOW in given.flags and not any(one.startswith("follow=") for one in rest):
            rest = [*rest, "follow=newest"]
        check_evaluation(given.recipe, rest, own)
        recipe = recipe if "://" in recipe else str(Path(recipe).expanduser().resolve())
    own = own.model_copy(update={"job_name": job_name(own, name)})
    file = Path(own.out or f"{own.job_name}.sbatch")
    written = [without_secrets(override) for override in rest]
    write(file, batch_file(own, recipe, written, str(file), own_workers=not names_workers(rest)))
    if any(map(credentials.is_cut, written)):
        print(
            f"{file} contains no passwords: *** replaces them. The job reads the full addresses from its "
            f"environment: before sbatch, export {credentials.VARIABLE}='ADDRESS ...'"
        )
    if "--submit" not in given.flags:
        print(f"{file}: check and edit it, then submit it: {submit_command(str(file))}")
        return 0
    return submit(file)


def check_evaluation(run: str, rest: Sequence[str], own: Options) -> None:
    """UserError for options that `daguerre evaluate` would refuse, and for followers that would share nothing."""
    asked = evaluate_options.read([run, *rest])
    if len(asked.words) != 1:
        raise UserError("verb=evaluate: give one run or pipeline", code="missing")
    if asked.options.follow is not None and own.nodes * own.tasks > 1:
        raise UserError(
            f"{own.nodes * own.tasks} processes would follow the run, each for itself: set nodes=1 gpus_per_node=1, or "
            "submit the job several times, as each checkpoint is taken by one of them",
            code="conflict",
        )


def checked(recipe: str, rest: Sequence[str], own: Options) -> Loaded:
    """The recipe as the job's tasks will have it. UserError for what would only fail once the job has its nodes."""
    try:
        loaded = trainable(recipe, [*rest, *own.overrides()], own.nodes * own.tasks, own.nodes)
    except ConfigError as error:
        keys = {overrides.pair(override)[0] for override in rest}
        unknown = [problem.path for problem in error.problems if problem.path in keys]
        check_options(unknown, merge.known(Config, {}))
        raise
    found = loaded.config
    if own.gpus_per_node and found.training.device == "cpu":
        raise UserError(
            f"training.device=cpu with gpus_per_node={own.gpus_per_node}: set gpus_per_node=0, or device=auto",
            code="conflict",
            setting="training.device",
        )
    if not own.gpus_per_node and found.training.device == "cuda":
        raise UserError(
            "training.device=cuda with gpus_per_node=0: give gpus_per_node, or device=cpu",
            code="conflict",
            setting="training.device",
        )
    if own.requeue and found.resume_from_checkpoint != "latest":
        raise UserError(
            f"resume_from_checkpoint={found.resume_from_checkpoint} with requeue=true: a requeued job would do that "
            "again instead of continuing; set requeue=false, or remove resume_from_checkpoint",
            code="conflict",
            setting="resume_from_checkpoint",
        )
    return loaded


def whole(recipe: str) -> str:
    """A recipe that is a file or a run folder, by its whole path: the job may run in another folder."""
    path = Path(recipe).expanduser()
    return recipe if recipe in shipped() or not path.exists() else str(path.resolve())


def names_workers(given: Sequence[str]) -> bool:
    """True if the command says how many processes read data, by whichever name."""
    named = {path for override in given for path, _ in lookup.translate(*overrides.pair(override)).values}
    return bool(named & {"num_workers", "loader.num_workers"})


def write(file: Path, text: str) -> None:
    """UserError for a file that is there and says something else: a person may have edited it."""
    out_file.place(file)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise UserError(
            f"{file} exists with other content: set out=FILE, or remove it first", code="conflict", setting="out"
        )
    write_bytes_atomically(file, text.encode())


def submit(file: Path) -> int:
    """sbatch's exit code; what it says is printed. UserError where there is no sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"there is no sbatch on this machine. {file} was written: on the cluster, run {submit_command(str(file))}",
            code="missing",
        )
    return subprocess.run(["sbatch", str(file)], check=False).returncode
