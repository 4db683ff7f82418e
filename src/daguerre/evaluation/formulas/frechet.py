"""The Fréchet distance of two normal distributions (Heusel et al. 2017, arXiv 1706.08500, equation 6), as in FID.

    |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2)

The last trace is the sum of the roots of the eigenvalues of S1 S2, and these are the eigenvalues of the symmetric R' S1
R with S2 = R R': real, and clipped at 0. Nothing is added to the diagonals, also where there are fewer samples than
dimensions.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and covariance of `count` vectors."""

    count: int
    mean: np.ndarray
    """[d] float64."""
    covariance: np.ndarray
    """[d, d] float64, over count - 1."""

    @cached_property
    def root(self) -> np.ndarray:
        """R with covariance = R R'."""
        values, vectors = np.linalg.eigh(self.covariance)
        found: np.ndarray = vectors * np.sqrt(np.maximum(values, 0.0))
        return found


def moments(features_ND: np.ndarray) -> Moments:
    """Moments of [n, d] vectors, n >= 2, in float64."""
    count = len(features_ND)
    assert count >= 2, "a covariance needs two samples"
    wide_ND = features_ND.astype(np.float64)
    mean = wide_ND.mean(axis=0)
    wide_ND -= mean
    return Moments(count, mean, wide_ND.T @ wide_ND / (count - 1))


def distance(first: Moments, second: Moments) -> float:
    """The distance, 0 or more but for rounding. It falls with the number of samples: compare equal numbers only."""
    apart = first.mean - second.mean
    shared = np.linalg.eigvalsh(second.root.T @ first.covariance @ second.root)
    traces = np.trace(first.covariance) + np.trace(second.covariance)
    return float(apart @ apart + traces - 2.0 * np.sqrt(np.maximum(shared, 0.0)).sum())
