"""`daguerre convert export`: a run, or a pipeline, as the files that other programs read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.export import replaced
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli.convert import options as given
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.generation.load import load, newest
from daguerre.models.single_file import save
from daguerre.models.weights import files
from daguerre.remote import local_copy

SUMMARY = "a run or a pipeline as one file for ComfyUI and A1111, as a diffusers folder, or its UNet alone"
HELP = """\
usage: daguerre convert export RUN|PIPELINE format=single_file|diffusers|unet|adapters out=PLACE [key=value ...]

Writes the newest checkpoint of a run, or a pipeline in diffusers' layout, in another form. Nothing is overwritten.

  daguerre convert export runs/my-run format=single_file out=my-model.safetensors dtype=float16
  daguerre convert export runs/my-run format=diffusers out=my-model-raw weights=raw checkpoint=step-00010000
  daguerre convert export runs/my-run/pipeline format=unet out=unet.safetensors

  format=single_file   one .safetensors in the original layout of SD 1.x, 2.x and SDXL
         diffusers     a folder that diffusers' from_pretrained opens
         unet          the UNet alone: a folder, or one file in diffusers' names if out ends with .safetensors
         adapters      of a run, what its adapters trained: a folder for diffusers' load_lora_weights; the other forms
                       hold it merged into the networks
  out=PLACE            a new file or folder
  dtype=float16        or bfloat16, float32 (default: as the weights are, float32 of a run)
  weights=ema          or raw: of a run, the averaged weights (default where it keeps them) or the trained ones
  checkpoint=NAME      of a run, such as step-00010000 (default: the newest)
  variant=NAME         of a pipeline, such as fp16: its files of that name
  training.device=cpu  of a run: where its networks are put together

docs/export.md says what each form holds, and what programs that read one file take for granted.
"""
FORMATS = ("single_file", "diffusers", "unet", "adapters")
_OF_RUN = ("weights", "checkpoint", "training.device")
_ALL = ("format", "out", "dtype", "variant", *_OF_RUN)


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    source: Path
    is_run: bool
    format: str
    out: Path
    dtype: torch.dtype | None
    values: dict[str, str]


def run(arguments: list[str]) -> int:
    """Writes what is asked for; 0, or a UserError."""
    request = read(arguments)
    make_folder(request.out.parent)
    with exported(request) as folder:
        for line in write(request, folder):
            print(line)
    print(f"{request.out}: {given.gigabytes(request.out)}")
    return 0


def read(arguments: Sequence[str]) -> Request:
    """The source, the form and the place. UserError for what has no effect or cannot be."""
    target, values = given.read(arguments, "convert export", _ALL)
    source = local_copy.located(target)
    is_run = bool(target) and (source / "config.yaml").is_file()
    if not is_run and not (bool(target) and (source / "model_index.json").is_file()):
        missing = f"{target}: there is no such folder" if target and not source.exists() else target or "what?"
        raise UserError(
            f"{missing}: give a run folder, such as runs/my-run, or a pipeline in diffusers' layout (a "
            "folder with model_index.json)"
        )
    if idle := [name for name in (("variant",) if is_run else _OF_RUN) if name in values]:
        raise UserError(f"{', '.join(idle)}: {'a run has no variants' if is_run else 'for a run alone'}; leave it out")
    form = given.one_of(values, "format", FORMATS)
    if form is None:
        raise UserError(f"in which form? Give format={'|'.join(FORMATS)}")
    out = given.new_place(values, "my-model.safetensors" if form == "single_file" else "FOLDER")
    if (form == "single_file") != (out.suffix == ".safetensors") and form != "unet":
        what = "a .safetensors file" if form == "single_file" else "a folder, no .safetensors file"
        raise UserError(f"out={out}: format={form} writes {what}")
    dtype = given.one_of(values, "dtype", given.DTYPES)
    if form == "adapters" and (not is_run or dtype):
        raise UserError(
            "format=adapters: for a run alone" if not is_run else "format=adapters writes float32: no dtype"
        )
    if form == "diffusers" and not is_run and dtype is None and "variant" not in values:
        raise UserError(f"{source} is in diffusers' layout: give dtype= or variant=, or another format")
    return Request(source, is_run, form, out, files.DTYPES[dtype] if dtype else None, values)


@contextmanager
def exported(request: Request) -> Iterator[Path]:
    """The source as a pipeline in diffusers' layout, or what its adapters trained: a run is exported beside the place
    that is asked for."""
    if not request.is_run:
        yield request.source
        return
    folder = RunFolder(request.source)
    overrides = [f"{name}={request.values[name]}" for name in _OF_RUN[2:] if name in request.values]
    config = configs.load(str(folder.path), overrides).config
    place = local_copy.shown(folder.path)
    checkpoint = newest(folder, request.values.get("checkpoint", "latest"))
    asked = given.one_of(request.values, "weights", ("ema", "raw"))
    averaged = "ema" in checkpoint.tensors
    if asked == "ema" and not averaged:
        raise UserError(f"weights=ema: {checkpoint.name} of {place} keeps no averages; leave it out")
    raw = asked == "raw" or not averaged
    print(f"{checkpoint.name} of {place} ({'raw' if raw else 'averaged'} weights)")
    parts = load(config, checkpoint, raw)
    with TemporaryDirectory(prefix=f".{request.out.name}.", dir=request.out.parent) as temporary:
        made = Path(temporary) / "pipeline"
        if request.format == "adapters":
            said = parts.attached.export(made, parts.objective, config.sampling)
        else:
            with parts.attached.merged():
                said = parts.family.export(made, parts.objective, config.sampling)
        print("".join(f"{line}\n" for line in said), end="")
        del parts
        yield made


def write(request: Request, folder: Path) -> list[str]:
    """Puts the form that is asked for in its place; what a person must be told."""
    variant, dtype = request.values.get("variant"), request.dtype
    if request.format == "single_file":
        return save.write(request.out, folder, dtype, variant)
    if request.format == "unet" and request.out.suffix == ".safetensors":
        save.write_unet(request.out, folder, dtype, variant)
        return []
    if request.format == "adapters":
        os.rename(folder, request.out)
        return []
    with replaced(request.out) as fresh:
        files.recast(folder / "unet" if request.format == "unet" else folder, fresh, dtype, variant)
    return []
