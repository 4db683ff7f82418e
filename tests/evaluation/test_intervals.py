"""The intervals of `daguerre evaluate A B`: coverage by simulation, closed forms, and what has no interval."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from quick_cases import chosen

from daguerre import plugins
from daguerre.errors import UserError
from daguerre.evaluation import blocks, compare, results
from daguerre.evaluation.compare import Difference
from daguerre.evaluation.evaluate import measure
from daguerre.evaluation.formulas import frechet, jackknife, kernels, neighbours
from daguerre.evaluation.inputs import MeasuredInputs
from daguerre.evaluation.metric import MetricSettings
from daguerre.evaluation.result import Result, Row, number
from daguerre.evaluation.settings import EvaluationSettings
from daguerre.generation.jobs import WHOLE

Statistic = Callable[[np.ndarray], float]
Number = Callable[[np.ndarray, np.ndarray], Statistic]
"""Of samples and the group of each: the number of the samples of the groups that are kept."""


def coverage(
    of: Number, n: int, width: int, shift: float, spread: float, rounds: int, seed: int = 0
) -> tuple[float, float]:
    """Share of intervals that hold the expected difference at this n, and their mean half width in its standard
    deviations: A is normal around .1, B around `shift`."""
    rng = np.random.default_rng(seed)
    group_N = jackknife.groups(n)
    values, halves = [], []
    for _ in range(rounds):
        a, b = rng.standard_normal((n, width)) + 0.1, rng.standard_normal((n, width)) * spread + shift
        first, second = of(a, group_N), of(b, group_N)
        found = jackknife.half_widths(lambda kept, a=first, b=second: {"it": b(kept) - a(kept)})
        values.append(second(WHOLE_SET) - first(WHOLE_SET))
        halves.append(found["it"])
    return float((np.abs(np.array(values) - np.mean(values)) <= halves).mean()), float(np.mean(halves) / np.std(values))


WHOLE_SET = np.ones(jackknife.GROUPS, bool)


def numbers(width: int) -> dict[str, Number]:
    rng = np.random.default_rng(1)
    reference = rng.standard_normal((2000, width))
    moments = frechet.moments(reference)
    few = reference[:100]
    few_radii = neighbours.radii(few, 3)

    def of_samples(number: Callable[[np.ndarray], float]) -> Number:
        return lambda x, group_N: lambda kept: number(x[kept[group_N]])

    return {
        "fid": of_samples(lambda x: frechet.distance(frechet.moments(x), moments)),
        "kid": lambda x, group_N: kernels.kid_of_groups(x, few, group_N),
        "cmmd": lambda x, group_N: kernels.cmmd_of_groups(x, few, group_N),
        "precision": of_samples(lambda x: neighbours.covered(x, few, few_radii)),
        "recall": lambda x, group_N: recall_of_groups(x, few, group_N),
        "mean": of_samples(lambda x: float(x[:, 0].mean())),
    }


def recall_of_groups(x: np.ndarray, reference: np.ndarray, group_N: np.ndarray, k: int = 3) -> Statistic:
    """`neighbours.precision_recall`'s recall of the samples that are kept: all distances are computed once, and of each
    sample the nearest 40 others are known, of which at least k are always kept."""
    table = np.square(x).sum(axis=1)[:, None] + np.square(x).sum(axis=1) - 2 * x @ x.T
    np.fill_diagonal(table, np.inf)
    near = np.argsort(table, axis=1)[:, : min(40, len(x) - 1)]
    squared, near_groups = np.take_along_axis(table, near, axis=1), group_N[near]
    across = np.square(reference).sum(axis=1)[:, None] + np.square(x).sum(axis=1) - 2 * reference @ x.T

    def at(kept: np.ndarray) -> float:
        number = np.cumsum(kept[near_groups], axis=1)
        assert (number[:, -1] >= k).all()
        radii = np.take_along_axis(squared, np.argmax(number >= k, axis=1)[:, None], axis=1)[:, 0]
        return float(((across <= radii) & kept[group_N]).any(axis=1).mean())

    return at


# The bootstrap that stood here before covered 75, 9 and 80 % of the first, third and last of these.
CASES = [("fid", 50, 0.1, 1.3), ("fid", 50, 0.1, 1.0), ("kid", 50, 0.1, 1.3), ("mean", 50, 0.3, 1.0),
         ("recall", 40, 0.1, 0.8)]  # fmt: skip


@pytest.mark.parametrize(("name", "n", "shift", "spread"), chosen(CASES, lambda *case: case in CASES[::2]))
def test_a_95_percent_interval_holds_the_expected_difference_so_often(name, n, shift, spread):
    """Eighty rounds: 2.4 % is the standard error of such a share. An interval may not hold by being too wide: 2.26
    standard deviations are right."""
    share, width = coverage(numbers(16)[name], n, 16, shift, spread, rounds=80)
    assert share >= 0.88
    assert 1.7 <= width <= 2.8


@pytest.mark.long
@pytest.mark.parametrize("width", [32, 256])
@pytest.mark.parametrize("n", [50, 200, 1000])
@pytest.mark.parametrize(("shift", "spread"), [(0.1, 1.0), (0.25, 1.0), (0.1, 1.1), (0.1, 1.3)])
@pytest.mark.parametrize("name", ["fid", "kid", "cmmd", "precision", "recall"])
def test_coverage_over_numbers_dimensions_and_sizes(name, shift, spread, n, width):
    rounds = 100 if n < 1000 else 40
    error = 3 * np.sqrt(0.95 * 0.05 / rounds)
    share, _ = coverage(numbers(width)[name], n, width, shift, spread, rounds)
    assert share >= 0.9 - error


def test_of_a_mean_it_is_students_interval():
    """The jackknife of a mean of equal groups is exact: t with 9 degrees of freedom, the spread of the group means."""
    x = np.random.default_rng(2).standard_normal(400)
    group_N = jackknife.groups(400)
    found = jackknife.half_widths(lambda kept: {"mean": float(x[kept[group_N]].mean())})
    means = np.array([x[group_N == i].mean() for i in range(jackknife.GROUPS)])
    assert found["mean"] == pytest.approx(2.262157 * means.std(ddof=1) / np.sqrt(10), rel=1e-9)


def test_groups_are_of_equal_sizes_and_by_the_count_alone():
    group_N = jackknife.groups(1003)
    assert sorted(np.bincount(group_N)) == [100] * 7 + [101] * 3
    assert (group_N == jackknife.groups(1003)).all()
    assert (np.diff(group_N[:100]) != 0).mean() > 0.5  # neighbours are often near duplicates


def test_recall_of_groups_is_that_of_what_is_kept():
    rng = np.random.default_rng(6)
    x, reference = rng.standard_normal((83, 5)), rng.standard_normal((60, 5)) + 1
    group_N = jackknife.groups(83)
    value = recall_of_groups(x, reference, group_N)
    for left_out in ((), (3,), (0, 9)):
        kept = np.ones(jackknife.GROUPS, bool)
        kept[list(left_out)] = False
        found = neighbours.precision_recall(x[kept[group_N]], reference)[1]
        assert value(kept) == found
        assert 0.3 < found < 0.95


@pytest.mark.parametrize("name", ["kid", "cmmd"])
def test_a_kernel_distance_of_groups_is_that_of_what_is_kept(name):
    rng = np.random.default_rng(3)
    first, second = rng.standard_normal((53, 7)).astype(np.float32), rng.standard_normal((31, 7)).astype(np.float32)
    group_N = jackknife.groups(53)
    value = getattr(kernels, f"{name}_of_groups")(first, second, group_N)
    wide = second.astype(np.float64)
    if name == "kid":
        pairs = (wide @ wide.T / 7 + 1) ** 3
        of_second = (pairs.sum() - np.trace(pairs)) / (31 * 30)
    else:
        wide /= np.linalg.norm(wide, axis=1, keepdims=True)
        of_second = 1000 * np.exp(-np.square(wide[:, None] - wide).sum(axis=2) / 200).mean()
    for left_out in ((), (3,), (0, 9), (1, 2, 4)):
        kept = np.ones(jackknife.GROUPS, bool)
        kept[list(left_out)] = False
        found = value(kept) + of_second  # which cancels where two are compared
        assert found == pytest.approx(getattr(kernels, name)(first[kept[group_N]], second), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("first", "second", "n"), [(0.5, 0.6, 50), (0.95, 0.99, 200), (1.0, 1.0, 30), (0.0, 1.0, 40)])
def test_interval_of_shares_holds_their_difference(first, second, n):
    rng = np.random.default_rng(4)
    hits = 0
    for a, b in zip(rng.binomial(n, first, 2000) / n, rng.binomial(n, second, 2000) / n, strict=True):
        low, high = jackknife.share_interval(a, b, n)
        assert low <= b - a <= high
        assert low < high
        hits += low <= second - first <= high
    assert hits / 2000 >= 0.93


def test_no_interval_no_verdict():
    row = number("fid", 3.0, "lower")
    assert Difference("fid", row, 1.0, (-3.0, -1.0)).shown().verdict == "B is better"
    assert Difference("fid", row, 1.0, (-3.0, 1.0)).shown().verdict == "no clear difference"
    assert Difference("fid", row, 1.0, None).shown().verdict == "no interval"
    shown = Difference("fid", row, 1.0, (-3.0, -1.0), warning="few").shown()
    assert shown.verdict == "differ, and too few images to say which is better"
    assert Difference("shapes", Row("colour", 0.5), 0.75, (0.1, 0.4)).shown().difference == "+25 (+10 to +40)"


def test_a_frechet_distance_of_fewer_samples_than_dimensions_says_so():
    rng = np.random.default_rng(5)
    wide, narrow = (frechet.moments(rng.standard_normal((60, width))) for width in (64, 16))
    assert "60 images and 60 of the reference, for 64 features" in frechet.warning(wide, wide)
    assert not frechet.warning(narrow, narrow)


def evaluated(folder: Path, values: np.ndarray, name: str = "psnr", label: str = "", **settings: object) -> Path:
    """A folder as `daguerre evaluate` leaves it, of a metric of pairs, by a network where a label says so."""
    folder.mkdir()
    blocks.save(folder / f"{name}{label}.npy", values)
    row = {"name": name, "value": float(values.mean()), "share": False, "better": "higher"}
    table = {"count": 30, "rows": [row], "made_with": {"settings": {"name": name, **settings}}, "places": {}}
    document = {"protocol": {"images": 30, "step": 1}, "tables": {f"{name}{label}": table}}
    (folder / results.NAME).write_text(json.dumps(document))
    return folder


def test_what_was_kept_has_to_fit_what_was_written(tmp_path, capsys):
    dice = np.random.default_rng(3)
    values = dice.normal(20, 1, 30)
    a, b = evaluated(tmp_path / "a", values), evaluated(tmp_path / "b", values + 2)
    compare.run(str(a), str(b))
    assert "B - A +2 (+2 to +2): B is better" in capsys.readouterr().out
    c, d = (evaluated(tmp_path / n, v, "lpips", "-vgg-0") for n, v in (("c", values), ("d", values + 2)))
    compare.run(str(c), str(d))
    assert "B - A +2 (+2 to +2)" in capsys.readouterr().out
    few = evaluated(tmp_path / "few", values[:20])
    with pytest.raises(UserError, match=r"psnr\.npy has 20 samples, and result\.json in its folder says 30"):
        compare.run(str(a), str(few))
    other, another = (evaluated(tmp_path / name, values, side=7) for name in ("other", "another"))
    with pytest.raises(UserError, match=r"no such settings of psnr \(side: extra inputs are not permitted\)"):
        compare.run(str(other), str(another))


def test_a_number_that_is_none_is_refused_with_its_name(monkeypatch):
    class Odd:
        Settings = MetricSettings

        @staticmethod
        def evaluate(settings, inputs):
            return {"odd-raw": Result(2, (number("mean", 1.0, ""), number("worst", float("nan"), "")), "")}

    monkeypatch.setattr(plugins, "find", lambda kind, name: Odd)
    own = EvaluationSettings.model_construct(metrics={"odd": MetricSettings(name="odd")}, num_images=2)
    images = SimpleNamespace(total=2)
    with pytest.raises(UserError, match="odd-raw: worst is not a finite number"):
        measure(own, MeasuredInputs(own, Path(), WHOLE, torch.device("cpu"), images))
