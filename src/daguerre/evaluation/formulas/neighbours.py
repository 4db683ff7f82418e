"""Precision and recall of two sets of vectors (Kynkäänniemi et al. 2019, arXiv 1904.06991).

The manifold of a set is the union of balls around its vectors, each out to its k-th nearest other vector. Precision is
the share of generated vectors in the manifold of the reference, recall the share of the reference in that of the
generated. The border belongs to a ball (`<=`, as in the authors' code; prdc and dgm-eval leave it out).
"""

import numpy as np

_ROWS = 1024


def radii(points_ND: np.ndarray, k: int) -> np.ndarray:
    """[n] float64: squared distance of each vector to its k-th nearest other one; n > k."""
    assert len(points_ND) > k
    points = points_ND.astype(np.float64)
    found = []
    for start in range(0, len(points), _ROWS):
        squared = _squared(points[start : start + _ROWS], points)
        rows = np.arange(len(squared))
        squared[rows, start + rows] = -1.0  # itself, before all others
        found.append(np.partition(squared, k, axis=1)[:, k])
    return np.maximum(np.concatenate(found), 0.0)


def covered(points_ND: np.ndarray, centres_MD: np.ndarray, radii_M: np.ndarray) -> float:
    """Share in [0, 1] of the points that lie in a ball around a centre, with these squared radii."""
    points, centres = points_ND.astype(np.float64), centres_MD.astype(np.float64)
    inside = 0
    for start in range(0, len(points), _ROWS):
        squared = np.maximum(_squared(points[start : start + _ROWS], centres), 0.0)
        inside += int((squared <= radii_M).any(axis=1).sum())
    return inside / len(points)


def precision_recall(generated_ND: np.ndarray, reference_MD: np.ndarray, k: int = 3) -> tuple[float, float]:
    """Precision and recall, shares in [0, 1]."""
    precision = covered(generated_ND, reference_MD, radii(reference_MD, k))
    return precision, covered(reference_MD, generated_ND, radii(generated_ND, k))


def _squared(rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    norms = np.square(points).sum(axis=1)
    return np.square(rows).sum(axis=1)[:, None] + norms - 2.0 * (rows @ points.T)
