"""Transcendental functions of the few numbers a batch draws, one at a time.

torch computes the bulk of a tensor with vector code and its tail with scalar code, whose last bits differ: a number
would depend on its place in the batch. Here it depends on its argument alone. Sums, products, quotients and square
roots are exactly rounded everywhere and need no such care.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor


def each(function: Callable[[float], float], values: Tensor) -> Tensor:
    """`function` of every element, float64, on the CPU."""
    done = [function(value) for value in values.flatten().tolist()]
    return torch.tensor(done, dtype=torch.float64, device="cpu").reshape(values.shape)


def exp(values: Tensor) -> Tensor:
    return each(math.exp, values)


def log(values: Tensor) -> Tensor:
    """Natural logarithm of numbers above 0."""
    return each(math.log, values)


def cos(values: Tensor) -> Tensor:
    return each(math.cos, values)


def sigmoid(values: Tensor) -> Tensor:
    return 1.0 / (1.0 + exp(-values))


def power(values: Tensor, exponent: float) -> Tensor:
    """`values` at or above 0 to the power of `exponent`."""
    return each(lambda value: value**exponent, values)


def normal_quantile(quantiles: Tensor) -> Tensor:
    """Inverse of the standard normal distribution function (Wichura 1988, AS 241), finite: errors under 1e-15.

    0 counts as 2^-54 and 1 as 1 - 2^-53, half a step of a 53-bit uniform and one step from the ends.
    """
    return each(NormalDist().inv_cdf, quantiles.clamp(2.0**-54, 1.0 - 2.0**-53))
