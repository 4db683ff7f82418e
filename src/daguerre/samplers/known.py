"""A clean sample that is known before sampling: image-to-image starts from it, inpainting keeps it outside a mask.

Samplers see neither: they get another start, a shorter grid and a denoiser that knows what is kept.
Letters: B samples, C channels, h and w latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from daguerre.types import Denoise, Grid

Path = Callable[[float], tuple[Tensor, Tensor]]
"""(a, s) at a time."""


@dataclass(frozen=True, eq=False)
class Known:
    """Known clean samples of a batch."""

    x0_BCHW: Tensor
    """[B, C, h, w] float32, of images."""
    strength: float
    """Share of the steps that run, in (0, 1]: the noisiest ones are left out."""
    anew_B1HW: Tensor | None = None
    """[B, 1, h, w] bool: True where the image is generated. None: everywhere."""

    def steps(self, grid: Grid) -> Grid:
        """The steps that run."""
        return grid.last(steps_run(len(grid.t_N), self.strength))

    def start(self, grid: Grid, noise_BCHW: Tensor) -> Tensor:
        """The sampler's first x [B, C, h, w]: a x0 + s noise at the first level of `grid`. With a mask and strength 1
        noise alone, as in diffusers' inpainting: nothing of what is painted over shows through."""
        if self.anew_B1HW is not None and self.strength == 1:
            return grid.prior_std * noise_BCHW
        return grid.a[0].item() * self.x0_BCHW + grid.s[0].item() * noise_BCHW

    def keeping(self, denoise: Denoise, path: Path, grid: Grid, noise_BCHW: Tensor) -> Denoise:
        """`denoise` that sees the known sample with its noise outside the mask, and answers with it there.

        Steps are linear in x and x0, so a sampler of any order ends with the known sample there. The first x of `grid`
        is seen as it is.
        """
        if self.anew_B1HW is None:
            return denoise
        anew_B1HW, first = self.anew_B1HW, grid.t_N[0].item()

        def kept(x_BCHW: Tensor, t: float) -> Tensor:
            # At the first step x is what `start` made of it: with strength 1 nothing of the original is shown.
            if t < first:
                a, s = path(t)
                x_BCHW = torch.where(anew_B1HW, x_BCHW, a.item() * self.x0_BCHW + s.item() * noise_BCHW)
            # Every step is linear in x and x0, so that any sampler ends with the original here, with fresh noise or
            # without.
            return torch.where(anew_B1HW, denoise(x_BCHW, t), self.x0_BCHW)

        return kept


def steps_run(num_inference_steps: int, strength: float) -> int:
    """Count of the steps that run, as diffusers counts: int(steps * strength). 0 is for callers to refuse."""
    return min(int(num_inference_steps * strength), num_inference_steps)  # rounded down, as diffusers does
