"""`daguerre train`: trains what a recipe describes, or goes on with a run that was stopped.

Only what can be known without torch happens here: whether the run folder is free. The run is training_run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from daguerre import config as configs
from daguerre import overrides
from daguerre.checkpoint.run_folder import RunFolder, refuse_if_held
from daguerre.errors import UserError
from daguerre.recipe import shipped

SUMMARY = "train a recipe, or go on with a run that was stopped"
HELP = """\
usage: daguerre train RECIPE [key=value ...] [--dry-run]

Trains a recipe: the name of a shipped one (`daguerre recipes`), a YAML file, or a run folder. The same command again
goes on where the run was stopped, and says so if it is finished. Ctrl-C (or SIGTERM) saves and leaves.

  daguerre train quickstart
  daguerre train quickstart run_name=mine seed=1 optimizer.learning_rate=5e-4
  daguerre train quickstart data.source=folder data.path=pictures
  daguerre train quickstart --dry-run            say what would happen, and stop

Often set
  run_name, output_dir         the run folder is {output_dir}/{run_name}
  seed                         all random numbers follow from it and the samples' ids
  training.duration            "20k steps", "1.5M samples" or "3 epochs"
  training.global_batch_size   samples of one update
  optimizer.learning_rate      peak learning rate
  init_from                    run folder whose weights a new run starts from
  checkpoint.every             interval of saves, such as "500 steps"
  sampling.prompts             what is drawn at each save, such as '["a small green star"]'

Every key: `daguerre recipes --template`, docs/config.md.
"""


def run(arguments: list[str]) -> int:
    """Exit code of a training run; see `daguerre --help` for the codes."""
    # The run needs torch, which takes a second to load: a second run on one folder is refused before that.
    given = overrides.split(arguments, flags=("--dry-run",))
    dry_run = "--dry-run" in given.flags
    wanted = [*given.overrides, *own_place(given.recipe, given.overrides)]
    if not dry_run:
        output_dir, run_name = configs.peek(given.recipe, wanted)
        refuse_if_held(Path(output_dir) / run_name)
    loaded = configs.load(given.recipe, wanted)
    if not dry_run and loaded.config.training.duration.number == 0:
        raise UserError(
            "training.duration is 0: there is nothing to train. To draw with the networks as they are: "
            f"daguerre generate {given.recipe}; to train, give a duration, such as training.duration='1k steps'"
        )
    folder = RunFolder(Path(loaded.config.output_dir) / loaded.config.run_name)
    # Late, for the reason above.
    from daguerre.commands import training_run

    start = training_run.describe if dry_run else training_run.train
    return start(loaded.config, folder, loaded.notices)


def own_place(target: str, given: Sequence[str]) -> list[str]:
    """Overrides by which a run folder means itself, from wherever it is seen and wherever it was moved to.

    None where the target is no run folder, or where the command names another place: that is a new run of its recipe.
    """
    path = Path(target).expanduser()
    if not target or target in shipped() or not path.is_dir() or configs.peek(target, given) != configs.peek(target):
        return []
    path = path if path.name not in ("", "..") else path.resolve()
    return [f"output_dir={path.parent}", f"run_name={path.name}"]
