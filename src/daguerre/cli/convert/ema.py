"""A pipeline with averaged weights of another width (post-hoc EMA).

usage: daguerre convert ema RUN width=W [out=FOLDER]

Rebuilds the power-function average of width W at the newest checkpoint of a run, from the profiles of all checkpoints
that it keeps, and writes it as a diffusers pipeline. The run must have been trained with ema.post_hoc.

  daguerre convert ema runs/my-run width=0.15
  daguerre convert ema runs/my-run width=0.03 out=pipeline-sharp

  width=W      standard deviation of the average's profile, as a share of the run: above 0, up to 0.2887
  out=FOLDER   a new folder (default: RUN/pipeline-ema-W)

docs/optimizers.md says more.
"""

from pathlib import Path

from pydantic import Field

from daguerre.assembly import about
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.store import Store
from daguerre.cli.convert import options as given
from daguerre.config import config as configs
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.generation.load import load, newest
from daguerre.remote import local_copy
from daguerre.settings import Settings
from daguerre.training import post_hoc
from daguerre.training.ema import profile_file
from daguerre.training.state import load_weights


class Options(Settings):
    """Options of `convert ema`."""

    width: float = Field(allow_inf_nan=False)
    out: str | None = None


def run(arguments: list[str]) -> int:
    """Writes the pipeline; 0, or a UserError."""
    folder, width, out = read(arguments)
    config = configs.load(str(folder.path)).config
    checkpoint = newest(folder, "latest")
    local_copy.fetch(folder.path, "all")
    found = rebuilt(folder, config, checkpoint.name, width)
    parts = load(config, checkpoint)
    names = parts.attached.names
    weights = {name: tensor for name, tensor in parts.net.state_dict().items() if name in names}
    load_weights(parts.net, {**weights, **found.tensors}, saved=names)
    base, step = checkpoint.documents["base"], checkpoint.documents["state"]["step"]
    told = about.of(config, parts.family, base, step)
    for line in parts.attached.export(out, parts.objective, config.sampling, told):
        print(line)
    print(f"the averaging profile differs by {found.error:.1%} from the one of width {width:g}")
    if found.error > post_hoc.POOR:
        print(
            "this is a large difference, so the average is poor: choose a width closer to the stored ones "
            f"({', '.join(f'{kept:g}' for kept in config.ema.post_hoc)}), or train with more widths (ema.post_hoc) "
            "or more checkpoints over the whole run (checkpoint.every, checkpoint.keep)"
        )
    print(f"{out}: the average of width {width:g} at {checkpoint.name}")
    return 0


def read(arguments: list[str]) -> tuple[RunFolder, float, Path]:
    """The run, the width and the new folder that the command line names."""
    target, options, _ = given.read(arguments, "convert ema", Options)
    folder = RunFolder(local_copy.located(target))
    if not target or not folder.config.is_file():
        raise UserError(f"{target or 'no run given'}: give a run folder, such as runs/my-run", code="missing")
    post_hoc.exponent(options.width)  # refuses a width that no profile has
    if options.out is not None or local_copy.origin(folder.path) is not None:
        return folder, options.width, given.new_place(options.out, "FOLDER")
    return folder, options.width, given.new_place(str(folder.path / f"pipeline-ema-{options.width:g}"), "FOLDER")


def rebuilt(folder: RunFolder, config: Config, last: str, width: float) -> post_hoc.Rebuilt:
    """The average at the checkpoint `last`, from it and all before it. CheckpointError if one of them is damaged."""
    store = Store(folder.checkpoints)
    kept_names = store.names()[: store.names().index(last) + 1]
    names = {int(name.rpartition("-")[2]): name for name in kept_names}
    if not config.ema.post_hoc:
        raise UserError(
            f"{folder.path} has no stored profiles: train with ema.post_hoc=[0.05,0.1]",
            code="missing",
            setting="ema.post_hoc",
        )
    return post_hoc.rebuild(
        [(step, kept) for step in names for kept in config.ema.post_hoc],
        lambda step, kept: store.load(store.root / names[step], only=(profile_file(kept),)).tensors[profile_file(kept)],
        width,
    )
