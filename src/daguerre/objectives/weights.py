"""Loss weights of closed form, each written once for all objectives; those that are learnt are in adaptive.py.

A weight is a function w(SNR) of the squared error of x0. At a fixed x_t an error of the prediction y is an error of x0
times s/d, so the squared error of y is weighted by w(SNR) (s/d)^2. With A = a^2/(a^2 + s^2) and S = 1 - A (the shares
of signal and noise: SNR = A/S, log-SNR = logit A) that is

    w(SNR) S  *  (a^2 + s^2) / d^2

and the first factor, which is the weight of the v error, has a closed form that is finite at both ends: nothing is
divided by s, nor by a. What remains singular is what d says: eps at a = 0, x0 at s = 0.
"""

import torch
from torch import Tensor

from daguerre.objectives.levels import elementwise
from daguerre.objectives.settings import WeightingSettings


def weight(settings: WeightingSettings, a: Tensor, s: Tensor, d: Tensor) -> Tensor:
    """Weight of the squared error of y at path (a, s) and determinant d = a q - s p; float64, any shape."""
    if settings.name in ("none", "adaptive"):
        return torch.ones_like(a)
    power = a**2 + s**2
    signal, noise = a**2 / power, s**2 / power
    match settings.name:
        case "min_snr":
            v_weight = min_snr(signal, noise, settings.snr_gamma)
        case "soft_min_snr":
            v_weight = soft_min_snr(signal, noise, settings.snr_gamma)
        case "debiased":
            v_weight = debiased(signal, noise)
        case "p2":
            v_weight = p2(signal, noise, settings.p2_k, settings.p2_gamma)
    return v_weight * power / d**2


def min_snr(signal: Tensor, noise: Tensor, gamma: float) -> Tensor:
    """w(SNR) = min(SNR, gamma) (Hang et al. 2023, arXiv 2303.09556, section 3.4), times the share of noise."""
    return torch.minimum(signal, gamma * noise)


def soft_min_snr(signal: Tensor, noise: Tensor, gamma: float) -> Tensor:
    """w(SNR) = SNR gamma / (SNR + gamma) (Crowson et al. 2024, arXiv 2401.11605), times the share of noise.

    min(SNR, gamma) without its corner; the paper has gamma = 4.
    """
    return gamma * signal * noise / (signal + gamma * noise)


def debiased(signal: Tensor, noise: Tensor) -> Tensor:
    """w(SNR) = sqrt(SNR) (Yu et al. 2023, arXiv 2310.08442), times the share of noise.

    The paper's weight 1 / sqrt(SNR) stands before the error of eps, hence the power here.
    """
    return (signal * noise).sqrt()


def p2(signal: Tensor, noise: Tensor, k: float, gamma: float) -> Tensor:
    """w(SNR) = SNR / (k + SNR)^gamma (Choi et al. 2022, arXiv 2204.00227, eq. 8), times the share of noise.

    The paper's weight 1 / (k + SNR)^gamma stands before the error of eps, hence the SNR here.
    """
    return signal * elementwise.power(noise / (k * noise + signal), gamma)
