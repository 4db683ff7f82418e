"""Distances of two sets of vectors by kernels: the maximum mean discrepancy (Gretton et al. 2012, JMLR 13).

KID (Bińkowski et al. 2018, arXiv 1801.01401) takes a cubic kernel without bias, so it may be negative; CMMD (Jayasumana
et al. 2024, arXiv 2401.09603) a Gaussian one on unit vectors, with the mean over all pairs.
"""

from collections.abc import Callable

import numpy as np

from daguerre import keys

SIGMA = 10.0
"""Width of CMMD's kernel."""
SCALE = 1000.0
"""CMMD is given in thousandths."""
_ROWS = 2048

Kernel = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Values of all pairs, [n, m], of the rows of two sets."""


def kid(first_ND: np.ndarray, second_MD: np.ndarray) -> float:
    """Squared discrepancy by the kernel (x.y/d + 1)^3, unbiased; n, m >= 2."""
    first, second = first_ND.astype(np.float64), second_MD.astype(np.float64)

    def within(a: np.ndarray) -> float:
        table = _cubes(a, a)
        return float((table.sum() - np.trace(table)) / (len(a) * (len(a) - 1)))

    return within(first) + within(second) - 2.0 * float(_cubes(first, second).mean())


def kid_of_groups(first_ND: np.ndarray, second_MD: np.ndarray, group_N: np.ndarray) -> Callable[[np.ndarray], float]:
    """`kid` of the vectors of some groups less the second set's own mean, as a function of the groups that are kept
    ([groups] bool); `group_N` has the group of each vector. All pairs are computed once, and what is left out is
    subtracted. The second set's own mean is the same for all first sets: a difference needs no hour for it."""
    first = first_ND.astype(np.float64)
    sizes, within, across = _sums_of_groups(_cubes, first, second_MD.astype(np.float64), group_N)
    # A vector's pair with itself does not count.
    own = _cube(np.square(first).sum(axis=1), first.shape[1])
    within -= np.diag(np.bincount(group_N, own))

    def value(kept: np.ndarray) -> float:
        n = sizes[kept].sum()
        pairs = within[np.ix_(kept, kept)].sum() / (n * (n - 1))
        return float(pairs - 2.0 * across[kept].sum() / (n * len(second_MD)))

    return value


def cmmd_of_groups(first_ND: np.ndarray, second_MD: np.ndarray, group_N: np.ndarray) -> Callable[[np.ndarray], float]:
    """`cmmd` of the vectors of some groups less the second set's own mean, as `kid_of_groups`."""
    sizes, within, across = _sums_of_groups(_gaussians, _unit(first_ND), _unit(second_MD), group_N)

    def value(kept: np.ndarray) -> float:
        n = sizes[kept].sum()
        pairs = within[np.ix_(kept, kept)].sum() / n**2
        return float(SCALE * (pairs - 2.0 * across[kept].sum() / (n * len(second_MD))))

    return value


def _sums_of_groups(
    kernel: Kernel, first: np.ndarray, second: np.ndarray, group_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors in each group, sums of the kernel over the pairs of each two groups, and of each with the second set."""
    count = int(group_N.max()) + 1
    by_group = [first[group_N == i] for i in range(count)]
    within, across = np.zeros((count, count)), np.zeros(count)
    for i, one in enumerate(by_group):
        for j in range(i, count):
            within[i, j] = within[j, i] = _sum(kernel, one, by_group[j])
        across[i] = _sum(kernel, one, second)
    return np.bincount(group_N).astype(np.float64), within, across


def _sum(kernel: Kernel, first: np.ndarray, second: np.ndarray) -> float:
    """The sum of the kernel over all pairs, some rows at a time."""
    return sum(float(kernel(first[i : i + _ROWS], second).sum()) for i in range(0, len(first), _ROWS))


def _cubes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _cube(a @ b.T, a.shape[1])


def _cube(products: np.ndarray, width: int) -> np.ndarray:
    table = products / width + 1.0
    found: np.ndarray = table * table * table  # a tenth of the time of ** 3
    return found


def kid_subsets(first_ND: np.ndarray, second_MD: np.ndarray, count: int, size: int, seed: int = 0) -> np.ndarray:
    """[count] float64: `kid` of subsets of `size` (at most n and m), each drawn without replacement by the seed."""
    size = min(size, len(first_ND), len(second_MD))

    def subset(rows: np.ndarray, purpose: str, number: int) -> np.ndarray:
        return rows[keys.permutation(seed, purpose, number, len(rows))[:size]]

    pairs = ((subset(first_ND, "kid", i), subset(second_MD, "kid reference", i)) for i in range(count))
    return np.array([kid(*pair) for pair in pairs])


def cmmd(first_ND: np.ndarray, second_MD: np.ndarray) -> float:
    """Squared discrepancy of unit vectors by exp(-|x - y|^2 / (2 sigma^2)), mean over all pairs, in thousandths."""
    first, second = _unit(first_ND), _unit(second_MD)

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        return _sum(_gaussians, a, b) / (len(a) * len(b))

    return SCALE * (mean(first, first) + mean(second, second) - 2.0 * mean(first, second))


def _unit(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def _gaussians(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The kernel of each pair of unit vectors."""
    found: np.ndarray = np.exp(-np.maximum(2.0 - 2.0 * (a @ b.T), 0.0) / (2.0 * SIGMA**2))
    return found
