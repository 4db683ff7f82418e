"""Post-hoc EMA (Karras et al. 2024, arXiv 2312.02696): averages of any width from a few that were kept.

A power-function average of exponent g weighs the weights after update i of t by about (i/t)^g. Its width is the
standard deviation of that profile, as a share of t. Formulas only: what is kept while training is in ema.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from daguerre.errors import UserError

LARGEST_WIDTH = 12**-0.5
"""Width of the plain mean of all weights (exponent 0); wider profiles do not exist."""

POOR = 0.05
"""Error above which a rebuilt average is worth a warning; docs/optimizers.md has what was measured."""


@dataclass(frozen=True)
class Rebuilt:
    """An average of a width that was not kept."""

    tensors: dict[str, Tensor]
    """float32."""
    error: float
    """Distance of its profile from the one asked for, as a share of that (root of the squared distance): 0 is exact,
    and above `POOR` the average can be off by more than a twentieth of the way between it and the last weights."""


def exponent(width: float) -> float:
    """The exponent g of a width in (0, `LARGEST_WIDTH`]: the root of width^-2 = (g + 2)^2 (g + 3) / (g + 1)."""
    if not 0 < width <= LARGEST_WIDTH:
        raise UserError(f"the width of a power-function average is above 0 and up to {LARGEST_WIDTH:.4f}, got {width}")
    # Multiplied out: g^3 + 7 g^2 + (16 - t) g + 12 - t = 0, of which one root is not negative.
    t = width**-2
    return max(0.0, float(np.roots([1.0, 7.0, 16.0 - t, 12.0 - t]).real.max()))


def decay_at(step: int, g: float) -> float:
    """Decay of update `step` (from 1): (1 - 1/step)^(g + 1). The weights before the run count nothing."""
    return float((1.0 - 1.0 / step) ** (g + 1.0))


def inner_product(t_a: float, g_a: float, t_b: float, g_b: float) -> float:
    """Integral of the product of two profiles p(x) = (g + 1) x^g / t^(g + 1) on [0, t]: how much they overlap."""
    # In logarithms: narrow widths have exponents near 100, and a million updates to that power overflow.
    log = (g_a + g_b + 1) * np.log(min(t_a, t_b)) - (g_a + 1) * np.log(t_a) - (g_b + 1) * np.log(t_b)
    return float(np.exp(log) * (g_a + 1) * (g_b + 1) / (g_a + g_b + 1))


def coefficients(kept: Sequence[tuple[int, float]], step: int, width: float) -> tuple[list[float], float]:
    """Factors of the kept averages (update, width) whose sum is nearest to the average asked for, and its error.

    Least squares between profiles, appendix C of the paper, among factors whose sum is 1: without that condition, which
    the paper does not set, a fit that is not exact makes all weights smaller or larger by what the sum is off.
    """
    profiles = [(t, exponent(w)) for t, w in kept]
    target = (step, exponent(width))
    # Inner products are of the size of 1 / step; times step the equations are of the size of the condition below them.
    gram = np.array([[inner_product(*a, *b) for b in profiles] for a in profiles])
    overlap = np.array([inner_product(*a, *target) for a in profiles])
    whole = inner_product(*target, *target)
    one = np.ones((len(kept), 1))
    equations = np.block([[gram * step, one], [one.T, np.zeros((1, 1))]])  # the last unknown: Lagrange's multiplier
    x = np.linalg.lstsq(equations, np.append(overlap * step, 1.0), rcond=1e-14)[0][:-1]
    squared = (whole - 2 * x @ overlap + x @ gram @ x) / whole
    return x.tolist(), float(max(squared, 0.0) ** 0.5)


def rebuild(
    kept: Sequence[tuple[int, float]], read: Callable[[int, float], Mapping[str, Tensor]], width: float
) -> Rebuilt:
    """The power-function average of `width` after the last update of those that were `kept` (update, width).

    `read` gives the tensors of one that was kept; they are asked for one after the other.
    """
    factors, error = coefficients(kept, max(step for step, _ in kept), width)
    sums: dict[str, Tensor] = {}
    for factor, (step, kept_width) in zip(factors, kept, strict=True):
        for name, tensor in read(step, kept_width).items():
            part = factor * tensor.double()  # factors of both signs, far above 1, nearly cancel
            sums[name] = sums[name].add_(part) if name in sums else part
    return Rebuilt({name: total.float() for name, total in sums.items()}, error)
