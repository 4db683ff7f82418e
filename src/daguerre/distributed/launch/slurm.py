"""An sbatch file for a run, which a person can read and edit: its options, and its text.

Writes nothing and submits nothing. What the tasks then read of their environment is
distributed/launch/environment.py's.
"""

import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from daguerre import plugins
from daguerre.credentials import is_cut, scrub
from daguerre.distributed.launch.environment import FIRST_PORT, PORTS
from daguerre.errors import PREEMPTED, UserError
from daguerre.settings import Settings, Unused

_TIME = re.compile(r"\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d|\d+-\d{1,2}(:[0-5]?\d){0,2}")
_SIGNAL = re.compile(r"(?:B:)?(USR1|TERM)@(\d{1,5})")
_NAME = re.compile(r"[\w.+@:-]+(,[\w.+@:-]+)*")
_PATH = re.compile(r"[^\n\r\0]+")
_TEMPLATE = Path(__file__).parents[2] / "assets" / "job.sbatch"
_REQUEUE = f"""

# {PREEMPTED}: saved because the time is up. In its next turn the same command goes on from there.
if [ "$code" -eq {PREEMPTED} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi"""


def _time(text: str) -> str:
    if _TIME.fullmatch(text) is None:
        raise UserError("write minutes, HH:MM:SS, D-HH or D-HH:MM:SS, such as 96:00:00")
    return text


def _signal(text: str) -> str:
    found = _SIGNAL.fullmatch(text)
    if found is None or int(found[2]) > 65535:
        raise UserError("write USR1 or TERM, an @, and how many seconds before the end (at most 65535): USR1@180")
    return f"{found[1]}@{found[2]}"


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise UserError("letters, digits and . _ + @ : - only; several with commas between")
    return text


def _path(text: str) -> str:
    if _PATH.fullmatch(text) is None or text != text.strip():
        raise UserError("must be a single line, without spaces around it")
    if scrub(text) != text or is_cut(text):  # words of a command line come with *** in place of them
        raise UserError(
            "contains a password or a token, and secrets are never written to files: set it in the job's environment"
        )
    return text


Time = Annotated[str, AfterValidator(_time)]
Name = Annotated[str, AfterValidator(_name)]
Location = Annotated[str, AfterValidator(_path)]


class SlurmSettings(Settings):
    """Options of `daguerre launch slurm` other than the recipe and its settings."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("accel_bind",), lambda own: own.gpus_per_node == 0, "there are no GPUs to bind to"),
        Unused(
            ("timeout_seconds", "stuck_seconds"),
            lambda own: own.verb != "train",
            "the processes of an evaluation do not wait for one another",
        ),
    )

    nodes: int = Field(1, ge=1)
    """Machines."""
    gpus_per_node: int = Field(8, ge=0)
    """GPUs of each; 0 trains on CPUs."""
    tasks_per_node: int | None = Field(None, ge=1)
    """Processes on each node. Default: one a GPU, or one."""
    cpus_per_task: int = Field(6, ge=1)
    """CPUs of each process; as many read and decode images, unless the command says `loader.num_workers`."""
    job_name: Name | None = None
    """Default: the run's name."""
    partition: Name | None = None
    """Where the job queues. Default: the cluster's."""
    account: Name | None = None
    """Who pays. Default: the cluster's."""
    qos: Name | None = None
    """Quality of service, where the cluster has several."""
    constraint: Location | None = None
    """Features that the nodes must have."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory of each node, such as 900G. Default: the cluster's (`0`, all of it, with exclusive=true)."""
    time: Time | None = None
    """Time limit, as SLURM writes it: 96:00:00, 4-00. Default: the partition's."""
    chdir: Location | None = None
    """Folder that the job runs in. Default: where sbatch is called."""
    output: Location = "slurm-%j.out"
    """File for what is printed, on a disk that all nodes share; %j is the job's id."""
    error: Location | None = None
    """File for messages and errors. Default: `output`."""
    exclusive: bool = True
    """No other job on the nodes."""
    cpu_bind: Name | None = "verbose"
    """How srun binds processes to CPUs; null leaves it to the cluster."""
    accel_bind: Annotated[str, Field(pattern=r"^[gnv]+$")] | None = None
    """How srun binds processes to what lies near them: g GPUs, n network cards, v says so. Where GPUs are bound, each
    process sees its own alone."""
    signal: Annotated[str, AfterValidator(_signal)] = "USR1@180"
    """Which signal comes how many seconds before the time limit: the run saves then, which must not take longer."""
    requeue: bool = True
    """Whether the job queues again by itself when its time is up or a node failed; the run goes on where it was."""
    kill_wait: int = Field(60, ge=0)
    """Seconds that the other processes have when one has ended before they are killed."""
    timeout_seconds: float | None = Field(None, gt=0)
    """`distributed.timeout_seconds` of the run."""
    stuck_seconds: float | None = Field(None, gt=0)
    """`distributed.stuck_seconds` of the run."""
    setup: Location | None = None
    """A line that prepares the environment before the run, such as `module load cuda`."""
    python: Location = sys.executable
    """Interpreter that has daguerre, on every node. Default: this one."""
    verb: Literal["train", "evaluate"] = "train"
    """`evaluate` writes a job that measures a run, with the options of `daguerre evaluate`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.gpus_per_node and self.tasks_per_node not in (None, self.gpus_per_node):
            raise ValueError(
                f"tasks_per_node={self.tasks_per_node} with gpus_per_node={self.gpus_per_node}: each process drives "
                "one GPU; remove tasks_per_node"
            )
        if self.requeue and self.signal.startswith("TERM"):
            raise ValueError(
                f"signal={self.signal} with requeue=true: a cancelled job also gets TERM and would be queued again; "
                "set signal=USR1@180, or requeue=false"
            )
        return self

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.tasks_per_node or self.gpus_per_node or 1

    def overrides(self) -> list[str]:
        """The run's own settings that these options set."""
        given = {name: getattr(self, name) for name in ("timeout_seconds", "stuck_seconds")}
        return [f"distributed.{name}={value:g}" for name, value in given.items() if value is not None]


def check_options(keys: Iterable[str], known_settings: Iterable[str]) -> None:
    """UserError for a key that is no setting of a recipe and nearly an option: it would go to the run otherwise."""
    options = list(SlurmSettings.model_fields)
    known = {name for path in known_settings for name in (path, path.rpartition(".")[2])}
    for key in keys:
        plain = key.replace("-", "_")
        similar = difflib.get_close_matches(plain, options, n=1, cutoff=0.7)
        if plain not in known and "." not in plain and plain not in options:
            hint = (
                f"did you mean {similar[0]}?"
                if similar
                else f"there are {', '.join(options)}, and the recipe's settings"
            )
            raise UserError(f"{key}: no such option: {hint}", code="unknown", setting=key)


class _Template(Template):
    delimiter = "@"


def batch_file(
    own: SlurmSettings, recipe: str, overrides: Sequence[str], file: str = "FILE", own_workers: bool = True
) -> str:
    """The text of the sbatch file: assets/job.sbatch with these options. `overrides` are the recipe's, `key=value`;
    with `own_workers` as many processes read data as a task has CPUs."""
    count, seconds = own.nodes * own.tasks, own.signal.partition("@")[2]
    if own.signal.startswith("TERM"):
        signals = (
            f"SLURM sends TERM to the run {seconds} s before the time limit, as it does for a job that is cancelled."
        )
    else:
        signals = f"SLURM sends USR1 to this shell {seconds} s before the time limit; srun hands it on; the run saves."
    return _Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        recipe=recipe,
        does={"train": "Trains", "evaluate": "Evaluates"}[own.verb],
        processes=f"{count} process{'es' if count > 1 else ''}",
        nodes=f"{own.nodes} node{'s' if own.nodes > 1 else ''}",
        tasks=own.tasks,
        submit=submit_command(file),
        options="\n".join(f"#SBATCH {option}" for option in _options(own, recipe)),
        setup=f"\n{own.setup}" if own.setup else "",
        first_port=FIRST_PORT,
        ports=PORTS,
        threads="1" if own.gpus_per_node else "$SLURM_CPUS_PER_TASK",
        command=" \\\n    ".join(_command(own, recipe, overrides, own_workers)),
        signals=signals,
        requeue=_REQUEUE if own.requeue else "",
    )


def submit_command(file: str) -> str:
    """The command that hands the file in."""
    return f"sbatch {shlex.quote(file)}"


def job_name(own: SlurmSettings, name: str) -> str:
    """The one that is given, or that of a run or of a recipe."""
    plain = name.rstrip("/").rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    return own.job_name or re.sub(r"[^\w.+@:-]+", "-", plain).strip("-") or "daguerre"


def _options(own: SlurmSettings, recipe: str) -> list[str]:
    given = {
        "job-name": job_name(own, recipe),
        "partition": own.partition,
        "account": own.account,
        "qos": own.qos,
        "constraint": own.constraint,
        "nodes": own.nodes,
        "ntasks-per-node": own.tasks,
        "gpus-per-node": own.gpus_per_node or None,
        "cpus-per-task": own.cpus_per_task,
        "mem": own.mem or ("0" if own.exclusive else None),
        "time": own.time,
        "chdir": own.chdir,
        "output": own.output,
        "error": own.error,
        "signal": own.signal if own.signal.startswith("TERM") else f"B:{own.signal}",
    }
    found = [f"--{key}={_quoted(str(value))}" for key, value in given.items() if value is not None]
    found.append("--open-mode=append")  # a requeued job writes on
    found += ["--exclusive"] if own.exclusive else []
    return [*found, "--requeue" if own.requeue else "--no-requeue"]


def _quoted(value: str) -> str:
    """As sbatch reads its lines: in double quotes where there are spaces, quotes or a #."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if re.search(r"[\s\"'#\\]", value) else value


def _command(own: SlurmSettings, recipe: str, overrides: Sequence[str], own_workers: bool) -> list[str]:
    # Not --kill-on-bad-exit: it would kill ranks that are still saving when the first one leaves with its signal's
    # code. The ranks end one another where one is lost.
    srun = ["srun", "--kill-on-bad-exit=0", f"--wait={own.kill_wait}", '--cpus-per-task="$SLURM_CPUS_PER_TASK"']
    srun += [f"--cpu-bind={own.cpu_bind}"] if own.cpu_bind else []
    srun += [f"--accel-bind={own.accel_bind}"] if own.accel_bind else []
    given = [f"--plugins={shlex.quote(str(folder))}" for folder in plugins.folders()]
    program = [shlex.quote(own.python), "-u -m daguerre", *given, own.verb, shlex.quote(recipe)]
    words = [" ".join(srun), " ".join(program)]
    words += map(shlex.quote, overrides)
    words += ['loader.num_workers="$SLURM_CPUS_PER_TASK"'] if own_workers and own.verb == "train" else []
    return [*words, *own.overrides()]
