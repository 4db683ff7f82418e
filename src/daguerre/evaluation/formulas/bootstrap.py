"""Confidence intervals by the bootstrap (Efron 1979): numbers of samples that are drawn again with replacement."""

from collections.abc import Callable, Iterator

import numpy as np

from daguerre import keys


def draws(count: int, times: int, seed: int = 0) -> Iterator[np.ndarray]:
    """[count] indexes with replacement, `times` times, by the seed alone."""
    for number in range(times):
        uniforms = keys.uniforms(seed, "bootstrap", number, count=count)
        yield np.minimum((np.asarray(uniforms) * count).astype(np.int64), count - 1)


def interval(
    statistic: Callable[[np.ndarray], float], count: int, times: int, share: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """The middle `share` of a statistic of indexes [count]."""
    found = np.array([statistic(indexes) for indexes in draws(count, times, seed)])
    low, high = np.quantile(found, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)
