"""`daguerre launch`: makes what a cluster needs to start a run. Each verb is a file launch_VERB.py."""

from __future__ import annotations

from daguerre.errors import UserError

SUMMARY = "start a run on a cluster"
HELP = """\
usage: daguerre launch VERB RECIPE [key=value ...]

  slurm    write an sbatch file that trains a recipe on some nodes, and hand it in

  daguerre launch slurm sdxl nodes=16 time=96:00:00 output_dir=/shared/runs

`daguerre launch VERB --help` says more. On one machine with several GPUs no file is needed:

  torchrun --nproc-per-node=8 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m daguerre train RECIPE

docs/launching.md says what signals, a process that dies and one that hangs do to a run on many devices.
"""


def run(arguments: list[str]) -> int:
    """Called where no verb of `launch` was named: prints the help, or says which verbs there are."""
    if not arguments:
        print(HELP.strip("\n"))
        return 0
    raise UserError(
        f"there is no verb `launch {arguments[0]}`; there is: slurm. Write daguerre launch slurm RECIPE nodes=N ..."
    )
