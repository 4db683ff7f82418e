"""Confidence intervals by the delete-a-group jackknife, corrected for its second order (Efron & Stein 1981, Annals of
Statistics 9, 586).

Drawing samples again with replacement would not do: a sample that is drawn twice is its own nearest neighbour and fills
no dimension of a covariance, so FID, KID and recall of such samples are others in the mean, and the interval misses
(FID's may leave out the very value that it is for). Here samples are only left out, one group of ten and two groups of
ten; the spread around the value comes from the differences, and the value is in the middle.

The plain jackknife counts what the samples contribute in pairs twice, and such pairs are most of FID's spread. How much
of it they are follows from leaving out two groups, and is taken off again. Its coverage is simulated in
tests/evaluation/test_intervals.py.
"""

from collections.abc import Callable, Hashable, Mapping
from itertools import combinations
from typing import TypeVar

import numpy as np

from daguerre import keys

GROUPS = 10
FEWEST = 20
"""Samples below which there is no interval: two in a group."""
EVALUATIONS = 1 + GROUPS + GROUPS * (GROUPS - 1) // 2
"""Times that a statistic is computed."""
_QUANTILE = 2.262157
"""Of Student's t with GROUPS - 1 degrees of freedom, at 97.5 %."""

Name = TypeVar("Name", bound=Hashable)
Statistic = Callable[[np.ndarray], Mapping[str, float]]
"""Numbers by name of the samples of the groups that are kept: [GROUPS] bool."""


def groups(count: int) -> np.ndarray:
    """[count] int: the group of each sample, of nearly equal sizes, by the count alone."""
    return np.asarray(keys.permutation(0, "jackknife", 0, count)) % GROUPS


def half_widths(statistic: Callable[[np.ndarray], Mapping[Name, float]]) -> dict[Name, float]:
    """Half the width of the 95 % interval of each number, whose middle is the number of all samples."""
    whole = statistic(np.ones(GROUPS, bool))
    one = [statistic(_without(i)) for i in range(GROUPS)]
    two = {pair: statistic(_without(*pair)) for pair in combinations(range(GROUPS), 2)}
    return {
        name: _half_width(whole[name], np.array([each[name] for each in one]), {p: v[name] for p, v in two.items()})
        for name in whole
    }


def _without(*left_out: int) -> np.ndarray:
    kept = np.ones(GROUPS, bool)
    kept[list(left_out)] = False
    return kept


def _half_width(whole: float, one_G: np.ndarray, two: Mapping[tuple[int, int], float]) -> float:
    g = GROUPS
    plain = (g - 1) / g * np.square(one_G - one_G.mean()).sum()
    # What two groups contribute together and not each alone: linear parts cancel here.
    together = [g * whole - (g - 1) * (one_G[i] + one_G[j]) + (g - 2) * both for (i, j), both in two.items()]
    of_pairs = np.square(np.array(together) - np.mean(together)).sum() * ((g - 2) / g**2) ** 2
    # Pairs alone make the plain estimate twice as large as it should be, and never more.
    return float(_QUANTILE * np.sqrt(max(plain - of_pairs, plain / 2)))


def share_interval(first: float, second: float, count: int) -> tuple[float, float]:
    """The 95 % interval of `second - first`, shares in [0, 1] of `count` samples each of which nothing else is known
    (Agresti & Caffo 2000, The American Statistician 54, 280): one success and one failure are added to both."""
    shares = [(share * count + 1) / (count + 2) for share in (first, second)]
    spread = 1.959964 * np.sqrt(sum(share * (1 - share) for share in shares) / (count + 2))
    middle = shares[1] - shares[0]
    return max(-1.0, float(middle - spread)), min(1.0, float(middle + spread))
