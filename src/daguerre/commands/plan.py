"""`daguerre plan`: mesh, rules, where each parameter goes and how much memory a device needs, without any device."""

from __future__ import annotations

import json

from pydantic import Field, field_validator

from daguerre import overrides
from daguerre.commands import data_arguments, plan_bytes, plan_target, plan_text, theirs
from daguerre.settings import Settings
from daguerre.training.settings import bytes_of

SUMMARY = "how a recipe spreads over devices, and the memory that each needs"
HELP = """\
usage: daguerre plan RECIPE [devices=N nodes=N card=SIZE] [key=value ...] [--all] [--json]

Says, without any device or weights, how devices share a recipe's model and what each needs: the mesh, the rules, which
parameter goes where, bytes by what they are for, the peak of a step, and the largest micro-batch that fits.

  daguerre plan sdxl
  daguerre plan sdxl card=24GB optimizer.name=adamw_8bit
  daguerre plan sdxl devices=64 nodes=8 mesh.ici_fsdp_parallelism=8
  daguerre plan sdxl devices=8 mesh.ici_fsdp_parallelism=4 mesh.ici_tensor_parallelism=2 --all

  devices=1    devices in all
  nodes=1      nodes that they are on
  card=SIZE    memory of a device, such as 24GB (1e9 bytes) or 80GiB: what fits it, and what to do if it does not
  --all        every parameter, in place of one line a pattern
  --json       the same for programs

Settings of the recipe are overridden as for `daguerre train`. docs/plan.md says what is counted, and what is not.
"""


class Options(Settings):
    """What `plan` takes beside the recipe's settings."""

    devices: int = Field(1, ge=1)
    """Devices in all."""
    nodes: int = Field(1, ge=1)
    """Nodes that they are on."""
    card: str | None = None
    """Memory of a device, such as `24GB` or `80GiB`. null: none in particular."""

    @field_validator("card")
    @classmethod
    def _is_a_size(cls, card: str | None) -> str | None:
        if card is not None:
            bytes_of(card)
        return card


def run(arguments: list[str]) -> int:
    """Exit code 0; UserError or ConfigError for what cannot be."""
    given = overrides.split(arguments, flags=("--all", "--json"))
    options, rest = data_arguments.own_options(given.overrides, Options)
    loaded = theirs.load(given.recipe, rest)
    mesh = loaded.config.mesh.resolved(options.devices, options.nodes)
    target = plan_target.of(loaded.config, mesh, options.card)
    parts = target.parts()
    counted = plan_bytes.count(target.config, parts, mesh)
    step = plan_target.step(target, parts, counted)
    every = "--all" in given.flags
    axis_rules = target.config.mesh.logical_axis_rules
    if "--json" in given.flags:
        document = {"recipe": given.recipe, **plan_text.document(counted, axis_rules, every), "step": step.document()}
        print(json.dumps(document, indent=2))
        return 0
    sections = {
        "Mesh": plan_text.about_mesh(mesh),
        "Rules": plan_text.about_rules(axis_rules, mesh, counted.said),
        "Parameters": plan_text.about_parameters(counted, every),
        "Not split as the rules say": plan_text.about_problems(counted.problems, every),
        "Bytes a device": plan_text.held_table(counted, target.config.optimizer.name),
        "A step": step.lines(),
        "Notes": plan_text.wrapped([*loaded.notices, *target.notes()]),
    }
    config = target.config
    lines = [f"{config.run_name}: {config.description or config.model.family}"]
    for title, content in sections.items():
        lines += plan_text.section(title, content)
    print("\n".join(lines))
    return 0
