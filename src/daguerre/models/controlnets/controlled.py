"""ControlNets of the denoiser of any family: networks that add what they read in a control image to the denoiser,
which is frozen (Zhang et al. 2023, arXiv 2302.05543). `ControlNets` is what a family says of its own.

Shape letters: B samples, C channels, H and W height and width, R residuals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.network import Facts
from daguerre.types import Cond

if TYPE_CHECKING:
    from pathlib import Path

    from daguerre.models.export.about import About
    from daguerre.models.family import Family

Residuals = Sequence[Tensor | None]
"""What is added, at each place of the denoiser; None where nothing is."""
Size = Literal["large", "mid", "small"]
"""large: as many transformer blocks as the UNet; mid: one at each place of the deepest level alone; small: none."""
SIZES: tuple[Size, ...] = get_args(Size)
Bottleneck = Literal["effnet", "simple", "large"]
Reads = Literal["grey", "colour", "holes", "latent", "faces"]


@dataclass(frozen=True)
class Wanted:
    """The ControlNet that a recipe asks for; None: as is usual, or as a file says."""

    init: Literal["base", "random"] = "base"
    size: Size | None = None
    blocks: tuple[int, ...] | Literal["all"] | None = None
    bottleneck: Bottleneck | None = None
    reads: Reads | None = None
    latent_factor: float | None = None


class ControlNets(Protocol):
    """The ControlNets of a family: their networks, files of these, and the way from a control image to residuals."""

    @property
    def component(self) -> str:
        """Name of the denoiser."""

    facts: ClassVar[Facts]
    """Facts of their networks."""

    copied: ClassVar[frozenset[str]]
    """Components other than the denoiser whose weights a new one starts from."""
    own: ClassVar[frozenset[str]]
    """Names of those settings in `Wanted` that only some families' have, and these have."""

    def new(self, wanted: Wanted, seed: int) -> Any:
        """A ControlNet that starts without effect."""

    def read(self, place: str, wanted: Wanted) -> Any:
        """The ControlNet of a place, on the CPU in float32; without weights under `torch.device("meta")`. UserError for
        what is no ControlNet for this model."""

    def write(self, folder: Path, network: Any, about: About, scale: float) -> None:
        """Fills an empty folder. OSError where what it holds is not what was written."""

    def check(self, network: Any, pixels_BCHW: Tensor) -> None:
        """UserError for control images, on the host, that the network cannot read."""

    def hint(self, network: Any, pixels_BCHW: Tensor) -> Tensor:
        """Control images [B, 4, H, W] uint8, RGBA, as the network reads them."""

    def blank(self, network: Any, hint: Tensor) -> Tensor:
        """The hints of control images that are left out in training."""

    def count(self, network: Any) -> int:
        """R: the residuals that are not None."""

    def residuals(
        self, network: Any, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, hint: Tensor, scale: float
    ) -> Residuals:
        """The residuals, multiplied by `scale`."""


class Controlled(nn.Module):
    """A denoiser with a ControlNet, as the net of a family. Of several, each stands around the one before:
    their residuals are added up."""

    def __init__(
        self, inner: nn.Module, name: str, network: nn.Module, scale: float, kind: ControlNets, denoiser: nn.Module
    ) -> None:
        """`inner` is the family's net, or one with a ControlNet. `name` is that of the ControlNet in the state and in
        the conditioning. The frozen `denoiser` is part of the state, too."""
        super().__init__()
        for other, module in {kind.component: denoiser, **dict(inner.named_children()), name: network}.items():
            self.add_module(other, module)
        self._own: Any = (inner, network)  # in a tuple: both are registered here, under the names of the state
        self.name, self.scale, self.kind = name, scale, kind

    @property
    def inner(self) -> Any:
        """The net around which it stands."""
        return self._own[0]

    @property
    def network(self) -> Any:
        """The ControlNet."""
        return self._own[1]

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """The prediction y [B, C, H, W]. cond[NAME] is what `ControlNets.hint` gives; see also `scales`."""
        return self.denoise(x_BCHW, c_noise_B, self.features(cond))

    def features(self, cond: Cond) -> Cond:
        """As the inner net."""
        found: Cond = self.inner.features(cond)
        return found

    def denoise(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
        """The prediction, with further residuals."""
        scales_BR = cond.get(scales(self.name))
        scale = self.scale if scales_BR is None else 1.0
        own = list(self.kind.residuals(self.network, x_BCHW, c_noise_B, cond, cond[self.name], scale))
        if scales_BR is not None:
            low_B, high_B = cond[levels(self.name)].unbind(1)
            factors_BR = scales_BR * ((c_noise_B >= low_B) & (c_noise_B <= high_B))[:, None]
            own = _scaled(own, factors_BR)
        whole = [_sum(a, b) for a, b in zip(own, residuals, strict=True)] if residuals else own
        prediction: Tensor = self.inner.denoise(x_BCHW, c_noise_B, cond, whole)
        return prediction


def _scaled(residuals: Residuals, factors_BR: Tensor) -> list[Tensor | None]:
    factors = iter(factors_BR.unbind(1))
    return [None if y is None else y * next(factors)[:, None, None, None].to(y.dtype) for y in residuals]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a + b if a is not None and b is not None else b if a is None else a


def beside(net: nn.Module) -> list[Controlled]:
    """The ControlNets of a net, in the order in which they were put there."""
    return [*beside(net.inner), net] if isinstance(net, Controlled) else []


def scales(name: str) -> str:
    """The conditioning [B, R] by which each residual of this ControlNet is multiplied, in place of its usual scale."""
    return f"{name}.scales"


def levels(name: str) -> str:
    """The conditioning [B, 2], next to `scales`: the lowest and the highest c_noise at which the ControlNet acts."""
    return f"{name}.levels"


def of(family: Family) -> ControlNets:
    """The ControlNets of a family. UserError where it has none."""
    if family.controlnets is None:
        raise UserError(
            "a ControlNet cannot be used here: Stable Diffusion, SDXL and Stage C of Stable Cascade have them",
            code="unsupported",
        )
    return family.controlnets


def hint(pixels_BCHW: Tensor) -> Tensor:
    """A control image [B, 3 or 4, H, W] uint8 as RGB [B, 3, H, W] float32 in [0, 1], and -1 where it is transparent
    (less than half opaque): nothing is known there, as ControlNets for inpainting have it."""
    rgb_BCHW = pixels_BCHW[:, :3].float() / 255
    if pixels_BCHW.shape[1] == 3:
        return rgb_BCHW
    return torch.where(pixels_BCHW[:, 3:] < 128, -1.0, rgb_BCHW)
