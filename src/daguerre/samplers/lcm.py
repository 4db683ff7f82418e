"""LCM, for its own weights alone: from each noise level straight to an image, then by fresh noise to the next level."""

from torch import Tensor

from daguerre.types import Denoise, FreshNoise, Grid


def sample(denoise: Denoise, x_BCHW: Tensor, grid: Grid, *, fresh_noise: FreshNoise | None = None) -> Tensor:
    """x0 [B, C, H, W] by multistep consistency sampling (Song et al. 2023, arXiv 2303.01469, algorithm 1; Luo et al.
    2023, arXiv 2310.04378): x' = a' x0 + s' z.

    It needs weights that were distilled into a latent consistency model (LCM, or with an LCM-LoRA merged in), whose
    answer at any noise level is an image; they take 2 to 8 steps and mostly no guidance (`guidance_scale=1`). The
    answer of other weights is the mean of all images that fit, so that this gives blurred ones.
    Arguments as in dpmpp_2m_sde.py. LCM's c_skip x + c_out x0 is x0 within 1e-5 of x above timestep 15, and left out.
    """
    x, t, a, s = x_BCHW, grid.t_N.tolist(), grid.a.tolist(), grid.s.tolist()
    for j in range(len(t)):
        x = a[j + 1] * denoise(x, t[j])
        if s[j + 1] > 0:
            assert fresh_noise is not None, "LCM needs fresh noise"
            x = x + s[j + 1] * fresh_noise(j)
    return x
