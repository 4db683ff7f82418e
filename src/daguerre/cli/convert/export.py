"""A run or a pipeline as one file for ComfyUI and A1111, as a diffusers folder, its UNet or its LoRA alone.

usage: daguerre convert export RUN|PIPELINE format=single_file|diffusers|unet|adapters out=PLACE [key=value ...]

Writes the newest checkpoint of a run, or a pipeline in diffusers' layout, in another form. Nothing is overwritten.

  daguerre convert export runs/my-run format=single_file out=my-model.safetensors dtype=float16
  daguerre convert export runs/my-run format=diffusers out=my-model-raw weights=raw checkpoint=step-00010000
  daguerre convert export runs/my-run/pipeline format=unet out=unet.safetensors

  format=single_file   one .safetensors in the original layout of SD 1.x, 2.x and SDXL; of FLUX and later families their
                       transformer in its authors' names
         diffusers     a folder that diffusers' from_pretrained opens
         unet          the UNet alone: a folder, or one file in diffusers' names if out ends with .safetensors
         adapters      of a run, what its adapters trained: a folder for diffusers' load_lora_weights; the other forms
                       hold it merged into the networks
  out=PLACE            a new file or folder
  dtype=float16        or bfloat16, float32 (default: as the weights are, float32 of a run)
  weights=ema          or raw: of a run, the averaged weights (default where it keeps them) or the trained ones
  checkpoint=NAME      of a run, such as step-00010000 (default: the newest)
  variant=NAME         of a pipeline, such as fp16: its files of that name
  ignore_tensors=[X]   of a pipeline: leaves out tensors that are refused as unknown, by patterns of names
  prefix=model.diffusion_model.    of a transformer in its authors' names: put before each (default: as its authors do)
  component=NAME       with single_file, another network in place of the denoiser: of Stable Cascade effnet, vqgan and
                       others; of FLUX and later families vae, text_encoder or text_encoder_2, as ComfyUI keeps them
  training.device=cpu  of a run: where its networks are put together
  model.pretrained_model_name_or_path=PLACE    of a run: its base, if that has moved; other weights are refused

docs/export.md says what each form holds, and what programs that read one file take for granted.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from pydantic import Field

from daguerre.assembly import about
from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.export import replaced
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.cli.convert import options as given
from daguerre.cli.convert.options import Dtype
from daguerre.config import config as configs
from daguerre.errors import UserError
from daguerre.families.pretrained import single_files
from daguerre.generation.load import load, newest, weights_of
from daguerre.models.weights import files, index
from daguerre.remote import local_copy
from daguerre.run import samples
from daguerre.settings import Settings

_SETTINGS = ("training.device", "model.pretrained_model_name_or_path")
"""Settings of a run's recipe that may be others here."""
_OF_RUN = ("weights", "checkpoint", *_SETTINGS)


class Options(Settings):
    """Options of `convert export`, other than settings of a run's recipe."""

    format: Literal["single_file", "diffusers", "unet", "adapters"]
    out: str | None = None
    dtype: Dtype | None = None
    weights: Literal["ema", "raw"] | None = None
    checkpoint: str | None = None
    variant: str | None = None
    component: str | None = None
    prefix: Literal["", "model.diffusion_model."] | None = None
    ignore_tensors: list[str] = Field([])


@dataclass(frozen=True)
class Request:
    """The source, the place and the options that the command line names."""

    source: Path
    is_run: bool
    out: Path
    options: Options
    overrides: list[str]
    """Settings of the run's recipe."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the weights; None keeps every type."""
        return files.DTYPES[self.options.dtype] if self.options.dtype else None


def run(arguments: list[str]) -> int:
    """Writes what is asked for; 0, or a UserError."""
    request = read(arguments)
    make_folder(request.out.parent)
    with exported(request) as folder:
        for line in write(request, folder):
            print(line)
    print(f"{request.out}: {given.size_of(request.out)}")
    return 0


def read(arguments: Sequence[str]) -> Request:
    """The source, the form and the place. UserError for what has no effect or cannot be."""
    target, options, settings = given.read(arguments, "convert export", Options, _SETTINGS)
    source, is_run = _source(target)
    named = {*options.model_fields_set, *(each.partition("=")[0] for each in settings)}
    if idle := [name for name in (("variant", "ignore_tensors") if is_run else _OF_RUN) if name in named]:
        why = "it applies to a pipeline, not to a run" if is_run else "it applies to a run only"
        raise UserError(f"{', '.join(idle)}: {why}; remove it", code="unused", setting=idle[0])
    out = given.new_place(options.out, "my-model.safetensors" if options.format == "single_file" else "FOLDER")
    files.check_variant(options.variant, source)
    request = Request(source, is_run, out, options, settings)
    _check_form(request)
    return request


def _source(target: str) -> tuple[Path, bool]:
    """The folder that is named, and whether it is a run's."""
    source = local_copy.located(target)
    if target and (source / "config.yaml").is_file():
        return source, True
    if target and index.find(source) is not None:
        return source, False
    missing = f"{target}: no such folder" if target and not source.exists() else target or "what?"
    raise UserError(
        f"{missing}: give a run folder, such as runs/my-run, or a pipeline in diffusers' layout (a folder with "
        "model_index.json)",
        code="missing",
    )


def _check_form(request: Request) -> None:
    """UserError for a form that does not go with the location, the source or the other options."""
    form, out, options = request.options.format, request.out, request.options
    is_file = form == "single_file"
    if form != "unet" and is_file != (out.suffix == ".safetensors"):
        what = "a .safetensors file" if is_file else "a folder, no .safetensors file"
        raise UserError(f"out={out}: format={form} writes {what}", code="conflict", setting="out")
    for name in ("component", "prefix"):
        if getattr(options, name) is not None and not is_file:
            raise UserError(f"{name}: it is for format=single_file; remove it", code="unused", setting=name)
    if form == "adapters" and not request.is_run:
        raise UserError("format=adapters: it applies to a run only", code="conflict", setting="format")
    if form == "adapters" and options.dtype:
        raise UserError("format=adapters always writes float32: remove dtype", code="unused", setting="dtype")
    as_it_is = options.dtype is None and options.variant is None
    if form == "diffusers" and not request.is_run and as_it_is:
        raise UserError(
            f"{request.source} is already in diffusers' layout: set dtype= or variant= to convert it, or choose "
            "another format",
            code="empty",
        )


@contextmanager
def exported(request: Request) -> Iterator[Path]:
    """The source as a pipeline in diffusers' layout, or what its adapters trained: a run is exported next to the place
    that is asked for."""
    if not request.is_run:
        yield request.source
        return
    folder, options = RunFolder(request.source), request.options
    config = configs.load(str(folder.path), request.overrides).config
    beside = [name for name, own in config.adapters.items() if own.separate]
    if options.format != "adapters" and len(beside) == len(config.adapters):
        raise UserError(
            f"{', '.join(beside)}: this trains a network of its own, which files of a whole model do not hold: "
            "use format=adapters",
            code="unsupported",
            setting="format",
        )
    checkpoint = newest(folder, options.checkpoint or "latest")
    raw, description = weights_of(checkpoint, folder, options.weights)
    print(description)
    parts = load(config, checkpoint, raw)
    with TemporaryDirectory(prefix=f".{request.out.name}.", dir=request.out.parent) as temporary:
        made = Path(temporary) / "pipeline"
        if options.format == "adapters":
            step = checkpoint.documents["state"]["step"]
            image = None if options.weights == "raw" else samples.first(folder.samples_of(step))
            told = about.of(config, parts.family, checkpoint.documents["base"], step, image=image)
            notices = parts.attached.export(made, parts.objective, config.sampling, told)
        else:
            with parts.attached.merged():
                notices = parts.family.export(made, parts.objective, config.sampling)
            notices += [f"without {name}: format=adapters writes that network" for name in beside]
        print("".join(f"{line}\n" for line in notices), end="")
        del parts
        yield made


def write(request: Request, folder: Path) -> list[str]:
    """Puts the form that is asked for in its place; returns messages for the user."""
    form, variant, dtype = request.options.format, request.options.variant, request.dtype
    ignored = request.options.ignore_tensors
    if form == "unet" and not (folder / "unet").is_dir():
        there = ", ".join(sorted(each.name for each in folder.iterdir() if (each / "config.json").is_file()))
        raise UserError(
            f"format=unet: {request.source} has no UNet (its networks: {there}); format=single_file writes the "
            "denoiser of FLUX and later families, and the stage of Stable Cascade, as one file",
            code="unsupported",
            setting="format",
        )
    if form == "single_file":
        component, prefix = request.options.component, request.options.prefix
        return single_files.write(request.out, folder, dtype, variant, component, ignored, prefix)
    if form == "unet" and request.out.suffix == ".safetensors":
        single_files.write_network(request.out, folder / "unet", dtype, variant, ignored)
    elif form == "adapters":
        os.rename(folder, request.out)
    else:
        with replaced(request.out) as fresh:
            files.recast(folder / "unet" if form == "unet" else folder, fresh, dtype, variant, ignored=ignored)
    return []
