"""LoRAs put into the weights of a model, each with its strength.

usage: daguerre convert merge MODEL use='{FILE: 0.8}' out=PLACE [dtype=float16]

Adds LoRAs (LoHa, LoKr; of any program, or folders of runs) to the weights of a model, as `daguerre generate use=` does:
each difference is computed in float32 from the model's own weights, and their sum is added. One layer is in memory at a
time.

  daguerre convert merge sd15.safetensors use='{style.safetensors: 0.8}' out=merged.safetensors
  daguerre convert merge sdxl-base use='{runs/style: 1, dog.safetensors: -0.5}' out=merged dtype=float16

  MODEL               a folder in diffusers' layout, a run that trained a whole network, or a single file
  use='{FILE: 0.8}'   LoRAs with their strengths: 1 as it was trained, 0 nothing, below 0 the opposite
  out=PLACE           a new folder in diffusers' layout, or a single file if it ends with .safetensors
  dtype=float16       or bfloat16, float32 (default: as the model's weights are)
  variant=fp16        of a folder: the weights of that name, of each network that has them
  ignore_tensors=[X]  leaves out tensors that are refused as unknown, by patterns of names such as '*.scale'

A run with a LoRA of its own is merged by `daguerre convert export`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import Field
from torch import Tensor

from daguerre.checkpoint.atomic import make_folder
from daguerre.checkpoint.export import replaced
from daguerre.cli.convert import loras
from daguerre.cli.convert import options as given
from daguerre.cli.convert.options import Dtype
from daguerre.errors import UserError
from daguerre.families.pretrained import bases, single_files
from daguerre.generation.loras import check_strength
from daguerre.models.lora_files.addition import Addition, merged
from daguerre.models.lora_files.read import read
from daguerre.models.weights import files
from daguerre.settings import ADDRESS, Settings


class Options(Settings):
    """Options of `convert merge`."""

    use: dict[Annotated[str, ADDRESS], float] = Field({})
    out: str | None = None
    dtype: Dtype | None = None
    variant: str | None = None
    ignore_tensors: list[str] = Field([])


@dataclass(frozen=True)
class Merging:
    """The additions to each weight of a model."""

    asked: Mapping[tuple[str, str], list[tuple[Addition, float]]]
    """With their strengths, by component and name in the network."""
    names: Mapping[str, Mapping[str, str]]
    """Weights and biases by component and name in the file."""

    def of(self, component: str, name: str, weight: Tensor) -> Callable[[], Tensor] | None:
        """Makes the merged weight [out, in, ...] in float32; None for a weight that stays."""
        own = self.asked.get((component, self.names.get(component, {}).get(name, "")))
        return None if own is None else partial(merged, weight, own, component)


def run(arguments: list[str]) -> int:
    """Writes the model; 0, or a UserError."""
    target, options, _ = given.read(arguments, "convert merge", Options)
    if not target or not options.use:
        raise UserError("give a model and use='{FILE: 0.8}'", code="missing", setting="use")
    out = given.new_place(options.out, "merged.safetensors")
    model = bases.folder(target, options.ignore_tensors)
    files.check_variant(options.variant, model)
    merging = read_all(model, options.use)
    dtype = files.DTYPES[options.dtype] if options.dtype else None
    make_folder(out.parent)
    if out.suffix == ".safetensors":
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            files.recast(model, Path(temporary), dtype, options.variant, merging.of, options.ignore_tensors)
            held = kept(model, Path(temporary), merging, options)
            notices = single_files.write(out, Path(temporary))
            print("".join(f"{line}\n" for line in notices), end="")
    else:
        with replaced(out) as fresh:
            files.recast(model, fresh, dtype, options.variant, merging.of, options.ignore_tensors)
            held = kept(model, fresh, merging, options)
    exact = f"to within {held:.1e} of it" if held else "exactly"
    print(f"{out}: {given.size_of(out)}; read back, it has what was added {exact}")
    return 0


def read_all(model: Path, use: Mapping[str, float]) -> Merging:
    """The additions of all LoRAs. UserError for one that cannot be applied in full."""
    networks = bases.networks(model)
    asked: dict[tuple[str, str], list[tuple[Addition, float]]] = {}
    for name, strength in use.items():
        check_strength("use", name, strength)
        for component, own in read(loras.source(name), networks, tokens_apart=True).items():
            for each in own:
                asked.setdefault((component, each.name), []).append((each, strength))
            print(f"{name} x {strength:g}: {len(own):,} layers of {component}")
    return Merging(asked, {component: bases.tensor_names(network) for component, network in networks.items()})


def kept(model: Path, made: Path, merging: Merging, options: Options) -> float:
    """The difference between what was written and what was to be added, as a share of that: rounding to their type."""
    off = whole = 0.0
    for component in {component for component, _ in merging.asked}:
        found = files.read(made / component)
        for name, weight in files.read(model / component, options.variant, options.ignore_tensors).items():
            if (make := merging.of(component, name, weight)) is not None:
                change = make().double() - weight.double()
                off += float((found[name].double() - weight.double() - change).square().sum())
                whole += float(change.square().sum())
    return (off / whole) ** 0.5 if whole else 0.0
