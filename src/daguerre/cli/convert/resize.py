"""A LoRA of lower rank, and a LoRA of a LoHa or LoKr.

usage: daguerre convert resize FILE|RUN rank=R|energy=E out=PLACE [format=kohya] [base=MODEL]

Writes the nearest LoRA of a lower rank, layer by layer, by singular values, and says how much it differs. A LoHa or
LoKr becomes a LoRA.

  daguerre convert resize style.safetensors rank=8 out=style-8.safetensors
  daguerre convert resize style.safetensors energy=0.99 rank=32 out=small.safetensors

  rank=R         the rank, or with energy the highest one
  energy=E       the lowest rank of each layer that has this share of its squared singular values: above 0, up to 1
  out=PLACE      a new .safetensors file, of peft a new folder
  format=kohya   or diffusers, peft: as `daguerre convert lora` has them
  base=MODEL     the model that it is for; needed only for models of other numbers than SD 1.x, 2.x and SDXL, as
                 `daguerre convert lora` has it
  ignore_tensors=[X]   leaves out tensors of a single file that are refused as unknown, by patterns of their names
"""

from typing import Annotated

from pydantic import Field

from daguerre.cli.convert import loras
from daguerre.cli.convert import options as given
from daguerre.errors import UserError
from daguerre.families.pretrained import bases
from daguerre.models.lora_files import low_rank
from daguerre.models.lora_files.addition import COLUMNS, MAGNITUDE, MIDDLE, UP, Addition
from daguerre.models.lora_files.forms import Form
from daguerre.models.lora_files.low_rank import Fitted, Keep
from daguerre.settings import ADDRESS, Settings


class Options(Settings):
    """Options of `convert resize`."""

    rank: int | None = Field(None, ge=1)
    energy: float | None = Field(None, gt=0, le=1)
    out: str | None = None
    format: Form = "kohya"
    base: Annotated[str | None, ADDRESS] = None
    ignore_tensors: list[str] = Field([])


def run(arguments: list[str]) -> int:
    """Writes the LoRA; 0, or a UserError."""
    target, options, _ = given.read(arguments, "convert resize", Options)
    if options.rank is None and options.energy is None:
        raise UserError("give rank=R, energy=E or both", code="missing", setting="rank")
    source, out = loras.source(target), loras.place(options.out, options.format)
    networks, additions = bases.fitting(source, loras.base(target, options.base, options.ignore_tensors))
    keep, lost, whole = Keep(options.rank, options.energy), 0.0, 0.0
    found: dict[str, list[Addition]] = {}
    for component, own in additions.items():
        for each in own:
            fitted = resized(each, tuple(networks[component].get_parameter(each.name).shape), keep)
            found.setdefault(component, []).append(fitted.addition)
            lost, whole = lost + fitted.lost**2, whole + fitted.norm**2
    loras.write(options.format, out, networks, found, loras.about(source))
    share = (lost / whole) ** 0.5 if whole else 0.0
    print(f"it differs from {source} by {share:.2%} of what that adds (root of the sum of squares over all weights)")
    return 0


def resized(addition: Addition, shape: tuple[int, ...], keep: Keep) -> Fitted:
    """The nearest LoRA of an addition, or itself where it is no matrix. UserError for DoRA, whose effect depends on the
    weights of its base."""
    if {MAGNITUDE, COLUMNS} & addition.factors.keys():
        raise UserError(
            "DoRA cannot be resized: what it adds depends on the base. Merge it into a model (`daguerre convert "
            "merge`), and extract a LoRA from that (`daguerre convert extract`)",
            code="unsupported",
        )
    if len(shape) < 2:  # a norm or a bias is no matrix, and stays as it is
        return Fitted(addition, 0.0, float(addition.change(shape).norm()))
    if UP in addition.factors and MIDDLE not in addition.factors:
        return low_rank.of_product(addition, shape, keep)
    return low_rank.of_weight(addition.layer, addition.change(shape), keep)
