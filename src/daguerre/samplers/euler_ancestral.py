"""Euler ancestral: each step goes a little too far towards the clean end and comes back with fresh noise."""

from torch import Tensor

from daguerre.samplers import ddim
from daguerre.types import Denoise, FreshNoise, Grid


def sample(denoise: Denoise, x_BCHW: Tensor, grid: Grid, *, fresh_noise: FreshNoise | None = None) -> Tensor:
    """x0 [B, C, H, W] by ancestral sampling (Ho et al. 2020, arXiv 2006.11239; the step as k-diffusion writes it).

    Arguments as in ddim.py. With sigma = s/a, an Euler step of x/a from sigma to sigma'^2/sigma and fresh noise of
    variance sigma'^2 (1 - sigma'^2/sigma^2) end at sigma'. Times a' these are DDIM's numbers for eta = 1 on every
    path, which stay finite at pure noise, where sigma is infinite.
    """
    return ddim.sample(denoise, x_BCHW, grid, fresh_noise=fresh_noise, eta=1.0)
