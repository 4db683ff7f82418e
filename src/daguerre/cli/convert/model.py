"""`daguerre convert model`: a checkpoint of one file, or old pickled weights, as a folder in diffusers' layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.export import replaced
from daguerre.cli.convert import options as given
from daguerre.errors import UserError
from daguerre.models.single_file import load
from daguerre.models.weights import files, pickled

SUMMARY = "a single-file checkpoint or pickled weights as a diffusers folder"
HELP = """\
usage: daguerre convert model FILE|FOLDER out=FOLDER [key=value ...]

Writes a checkpoint of one file (SD 1.x, 2.x and SDXL in the original layout), or a folder of old pickled weights, as a
folder in diffusers' layout. Recipes take such files as they are; this is for keeping the folder.

  daguerre convert model sd_xl_base_1.0.safetensors out=sdxl-base
  daguerre convert model v1-5-pruned.ckpt out=sd15 pickled_weights=true weights=ema
  daguerre convert model old-pipeline out=new-pipeline pickled_weights=true

  out=FOLDER             a new folder
  pickled_weights=true   read .ckpt and .bin: their tensors alone, nothing in them is run
  weights=ema            of a file that holds averaged weights beside the plain ones (default: raw, to train on)
  prediction_type=...    epsilon or v_prediction, for the scheduler's config where the file does not say it
  dtype=float16          or bfloat16, float32 (default: as they are)
"""
_ALL = ("out", "pickled_weights", "weights", "prediction_type", "dtype")
_OF_FILE = ("weights", "prediction_type")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    source: Path
    out: Path
    values: dict[str, str]


def run(arguments: list[str]) -> int:
    """Writes the folder; 0, or a UserError."""
    request = read(arguments)
    dtype = given.one_of(request.values, "dtype", given.DTYPES)
    make_folder(request.out.parent)
    with replaced(request.out) as fresh:
        if dtype is None:
            notices = write(request, fresh)
        else:
            with TemporaryDirectory(prefix=f".{request.out.name}.", dir=request.out.parent) as temporary:
                notices = write(request, Path(temporary))
                files.recast(Path(temporary), fresh, files.DTYPES[dtype])
    for notice in notices:
        print(notice)
    print(f"{request.out}: {given.gigabytes(request.out)}")
    return 0


def read(arguments: Sequence[str]) -> Request:
    """The source and the place. UserError for what has no effect or cannot be."""
    target, values = given.read(arguments, "convert model", _ALL)
    source = Path(target).expanduser()
    if not target or not source.exists():
        raise UserError(
            f"{target or 'what?'}: give a .safetensors or .ckpt file, or a folder of pickled weights. A file of the "
            "hub comes with `daguerre fetch OWNER/NAME/FILE.safetensors -o DIR`"
        )
    if source.is_dir() and (idle := [name for name in _OF_FILE if name in values]):
        raise UserError(f"{', '.join(idle)}: for a checkpoint of one file; leave it out")
    given.one_of(values, "weights", ("ema", "raw"))
    given.one_of(values, "prediction_type", ("epsilon", "v_prediction"))
    is_pickled = source.is_dir() or source.suffix in load.PICKLED
    if is_pickled and not given.switch(values, "pickled_weights"):
        raise UserError(f"{source} is pickled: pickled_weights=true reads its tensors alone, and runs nothing in it")
    if not is_pickled and "pickled_weights" in values:
        raise UserError(f"pickled_weights: {source} is not pickled; leave it out")
    if source.is_dir() and not pickled.holds(source):
        raise UserError(f"{source} holds no pickled weights (.bin): there is nothing to convert")
    return Request(source, given.new_place(values, "FOLDER"), values)


def write(request: Request, fresh: Path) -> list[str]:
    """Fills the folder; what a person must be told."""
    if request.source.is_dir():
        pickled.convert(request.source, fresh)
        return []
    values = request.values
    return load.convert(request.source, fresh, values.get("weights", "raw"), values.get("prediction_type"))
