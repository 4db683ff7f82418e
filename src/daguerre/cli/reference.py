"""Write statistics of a data set, which `evaluate` compares with.

usage: daguerre reference DATA [key=value ...] out=FILE

Computes features of the images of DATA (a folder, shards, a table, or the held-out samples of a recipe or run) and
writes them with their mean, covariance and digests. The same command again goes on where it was stopped.

  daguerre reference quickstart num_images=1000 networks.inception=random out=reference.safetensors
  daguerre reference val2014 crop_px=256 num_images=30000 sample_seed=0 networks.inception=PATH out=coco.safetensors

  networks.NAME=PATH       inception, clip, dinov2: features of each network that is named
  resize=[tensorflow]      of inception: also torch, antialias, pillow_bicubic; of dinov2: pillow_bicubic (default),
                           antialias_bicubic
  num_images=1000          images, the first ones in the order of the data; with sample_seed=N drawn by a seed
  crop_px=256              middle squares of this side (images as they are)
  split=train              of a recipe or run: those that are trained on (held_out)
  out=FILE, -o FILE        the file to write

docs/evaluate.md says more.
"""

import shutil
from functools import partial
from typing import get_args

from daguerre.cli import evaluate
from daguerre.cli.options import evaluate_options
from daguerre.cli.options.evaluate_options import Options
from daguerre.cli.parts import out_file
from daguerre.errors import UserError
from daguerre.evaluation import blocks, reference
from daguerre.evaluation.evaluate import FolderEvaluation
from daguerre.evaluation.inputs import features_of, network
from daguerre.evaluation.networks.dinov2 import Resize
from daguerre.evaluation.networks.resize import Policy
from daguerre.generation import jobs
from daguerre.training import device

_ACTING = {"networks", "num_images", "crop_px", "sample_seed", "out"}
_CROPS = ("shorter_side", "square_first")
_POLICIES: dict[str, tuple[str, ...]] = {"inception": get_args(Policy), "dinov2": get_args(Resize)}
"""Of networks: the policies of `resize`; the first is taken if none is asked for."""


def _options(network: str, resize: str | None) -> list[dict[str, str]]:
    """The ways in which a network's features are computed. UserError for a policy that it does not know."""
    if network == "clip":
        return [{"crop": crop} for crop in _CROPS]
    if network not in _POLICIES:
        raise UserError(f"networks.{network}: references are of clip, {', '.join(_POLICIES)}", code="unsupported")
    known = _POLICIES[network]
    asked = [known[0]] if resize is None else resize.strip("[]").replace(" ", "").split(",")
    if odd := [each for each in asked if each not in known]:
        raise UserError(
            f"resize={odd[0]}: {network} knows {', '.join(known)}; write references of networks that need other "
            "policies one by one",
            code="unsupported",
            setting="resize",
        )
    return [{"resize": each} for each in asked]


def run(arguments: list[str]) -> int:
    """Writes the file. Returns 0; UserError for data or networks that are missing."""
    given = [word for word in arguments if not word.startswith(("resize=", "split="))]
    own = dict(word.split("=", 1) for word in arguments if word.startswith(("resize=", "split=")))
    asked = evaluate_options.read(given)
    if asked.json:
        raise UserError("--json is of `daguerre evaluate`: a reference is a file", code="unused")
    asked.refuse({*Options.model_fields} - _ACTING, "the statistics of a data set")
    if not asked.options.out or not asked.words:
        raise UserError("give the data, and out=FILE for the statistics", code="missing", setting="out")
    out = out_file.place(asked.options.out)
    if not asked.options.networks:
        raise UserError("networks.NAME=PATH is missing: features of which network?", code="missing", setting="networks")
    options = {name: _options(name, own.get("resize")) for name in asked.options.networks}
    images = evaluate.source_images(asked.words, asked.rest, asked.options, False, own.get("split"))
    where = device.choose_device("auto")
    used = [network(asked.options, name, where, **each) for name, ways in options.items() for each in ways]
    data = FolderEvaluation(", ".join(asked.words), images, asked.options, out.parent).protocol
    folder = out.parent / f".{out.stem}-{data['images_sha256'][:8]}"
    kept = blocks.Blocks(folder, images.total, jobs.TaskShard())
    features = {one.label: kept.array(one.label, partial(features_of, one, images)) for one in used}
    reference.write(out, data, {one.label: one.about for one in used}, features)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{out}: {images.total:,} images by {', '.join(features)}")
    return 0
