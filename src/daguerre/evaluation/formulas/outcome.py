"""The outcome of training an adapter, in numbers of features of images: whether it learnt, whether it memorised, and
what of the base it forgot.

All numbers are means over images, each of which the base has drawn, too, from the same prompt and seed. `cos` is the
cosine of the features of two images.

likeness  cos of an image of a training caption and the pictures that have this caption      higher: it learnt
nearest   cos of an image of a new prompt and the training picture that is nearest to it     higher: nearer to them
copies    share of images of new prompts that are nearer to a training picture than this picture is to any other
          training picture (what Alaa et al. 2022, arXiv 2102.08921, call not authentic)     higher: it memorised
drift     (1 - cos) / 2 of an image of the base's own prompts and the base's image (as peft's comparison of methods has
          it); `unrelated` is the same of the base's images of two different prompts         higher: it forgot
balance   harmonic mean of what was learnt and what was kept: the gain in likeness, as a share of the highest gain
          among those that are compared and did not destroy the base, and 1 - drift / unrelated, each at least 0

Weights have destroyed the base where the drift is not clearly below `unrelated`: they draw the base's prompts no nearer
to the base's images than other prompts are. What such images are like means nothing, so none of them is the best.
Nor is one that moved more than MUCH of the way there, where another learnt and did not, clearly if there is such a one:
learning and forgetting grow together, so that the balance alone would often name the one that learnt all and kept half.

Letters: N images of one list of prompts, P training pictures, D features.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from daguerre.evaluation.formulas import jackknife
from daguerre.report.outcome import MUCH

Key = TypeVar("Key", bound=Hashable)
_ALL = np.ones(jackknife.GROUPS, bool)


class Features(NamedTuple):
    """Features of the images that one set of weights draws, float64."""

    trained_ND: np.ndarray
    """Of training captions."""
    new_ND: np.ndarray
    """Of new prompts."""
    base_ND: np.ndarray
    """Of the base's own prompts."""


class Number(NamedTuple):
    """A number of one set of weights."""

    value: float
    interval: tuple[float, float] | None
    """At 95 %: of its difference from the base's number where the base has one, else of itself."""
    of_base: float | None = None
    share: bool = False


@dataclass(frozen=True)
class Found:
    """Numbers of one set of weights by their names."""

    numbers: Mapping[str, Number]
    behind: tuple[float, float] | None = None
    """Interval at 95 % of how far its balance is behind the best one; None for the best, where the base is
    destroyed, and without intervals."""
    destroyed: bool = False
    """The base is: its balance is 0."""


@dataclass(frozen=True)
class _Values:
    """The values of each image, whose means are the numbers."""

    likeness_N: np.ndarray
    nearest_N: np.ndarray
    copies_N: np.ndarray
    drift_N: np.ndarray


def unit(rows_ND: np.ndarray, centre_D: np.ndarray) -> np.ndarray:
    """Rows of length 1 after `centre_D` is subtracted; a row that equals it stays 0."""
    rows = np.asarray(rows_ND, dtype=np.float64) - centre_D
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def unrelated(base_ND: np.ndarray, prompts: Sequence[str]) -> float:
    """The drift of two images of different prompts, of rows of length 1; 0.5 where all prompts are the same one."""
    differ = np.array(prompts)[:, None] != np.array(prompts)
    return float(((1 - base_ND @ base_ND.T) / 2)[differ].mean()) if differ.any() else 0.5


def found(
    pictures_PD: np.ndarray,
    same_caption_NP: np.ndarray,
    base: Features,
    each: Mapping[Key, Features],
    scale: float,
) -> tuple[dict[Key, Found], Key | None]:
    """The numbers of each set of weights, and the one whose balance is best, among those that did not forget much where
    there are any; None where none has learnt and left some of the base. All features are rows of length 1.

    Args:
        same_caption_NP: True where image i of a training caption and picture j have one caption; True somewhere in
            every row.
        scale: drift of two images of different prompts.
    """
    of_base = _values(pictures_PD, same_caption_NP, base, base)
    values = {key: _values(pictures_PD, same_caption_NP, one, base) for key, one in each.items()}
    groups = [jackknife.groups(len(rows)) for rows in (base.trained_ND, base.new_ND, base.base_ND)]
    has_intervals = min(map(len, groups)) >= jackknife.FEWEST

    def drifts(kept_G: np.ndarray) -> dict[Key, float]:
        return {key: float(own.drift_N[kept_G[groups[2]]].mean()) for key, own in values.items()}

    widths = jackknife.half_widths(drifts) if has_intervals else dict.fromkeys(values, 0.0)
    there = [key for key, drift in drifts(_ALL).items() if drift + widths[key] < scale]

    def numbers_of(kept_G: np.ndarray) -> dict[tuple[Key, str], float]:
        rows = [kept_G[group] for group in groups]
        numbers = {key: _means(own, of_base, rows) for key, own in values.items()}
        most = max((numbers[key]["gain"] for key in there), default=0.0)
        return {
            (key, name): value
            for key, own in numbers.items()
            for name, value in {**own, "balance": _balance(own, most, scale) * (key in there)}.items()
        }

    plain = numbers_of(_ALL)
    learnt = [key for key in there if plain[key, "balance"] > 0]
    mild = [key for key in learnt if plain[key, "drift"] <= MUCH * scale]
    clear = [key for key in mild if plain[key, "drift"] + widths[key] <= MUCH * scale]
    best = max(clear or mild or learnt, key=lambda key: plain[key, "balance"], default=None)

    def of_groups(kept_G: np.ndarray) -> dict[tuple[Key, str], float]:
        of = numbers_of(kept_G)
        highest = 0.0 if best is None else of[best, "balance"]
        return of | {(key, "behind"): highest - of[key, "balance"] for key in there}

    half = jackknife.half_widths(of_groups) if has_intervals else {}
    plain = of_groups(_ALL)
    return {key: _found(key, plain, half, of_base, values[key], best, key not in there) for key in values}, best


def _found(
    key: Key,
    plain: Mapping[tuple[Key, str], float],
    half: Mapping[tuple[Key, str], float],
    base: _Values,
    own: _Values,
    best: Key | None,
    destroyed: bool,
) -> Found:
    def around(name: str) -> tuple[float, float] | None:
        if not half:
            return None
        return plain[key, name] - half[key, name], plain[key, name] + half[key, name]

    copies, of_base = float(own.copies_N.mean()), float(base.copies_N.mean())
    # Shares near 0 have no spread among the samples that are left out: Agresti and Caffo's interval holds there.
    of_copies = jackknife.share_interval(of_base, copies, len(own.copies_N)) if half else None
    numbers = {
        "likeness": Number(float(own.likeness_N.mean()), around("gain"), float(base.likeness_N.mean())),
        "nearest": Number(float(own.nearest_N.mean()), around("nearer"), float(base.nearest_N.mean())),
        "copies": Number(copies, of_copies, of_base, share=True),
        "drift": Number(float(own.drift_N.mean()), around("drift")),
        "balance": Number(plain[key, "balance"], None),
    }
    return Found(numbers, None if destroyed or best in (None, key) else around("behind"), destroyed)


def _means(own: _Values, base: _Values, rows: Sequence[np.ndarray]) -> dict[str, float]:
    of_trained, of_new, of_base = rows
    return {
        "gain": float((own.likeness_N - base.likeness_N)[of_trained].mean()),
        "nearer": float((own.nearest_N - base.nearest_N)[of_new].mean()),
        "drift": float(own.drift_N[of_base].mean()),
    }


def _balance(own: Mapping[str, float], most: float, scale: float) -> float:
    learnt = max(own["gain"], 0.0) / most if most > 0 else 0.0
    kept = max(1 - own["drift"] / scale, 0.0)
    return 2 * learnt * kept / (learnt + kept) if learnt and kept else 0.0


def _values(pictures_PD: np.ndarray, same_caption_NP: np.ndarray, own: Features, base: Features) -> _Values:
    of_trained_NP = own.trained_ND @ pictures_PD.T
    of_new_NP = own.new_ND @ pictures_PD.T
    among_PP = pictures_PD @ pictures_PD.T
    np.fill_diagonal(among_PP, -np.inf)
    nearest = of_new_NP.argmax(1)
    nearest_N = of_new_NP.max(1)
    # One picture alone is near to no other, so nothing can be told of copies of it.
    copies_N = nearest_N > among_PP.max(1)[nearest] if len(pictures_PD) > 1 else np.zeros(len(nearest_N), bool)
    likeness_N = (of_trained_NP * same_caption_NP).sum(1) / same_caption_NP.sum(1)
    return _Values(likeness_N, nearest_N, copies_N, (1 - (own.base_ND * base.base_ND).sum(1)) / 2)
