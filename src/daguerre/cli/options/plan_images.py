"""`daguerre plan --generate`: the memory and time of images."""

from collections.abc import Sequence

from daguerre.cli.options import generate_options
from daguerre.cli.options.plan_options import Options
from daguerre.cli.parts import output
from daguerre.config import overrides
from daguerre.errors import DONE, REFUSED, UserError
from daguerre.formatting import titled
from daguerre.generation import load, planned
from daguerre.memory import estimate, report
from daguerre.tracking.progress import Stages

_COUNTED = {"base", "weights"}
"""Options of `generate` that decide what is counted."""


def run(given: overrides.Arguments, rest: Sequence[str], options: Options) -> int:
    """Prints the plan; exit code 0, or 2 for what has no room. UserError for what cannot be generated."""
    for name in ("devices", "nodes"):
        if name in options.model_fields_set:
            raise UserError(
                f"{name}={getattr(options, name)} has no effect with --generate: each process generates its own "
                "images with networks of its own, so plan one device",
                code="unused",
                setting=name,
            )
    if "--all" in given.flags:
        raise UserError("--all lists what is trained: it has no effect with --generate", code="unused")
    asked = generate_options.read([given.recipe, *rest], planned=True)
    if odd := sorted(asked.options.model_fields_set - _COUNTED):
        raise UserError(
            f"{', '.join(odd)}: a plan counts images of prompts alone, as long as they are read, without files of the "
            "command: remove what is not a setting",
            code="unused",
            setting=odd[0],
        )
    return computed(given, asked, options)


def computed(given: overrides.Arguments, asked: generate_options.Arguments, options: Options) -> int:
    """Computes and prints what images take; the exit code."""
    with Stages() as stages:
        stages.say("building the networks without weights")
        target = estimate.of(asked.config, asked.config.mesh.resolved(1, 1), options.card, None, options.ram)
        own, parts = load.outlined(asked.model, target.config, asked.options.weights == "raw")
        batch = planned.batch(target, own, parts, stages.say)
    if output.FLAG in given.flags:
        document = {"recipe": given.recipe, **batch.document()}
        output.write(output.ImagesPlan.model_validate(document))
    else:
        sections = {**batch.sections(), "Notes": report.wrapped(asked.notices)}
        print("\n".join([f"{given.recipe}: images by {_by(asked)}", *titled(sections)]))
    return DONE if batch.fits else REFUSED


def _by(asked: generate_options.Arguments) -> str:
    """The networks that generate, in words."""
    return {"run": "what it learns", "base": "its pretrained networks", "pipeline": "the pipeline"}[asked.model.kind]
