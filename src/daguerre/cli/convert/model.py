"""A single-file checkpoint or pickled weights as a diffusers folder.

usage: daguerre convert model FILE|FOLDER out=FOLDER [key=value ...]

Writes a checkpoint of one file (SD 1.x, 2.x and SDXL in the original layout), or a folder of old pickled weights, as a
folder in diffusers' layout. Recipes take such files as they are; this is for keeping the folder.

  daguerre convert model sd_xl_base_1.0.safetensors out=sdxl-base
  daguerre convert model v1-5-pruned.ckpt out=sd15 pickled_weights=true weights=ema
  daguerre convert model old-pipeline out=new-pipeline pickled_weights=true

  out=FOLDER             a new folder
  pickled_weights=true   read .ckpt and .bin: their tensors alone, nothing in them is run
  weights=ema            of a file that holds averaged weights in addition to the plain ones (default: raw, to train on)
  prediction_type=...    epsilon or v_prediction, for the scheduler's config where the file does not say it
  dtype=float16          or bfloat16, float32 (default: as they are)
  ignore_tensors=[X]     leaves out tensors that are refused as unknown, by patterns of names such as '*.scale'
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from pydantic import Field

from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.export import replaced
from daguerre.cli.convert import options as given
from daguerre.cli.convert.options import Dtype
from daguerre.errors import UserError
from daguerre.families.pretrained import single_files
from daguerre.models.weights import files, pickled
from daguerre.settings import Settings


class Options(Settings):
    """Options of `convert model`."""

    out: str | None = None
    pickled_weights: bool = False
    weights: Literal["ema", "raw"] | None = None
    prediction_type: Literal["epsilon", "v_prediction"] | None = None
    dtype: Dtype | None = None
    ignore_tensors: list[str] = Field([])


def run(arguments: list[str]) -> int:
    """Writes the folder; 0, or a UserError."""
    target, options, _ = given.read(arguments, "convert model", Options)
    source = checked(target, options)
    out = given.new_place(options.out, "FOLDER")
    make_folder(out.parent)
    with replaced(out) as fresh:
        if options.dtype is None:
            notices = write(source, options, fresh)
        else:
            with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
                notices = write(source, options, Path(temporary))
                files.recast(Path(temporary), fresh, files.DTYPES[options.dtype])
    print(*notices, f"{out}: {given.size_of(out)}", sep="\n")
    return 0


def checked(target: str, options: Options) -> Path:
    """The source. UserError for options that have no effect on it or cannot be."""
    source = Path(target).expanduser()
    if not target or not (source.is_file() or source.is_dir()):  # a pipe would be waited for without end
        raise UserError(
            f"{target or 'no source given'}: give a .safetensors or .ckpt file, or a folder of pickled weights. To "
            "download a file from the hub: `daguerre fetch OWNER/NAME/FILE.safetensors -o DIR`",
            code="missing",
        )
    idle = sorted({"weights", "prediction_type", "ignore_tensors"} & options.model_fields_set)
    if source.is_dir() and idle:
        raise UserError(
            f"{', '.join(idle)}: only for a single-file checkpoint; remove it", code="unused", setting=idle[0]
        )
    is_pickled = source.is_dir() or source.suffix in single_files.PICKLED
    if is_pickled and not options.pickled_weights:
        raise UserError(
            f"{source} is pickled: pickled_weights=true reads only its tensors and runs no code from it",
            setting="pickled_weights",
        )
    if not is_pickled and "pickled_weights" in options.model_fields_set:
        raise UserError(
            f"pickled_weights: {source} is not pickled; remove it", code="unused", setting="pickled_weights"
        )
    if source.is_dir() and not pickled.holds(source):
        raise UserError(f"{source} has no pickled weights (.bin): there is nothing to convert", code="empty")
    return source


def write(source: Path, options: Options, fresh: Path) -> list[str]:
    """Fills the folder; returns messages for the user."""
    if source.is_dir():
        pickled.convert(source, fresh)
        return []
    weights, prediction = options.weights or "raw", options.prediction_type
    return single_files.convert(source, fresh, weights, prediction, options.ignore_tensors)
