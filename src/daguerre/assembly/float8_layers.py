"""The trained denoiser, with its linear layers multiplied in float8 (training.float8)."""

from torch import nn

from daguerre.adapters.adapter import Attached
from daguerre.assembly import quantized_base
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.formatting import counted
from daguerre.models.family import Family
from daguerre.training.precision import float8
from daguerre.training.precision.float8 import SETTING, Float8Linear


def enable(config: Config, family: Family, attached: Attached) -> None:
    """Makes the linear layers multiply so that are trained, inside the blocks of the denoiser and of networks that
    adapters add (a ControlNet). Text encoders, the factors of a LoRA, and layers outside the blocks stay as they are.
    UserError where no layer is left."""
    scaling = config.training.float8
    if scaling == "no":
        return
    networks = [each for each in family.networks.values() if each.denoises] + [*attached.added_networks.values()]
    layers = [layer for each in networks for layer in quantized_base.linear_layers(each).values()]
    if not float8.enable(layers, scaling):
        raise UserError(
            f"{SETTING}={scaling} is for the linear layers of a denoiser that are trained, inside its blocks and with "
            "sizes that 16 divides, and this model has no such layer. Under a LoRA the base is multiplied in 8 bits by "
            f"training.base_precision=float8_products; else set {SETTING}=no",
            code="unused",
            setting=SETTING,
        )


def describe(net: nn.Module) -> list[str]:
    """A message about a trained net with such layers."""
    found = [module for module in net.modules() if isinstance(module, Float8Linear)]
    if not found:
        return []
    return [f"{counted(len(found), 'linear layer')} multiplied in float8 ({found[0].scaling}), forward and backward"]
