"""Train a recipe, or continue a stopped run.

usage: daguerre train RECIPE [key=value ...] [--dry-run [--full]]

Trains a recipe: the name of a shipped one (`daguerre recipes`), a YAML file, or a run folder. The same command
continues a stopped run. Ctrl-C, SIGTERM or SIGUSR1 saves and stops.

  daguerre train quickstart
  daguerre train quickstart run_name=mine seed=1 optimizer.learning_rate=5e-4
  daguerre train quickstart data.source=folder data.path=images
  daguerre train quickstart --dry-run            show what would happen, and stop; --full: with every setting
  daguerre train quickstart output_dir=s3://bucket/runs      the run folder in an object store
  daguerre launch local sdxl processes=8                     on eight devices (docs/launching.md)

Common settings
  run_name, output_dir         the run folder is {output_dir}/{run_name}, also under s3:// or gs://
  seed                         seed of all random numbers
  training.duration            "20k steps", "1.5M samples", "3 epochs" or "100 epochs up to 64k samples"
  training.global_batch_size   samples of one update
  optimizer.learning_rate      peak learning rate
  init_from                    run folder whose weights a new run starts from, or the file of a LoRA
  checkpoint.every             interval of saves, such as "500 steps"
  sampling.prompts             prompts of the images at each save, such as '["a small green star"]'

Every key: `daguerre recipes --template`, docs/config.md.
"""

from daguerre import plugins
from daguerre.config import config as configs
from daguerre.config import overrides
from daguerre.config.place import own_place
from daguerre.distributed.launch import environment
from daguerre.errors import ReportedElsewhere, UserError
from daguerre.run import storage


def run(arguments: list[str]) -> int:
    """Exit code of a training run; see `daguerre --help` for the codes."""
    # The run needs torch, which takes seconds to load: most mistakes and a second run on a folder are refused before.
    given = overrides.split(arguments, flags=("--dry-run", "--full"))
    dry_run, full = "--dry-run" in given.flags, "--full" in given.flags
    if full and not dry_run:
        raise UserError("--full needs --dry-run: it lists every setting, including the defaults", code="unused")
    wanted = [*given.overrides, *own_place(given.recipe, given.overrides)]
    own = environment.World() if dry_run else environment.read()
    try:
        configs.check_soon(given.recipe, wanted)
        # Several processes look when they have met: they must not wait for one that has left.
        if own.size == 1 and not dry_run:
            storage.of(*configs.peek(given.recipe, wanted)).check_not_held()
        loaded = configs.load(given.recipe, wanted)
        if not dry_run:
            check_trains(loaded.config, given.recipe)
    except UserError as error:
        if own.local_rank:  # each node has files of its own, of which its first process tells
            raise ReportedElsewhere(error) from None
        raise
    with plugins.uncollected():  # late, for the reason above
        from daguerre.cli.parts import dry_run as dry
        from daguerre.run import cached, trainer

    of_run = storage.of(loaded.config.output_dir, loaded.config.run_name)
    if loaded.config.cache.only and not dry_run:
        return cached.fill_alone(loaded, of_run)
    return dry.describe(loaded, of_run, full) if dry_run else trainer.train(loaded, of_run)


def check_trains(config: configs.Config, recipe: str) -> None:
    """UserError for a recipe that is there for generation."""
    if config.training.duration.number == 0:
        raise UserError(
            "training.duration is 0: there is nothing to train. To generate images with the pretrained networks: "
            f"daguerre generate {recipe}; to train, give a duration, such as training.duration='1k steps'",
            code="empty",
            setting="training.duration",
        )
