"""The Fréchet distance of two normal distributions (Heusel et al. 2017, arXiv 1706.08500, equation 6), as in FID.

    |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2)

The last trace is the sum of the roots of the eigenvalues of S1 S2, and these are the eigenvalues of the symmetric R' S1
R with S2 = R R': real, and clipped at 0. Nothing is added to the diagonals, also where there are fewer samples than
dimensions: there S1 = D' D with D of n rows, and the smaller D R R' D' has the same eigenvalues but for zeros.
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
    deviations: np.ndarray | None = None
    """D, [count, d] float64, with covariance = D' D; only where it has fewer rows than columns."""

    @cached_property
    def root(self) -> np.ndarray:
        """R with covariance = R R'."""
        values, vectors = np.linalg.eigh(self.covariance)
        found: np.ndarray = vectors * np.sqrt(np.maximum(values, 0.0))
        return found


def moments(features_ND: np.ndarray) -> Moments:
    """Moments of [n, d] vectors, n >= 2, in float64."""
    count, width = features_ND.shape
    assert count >= 2, "a covariance needs two samples"
    wide_ND = features_ND.astype(np.float64)
    mean = wide_ND.mean(axis=0)
    wide_ND = (wide_ND - mean) / np.sqrt(count - 1)
    return Moments(count, mean, wide_ND.T @ wide_ND, wide_ND if count < width else None)


def distance(first: Moments, second: Moments) -> float:
    """The distance, 0 or more but for rounding. It falls with the number of samples: compare equal numbers only."""
    apart = first.mean - second.mean
    if first.deviations is None:
        shared = np.linalg.eigvalsh(second.root.T @ first.covariance @ second.root)
    else:
        across = first.deviations @ second.root
        shared = np.linalg.eigvalsh(across @ across.T)
    traces = np.trace(first.covariance) + np.trace(second.covariance)
    return float(apart @ apart + traces - 2.0 * np.sqrt(np.maximum(shared, 0.0)).sum())


def warning(first: Moments, second: Moments) -> str:
    """The sentence about sets with fewer samples than dimensions, of which the distance says little; else empty."""
    width = len(first.mean)
    if min(first.count, second.count) > width:
        return ""
    return (
        f"{first.count:,} images and {second.count:,} of the reference, for {width:,} features: with fewer images than "
        "features the distance is mostly made by their number, and a worse set may have the lower one. Measure more "
        "(num_images), or take a metric without such a range (kid, cmmd)."
    )
