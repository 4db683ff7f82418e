"""Ground truth: a 2-D Gaussian mixture whose denoiser is known in closed form, and networks made of it.

Shape letters: B samples, K components. A sample is [2, 1, 1]: two channels of one pixel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from daguerre.objectives.algebra import Diffusion
from daguerre.types import Cond


@dataclass(frozen=True)
class Mixture:
    """A mixture of K Gaussians in the plane, float64."""

    weight_K: Tensor
    mean_K2: Tensor
    cov_K22: Tensor

    def denoise(self, x_B211: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """E[x0 | x] [B, 2, 1, 1] for x = a x0 + s eps: Bayes' rule over the components, regression in each."""
        cov_K22 = a**2 * self.cov_K22 + s**2 * torch.eye(2, dtype=torch.float64)
        precision_K22 = torch.linalg.inv(cov_K22)
        off_BK2 = x_B211.double().reshape(-1, 1, 2) - a * self.mean_K2
        fit_BK = torch.einsum("bki,kij,bkj->bk", off_BK2, precision_K22, off_BK2)
        share_BK = (self.weight_K.log() - fit_BK / 2 - torch.logdet(cov_K22) / 2).softmax(-1)
        mean_BK2 = self.mean_K2 + a * torch.einsum("kij,kjl,bkl->bki", self.cov_K22, precision_K22, off_BK2)
        return (share_BK.unsqueeze(-1) * mean_BK2).sum(1).reshape(-1, 2, 1, 1).to(x_B211.dtype)

    def component(self, x_B211: Tensor) -> Tensor:
        """The most likely component [B] of each sample."""
        off_BK2 = x_B211.double().reshape(-1, 1, 2) - self.mean_K2
        fit_BK = torch.einsum("bki,kij,bkj->bk", off_BK2, torch.linalg.inv(self.cov_K22), off_BK2)
        return (self.weight_K.log() - fit_BK / 2 - torch.logdet(self.cov_K22) / 2).argmax(-1)

    def distance(self, x_B211: Tensor, num_directions: int = 16) -> float:
        """Kolmogorov-Smirnov distance of samples from the mixture, the largest over directions in the plane."""
        angle = torch.arange(num_directions, dtype=torch.float64) * (torch.pi / num_directions)
        u_D2 = torch.stack([angle.cos(), angle.sin()], -1)
        x_DB = (x_B211.double().reshape(-1, 2) @ u_D2.T).T.sort(-1).values
        mean_DK = u_D2 @ self.mean_K2.T
        std_DK = torch.einsum("di,kij,dj->dk", u_D2, self.cov_K22, u_D2).sqrt()
        z_DBK = (x_DB.unsqueeze(-1) - mean_DK.unsqueeze(1)) / std_DK.unsqueeze(1)
        cdf_DB = (self.weight_K * torch.special.ndtr(z_DBK)).sum(-1)
        steps_B = torch.arange(x_DB.shape[1] + 1, dtype=torch.float64) / x_DB.shape[1]
        return float(torch.maximum((cdf_DB - steps_B[:-1]).abs(), (cdf_DB - steps_B[1:]).abs()).max())


THREE = Mixture(
    weight_K=torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    mean_K2=torch.tensor([[0.8, 0.6], [-0.9, 0.5], [0.1, -1.0]], dtype=torch.float64),
    cov_K22=torch.tensor(
        [[[0.04, 0.03], [0.03, 0.06]], [[0.05, 0.0], [0.0, 0.01]], [[0.02, -0.01], [-0.01, 0.03]]], dtype=torch.float64
    ),
)
"""Three components of unequal share and shape, well apart, of about unit variance together."""


def network(objective: Diffusion, denoise: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A network that predicts what a perfect one would: net(c_in x, c_noise, cond) -> y = p x0 + q eps.

    It is told nothing but what the objective shows a network, so a wrong c_in, c_noise or target is a wrong image.
    """

    def net(x_in: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        a, s = objective.path(time_of(objective, c_noise_B[0].double()))
        x = x_in.double() / objective.input_scale(a, s)
        x0 = denoise(x, a, s)
        p, q = objective.target(a, s)
        return (p * x0 + q * (x - a * x0) / s).to(x_in.dtype)

    return net


def even_normals(count: int, seed: int = 0) -> Tensor:
    """Standard normal points [count, 2, 1, 1] float32 of a scrambled Sobol sequence: they fill the plane evenly.

    What a deterministic sampler makes of them misses the mixture by its own error, hardly by chance.
    """
    u_B2 = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return torch.special.ndtri(u_B2.clamp(1e-9, 1 - 1e-9)).float().reshape(count, 2, 1, 1)


def time_of(objective: Diffusion, c_noise: Tensor) -> Tensor:
    """The time that the network is told as `c_noise`, written down here a second time."""
    name = objective.settings.schedule.name
    if name == "edm":
        return (4 * c_noise).exp()
    return c_noise if name == "scaled_linear" else c_noise / 1000
