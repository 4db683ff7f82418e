"""A LoRA of the difference between a fine-tuned model and its base.

usage: daguerre convert extract TUNED base=BASE rank=R|energy=E out=PLACE [format=kohya]

Writes the nearest LoRA of what fine-tuning has changed in the UNet and the text encoders, layer by layer, by singular
values in float64, and says how much it differs. One layer is in memory at a time.

  daguerre convert extract my-model.safetensors base=sd15.safetensors rank=64 out=style.safetensors
  daguerre convert extract runs/my_sd15 base=models/sd15 energy=0.9 rank=128 out=style.safetensors

  TUNED, base=BASE   models as folders in diffusers' layout, runs that trained a whole network, or single files
  rank=R             the rank, or with energy the highest one
  energy=E           the lowest rank of each layer that has this share of its squared singular values: above 0, up to 1
  out=PLACE          a new .safetensors file, of peft a new folder
  format=kohya       or diffusers, peft: as `daguerre convert lora` has them
  variant=fp16       of folders: the weights of that name, of each network that has them
  ignore_tensors=[X] leaves out tensors that are refused as unknown, by patterns of names such as '*.scale'

Layers that are equal in both, or differ by the rounding of a model in 16 bits alone, are left out. Norms, biases and
embeddings cannot be in a LoRA: it says how many differ.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from daguerre.cli.convert import loras
from daguerre.cli.convert import options as given
from daguerre.errors import UserError
from daguerre.families.pretrained import bases
from daguerre.models.export.about import About
from daguerre.models.lora_files import low_rank
from daguerre.models.lora_files.addition import Addition
from daguerre.models.lora_files.forms import Form
from daguerre.models.lora_files.low_rank import Keep
from daguerre.models.parts.text.names import with_wrapper
from daguerre.models.weights import files
from daguerre.settings import ADDRESS, Settings


class Options(Settings):
    """Options of `convert extract`."""

    base: Annotated[str | None, ADDRESS] = None
    rank: int | None = Field(None, ge=1)
    energy: float | None = Field(None, gt=0, le=1)
    out: str | None = None
    format: Form = "kohya"
    variant: str | None = None
    ignore_tensors: list[str] = Field([])


def run(arguments: list[str]) -> int:
    """Writes the LoRA; 0, or a UserError."""
    target, options, _ = given.read(arguments, "convert extract", Options)
    if not target or options.base is None:
        raise UserError("give the fine-tuned model, and base=BASE: the one that it began from", code="missing")
    if options.rank is None and options.energy is None:
        raise UserError("give rank=R, energy=E or both", code="missing", setting="rank")
    out = loras.place(options.out, options.format)
    tuned, base = (bases.folder(each, options.ignore_tensors) for each in (target, options.base))
    files.check_variant(options.variant, tuned, base)
    networks, keep = bases.networks(base), Keep(options.rank, options.energy)
    found: dict[str, list[Addition]] = {}
    lost, whole, others = 0.0, 0.0, list[str]()
    for component, network in networks.items():
        layers = bases.file_names(network)
        for name, change in changes(base / component, tuned / component, options.variant, options.ignore_tensors):
            if (layer := layers.get(name)) is None:
                others.append(f"{component}.{name}")
                continue
            fitted = low_rank.of_weight(layer, change, keep)
            found.setdefault(component, []).append(fitted.addition)
            lost, whole = lost + fitted.lost**2, whole + fitted.norm**2
    if not found:
        raise UserError(f"{target} has the same layers as {options.base}: there is nothing to extract", code="empty")
    loras.write(options.format, out, networks, found, About(title=out.stem))
    print(f"it differs from what {target} has changed in these layers by {(lost / whole) ** 0.5:.2%}")
    if others:
        print(f"{len(others):,} tensors that differ are no weights of layers and not in it, such as {others[0]}")
    return 0


def changes(
    base: Path, tuned: Path, variant: str | None = None, ignored: Sequence[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Name and difference in float32 of each tensor of a network that is another one now, in the narrower type of the
    two models. UserError for a network of another shape."""
    before, after = (files.read(folder, variant, ignored) for folder in (base, tuned))
    spelt = {with_wrapper(name): name for name in after} | {name: name for name in after}
    for name, old in before.items():
        new = after.get(spelt.get(name, spelt.get(with_wrapper(name), "")))
        if not old.is_floating_point():
            continue
        if new is None or new.shape != old.shape:
            there = "nothing" if new is None else list(new.shape)
            raise UserError(
                f"{tuned} is no fine-tune of {base}: it has {there} for {name}, and the base {list(old.shape)}",
                code="conflict",
            )
        change = new.float() - old.float()
        if not torch.isfinite(change).all():
            raise UserError(f"{name} of {tuned} or of {base} has NaN or infinity in it", code="damaged")
        narrow = min(old.dtype, new.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(new.to(narrow).float(), old.to(narrow).float()):  # of float8 torch compares nothing
            yield name, change
