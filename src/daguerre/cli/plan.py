"""Show how devices share a run, and the memory that each needs.

usage: daguerre plan RECIPE [devices=N nodes=N card=SIZE ram=SIZE] [key=value ...] [--generate] [--all] [--json]

Says, without any device or weights, how devices share a recipe's model and what each needs: the mesh, the rules, which
parameter goes where, bytes by what they are for, the peak of a step, and the largest micro-batch that fits; also the
memory of the host, the disk and the hours of a run.

  daguerre plan sdxl
  daguerre plan sdxl card=24GB ram=32GB
  daguerre plan sdxl devices=64 nodes=8 mesh.ici_fsdp_parallelism=8
  daguerre plan sdxl devices=8 mesh.ici_fsdp_parallelism=4 mesh.ici_tensor_parallelism=2 --all
  daguerre plan sdxl_lora card=8GB --generate batch_size=4 height=1216

  devices=1    devices in all
  nodes=1      nodes that they are on
  card=SIZE    memory of a device, such as 24GB (1e9 bytes) or 80GiB: what fits it; where the recipe does not, the exit
               code is 2, and the settings with which it does are looked for
  ram=SIZE     memory of a node, such as 32GB: whether a run has room in it, and what else it takes
  --generate   the same for images: with the run of this recipe (which need not be there yet) or folder, with its
               pretrained networks (base=true), or with a pipeline; settings as for `daguerre generate`
  --all        every parameter, in place of one line a pattern
  --json       the same for programs (docs/json.md)

Settings of the recipe are overridden as for `daguerre train`. docs/plan.md says what is counted, and what is not.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from daguerre.assembly import swapped
from daguerre.assembly.batch_sizes import shared_out
from daguerre.cli.options import plan_images
from daguerre.cli.options.plan_options import Options
from daguerre.cli.parts import output
from daguerre.cli.train import check_trains
from daguerre.config import config as configs
from daguerre.config import options as config_options
from daguerre.config import overrides
from daguerre.config.config import Config, Loaded
from daguerre.config.errors import NOTHING, ConfigError
from daguerre.errors import DONE, REFUSED
from daguerre.formatting import titled
from daguerre.memory import estimate, remedies, report, static, waiting
from daguerre.memory.estimate import Say, Step, Target
from daguerre.memory.remedies import Fitting
from daguerre.memory.static import MemoryCount
from daguerre.tracking.progress import Stages


def run(arguments: list[str]) -> int:
    """Exit code 0; 2 for what has no room. UserError or ConfigError for what cannot be."""
    given = overrides.split(arguments, flags=("--all", "--generate", output.FLAG))
    options, rest = config_options.own_options(given.overrides, Options)
    if "--generate" in given.flags:
        return plan_images.run(given, rest, options)
    loaded, target = prepared(given.recipe, rest, options)
    if loaded.config.training.swap_blocks == swapped.AUTO:
        rest, line = _with_blocks(rest, options, loaded, target)
        loaded, target = prepared(given.recipe, rest, options)
        loaded = replace(loaded, notices=(*loaded.notices, line))
    return planned(given, rest, options, loaded, target)


def _with_blocks(rest: Sequence[str], options: Options, loaded: Loaded, target: Target) -> tuple[list[str], str]:
    """The overrides with the number of blocks that wait, which the recipe leaves open, and a line about it."""

    def target_of(config: Config) -> Target:
        return estimate.of(config, target.mesh, options.card, target.sizes, options.ram)

    with Stages() as stages:
        count, line = waiting.found(loaded.config, target_of, stages.say)
    return [*rest, f"{swapped.SETTING}={count}"], line


def planned(given: overrides.Arguments, rest: Sequence[str], options: Options, loaded: Loaded, target: Target) -> int:
    """Prints the plan of a recipe that was checked; the exit code."""
    with Stages() as stages:
        counted, step = _computed(target, stages.say)
        fitting = None if step.fits else _fitting(given.recipe, rest, options, step, counted, loaded.typed, stages.say)
    every = "--all" in given.flags
    if output.FLAG in given.flags:
        output.write(_document(given.recipe, target, counted, step, fitting, every))
    else:
        notes = [*loaded.notices, *target.sizes.notices, *target.notices()]
        print("\n".join(_page(target, counted, step, fitting, notes, every)))
    return DONE if step.fits else REFUSED


def document(recipe: str, given: Sequence[str]) -> dict[str, Any]:
    """The plan that `--json` prints, without a search for settings where there is no room."""
    options, rest = config_options.own_options(given, Options)
    _, target = prepared(recipe, rest, options)
    return _document(recipe, target, *_computed(target)).model_dump(mode="json", exclude_unset=True)


def _computed(target: Target, say: Say = lambda stage: None) -> tuple[MemoryCount, Step]:
    say("building the networks without weights")
    parts = target.parts()
    say("computing the memory of a device")
    counted = static.count(target.config, parts, target.mesh)
    return counted, estimate.step(target, parts, counted, say)


def _document(
    recipe: str, target: Target, counted: MemoryCount, step: Step, fitting: Fitting | None = None, every: bool = False
) -> output.Plan:
    document = report.document(counted, target.config.mesh.logical_axis_rules, every)
    document |= {"recipe": recipe, "step": step.document()}
    document |= {"host": step.host.document()} if step.host else {}
    document |= {"fitting": fitting.document()} if fitting else {}
    return output.Plan.model_validate(document)


def prepared(recipe: str, rest: Sequence[str], options: Options) -> tuple[Loaded, Target]:
    """The recipe and what it is planned for. UserError for what `train` would refuse there, but for data that are not
    named: none are read."""
    try:
        loaded = configs.load(recipe, rest)
    except ConfigError as error:
        absent = [p.path for p in error.problems if p.given is NOTHING and re.fullmatch(r"data\.(.+\.)?path", p.path)]
        if not absent:
            raise
        loaded = configs.load(recipe, [*rest, *(f"{path}=data" for path in absent)])
    check_trains(loaded.config, recipe)
    mesh = loaded.config.mesh.resolved(options.devices, options.nodes)
    return loaded, estimate.of(loaded.config, mesh, options.card, shared_out(loaded, mesh), options.ram)


def _fitting(
    recipe: str,
    rest: Sequence[str],
    options: Options,
    step: Step,
    counted: MemoryCount,
    typed: frozenset[str],
    say: Say,
) -> Fitting | None:
    """Settings with which the recipe has room, as a command."""
    kept = remedies.without_batch_cut(rest)
    found = remedies.find(step, counted, typed, lambda more: prepared(recipe, [*kept, *more], options)[1], say)
    verb = ["train", recipe]
    if options.nodes > 1:
        each = options.devices // options.nodes
        verb = ["launch", "slurm", recipe, f"nodes={options.nodes}", f"gpus_per_node={each}"]
    elif options.devices > 1:
        verb = ["launch", "local", recipe, f"processes={options.devices}"]
    return found and replace(found, command=("daguerre", *verb, *kept, *found.given))


def _page(
    target: Target,
    counted: MemoryCount,
    step: Step,
    fitting: Fitting | None,
    notes: Sequence[str],
    every: bool,
) -> list[str]:
    config, axis_rules = target.config, target.config.mesh.logical_axis_rules
    sections = {
        "Mesh": report.describe_mesh(target.mesh),
        "Rules": report.describe_rules(axis_rules, target.mesh, counted.notices),
        "Parameters": report.describe_parameters(counted, every),
        "Not split as the rules say": report.describe_problems(counted.problems, every),
        "Bytes a device": report.resident_table(counted, config.optimizer.name),
        "A step": step.lines(),
        "The machine": step.host.lines(target.ram) if step.host else [],
        "Time": step.host.time_lines() if step.host else [],
        "What fits": [] if step.fits else fitting.lines() if fitting else report.wrapped([remedies.NONE]),
        "Notes": report.wrapped(notes),
    }
    return [f"{config.run_name}: {config.description or config.model.family}", *titled(sections)]
