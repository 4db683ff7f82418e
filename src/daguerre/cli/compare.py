"""Compare a LoRA with its base: what it learnt, copied and forgot.

usage: daguerre compare RUN [strengths=0.4..1.2] [key=value ...] [--json]

Draws images of three lists of prompts by each saved update of a LoRA's run at each strength, and by the base from the
same seeds: captions of the training pictures, new prompts, and prompts that the base was made for. Writes numbers with
their intervals and a page with all of them into RUN/evaluations, and the report of the run shows the newest. It takes
60 images for the base and 60 for each update and strength; the same command again goes on where it was stopped.

  daguerre compare runs/style                                  the saved updates, at strength 1
  daguerre compare runs/style strengths=0.4..1.2               a grid of updates and five strengths
  daguerre compare runs/style strengths=[0.6,1] updates=[400,600] networks.dinov2=PATH

  strengths=0.4..1.2/3     three strengths at equal steps; or a list
  updates=[400,600]        saved updates (all that are there; checkpoint.keep says how many a run keeps)
  num_images=20            images of each list; below 20 there are no intervals
  source=NAME              the source whose pictures are learnt (the one with the fewest)
  prompts_file=FILE        new prompts, one image each (held-out captions, or the recipe's sampling.prompts)
  base_prompts_file=FILE   prompts of the base (held-out captions of its own run, or general ones)
  networks.dinov2=PATH     or networks.clip: compares by its features (without one, by the base's own)
  weights=ema              or raw
  sampler, num_inference_steps, guidance_scale, seed ...    as in `generate`
  out=FILE                 the page (RUN/evaluations/compare-DIGEST/compare.html)
  --json                   prints the numbers for programs (docs/json.md), and all else on standard error

docs/evaluate.md says more.
"""

from pathlib import Path

from daguerre import trees
from daguerre.checkpoint.atomic import write_bytes_atomically
from daguerre.checkpoint.run_dir import lock_holder
from daguerre.checkpoint.signals import StopSignals
from daguerre.cli.options import evaluate_options
from daguerre.cli.parts import out_file, output
from daguerre.config import config as configs
from daguerre.config import options, overrides
from daguerre.errors import UserError
from daguerre.evaluation.outcome.grid import Grid
from daguerre.evaluation.settings import CompareSettings
from daguerre.generation import generate, load
from daguerre.remote import local_copy
from daguerre.report import outcome, page
from daguerre.trees import Tree

_LISTS = ("strengths", "updates")


def run(arguments: list[str]) -> int:
    """Compares what the command line asks for. Returns 0 or the code of a signal; UserError."""
    as_json = output.FLAG in arguments
    with output.for_people(as_json):
        code, found = _compared([word for word in arguments if word != output.FLAG])
    if as_json and found is not None:
        output.write(found)
    return code


def _compared(arguments: list[str]) -> tuple[int, output.Outcome | None]:
    """The exit code and the numbers; none where a signal stopped it."""
    found = options.split(arguments)
    if len(found.bare) != 1:
        raise UserError("give one run of an adapter, such as runs/style", code="missing")
    tree: Tree = {}
    rest: list[str] = []
    out = None
    for override in found.overrides:
        key, text = overrides.pair(override)
        if key == "out":
            out = out_file.place(text)
        elif key.partition(".")[0] in CompareSettings.model_fields:
            tree = trees.merge(tree, evaluate_options.value(key, text, CompareSettings, _LISTS))
        else:
            rest.append(override)
    settings = configs.checked(CompareSettings, tree, [], [], "the command")
    model = load.find(found.bare[0], [], False, rest)
    if model.run is None:
        raise UserError(f"{model.name} is a {model.kind}, and compare takes a run", code="unsupported")
    with StopSignals() as stop:
        config = evaluate_options.config_of(model, rest, "compare", CompareSettings)
        grid = Grid(model, config, settings, evaluate_options.root_of(model), lambda: stop.requested)
        try:
            document = grid.run()
        except generate.Stopped:
            assert stop.signal is not None
            print(f"stopped by {stop.signal.name}: finished images are kept; the same command continues from there")
            return stop.exit_code, None
    base = getattr(config.model, "pretrained_model_name_or_path", "BASE")
    print("\n".join(outcome.lines(document, str(base))))
    path = out or grid.folder.path / "compare.html"
    write_bytes_atomically(path, outcome.render(Path(model.name).name, document, grid.shown(document["best"])).encode())
    if local_copy.origin(model.run.path) is None and lock_holder(model.run.path) is None:
        page.write(model.run.path)
    print(f"page: {path}")
    told = {name: document[name] for name in ("run", "images", "features", "unrelated", "cells", "best")}
    return 0, output.Outcome(page=str(path), **told)
