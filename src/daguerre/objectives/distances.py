"""The distance of a prediction from its target: squares, or what grows slower, by which outliers pull less.

Shape letters: B samples, C channels, H and W height and width of clean samples.
"""

import math

import torch
from torch import Tensor

from daguerre.objectives.settings import LossSettings


def thresholds(settings: LossSettings, share_B: Tensor, sigma_B: Tensor) -> Tensor:
    """The error [B] from which on a distance grows as a straight line, float64, at noise levels `sigma_B` = s / a,
    which are this share of the schedule, 0 to 1."""
    c, scale = settings.huber_c, settings.huber_scale
    if settings.huber_schedule == "snr":
        return (1 - c) / (1 + sigma_B).square() + c
    if settings.huber_schedule == "exponential":
        return (share_B * math.log(c)).exp() * scale
    return torch.full_like(sigma_B, c * scale)


def of(settings: LossSettings, error_BCHW: Tensor, threshold_B: Tensor | None) -> Tensor:
    """The distance [B, C, h, w] of each element. With a threshold c pseudo-Huber, times 2 c (`huber`: near 0 the
    square) or 2 (`smooth_l1`: far from 0 twice the error)."""
    if settings.name == "l2":
        return error_BCHW.square()
    if settings.name == "l1":
        return error_BCHW.abs()
    assert threshold_B is not None, "drawn with the levels"
    c = threshold_B.reshape(-1, *[1] * (error_BCHW.ndim - 1))
    apart = 2 * pseudo_huber(error_BCHW, c)
    return c * apart if settings.name == "huber" else apart


def pseudo_huber(error_BCHW: Tensor, c: Tensor | float) -> Tensor:
    """sqrt(error^2 + c^2) - c (Charbonnier et al. 1994): half a square over c near 0, the size of the error far from
    it."""
    return (error_BCHW.square() + c * c).sqrt() - c
