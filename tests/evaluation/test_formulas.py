"""Each formula against its closed form, and against torchmetrics, torch-fidelity and scipy as recorded."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from outside_inputs import pair, vectors
from recorded_metrics import recorded

from daguerre import keys
from daguerre.evaluation.formulas import frechet, kernels, neighbours, pairs
from daguerre.evaluation.formulas.frechet import Moments

OUTSIDE = recorded()
PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"
FIRST, SECOND = [[2.0, 0.5], [0.5, 1.0]], [[1.0, -0.3], [-0.3, 3.0]]
BLACK = np.zeros((12, 12, 3), np.uint8)


def normal(count: int, width: int, number: int = 0) -> np.ndarray:
    return keys.normals(0, "normal samples", number, count=count * width).reshape(count, width)


def of(mean: list[float], covariance: list[list[float]]) -> Moments:
    return Moments(2, np.array(mean), np.array(covariance))


def test_frechet_distance_of_commuting_covariances():
    a, b = np.array([1.0, 4.0, 0.0]), np.array([9.0, 1.0, 2.0])
    found = frechet.distance(of([1, 2, 3], np.diag(a)), of([0, 2, 5], np.diag(b)))
    assert found == pytest.approx(5 + np.square(np.sqrt(a) - np.sqrt(b)).sum(), rel=1e-12)


def test_frechet_distance_of_scaled_covariances():
    x = normal(200, 7)
    one = frechet.moments(x)
    two = Moments(one.count, one.mean, 2.5**2 * one.covariance)
    assert frechet.distance(one, two) == pytest.approx(1.5**2 * np.trace(one.covariance), rel=1e-10)
    assert frechet.distance(one, one) == pytest.approx(0, abs=1e-10)


def test_frechet_distance_of_two_dimensions():
    assert frechet.distance(of([0, 0], FIRST), of([0, 0], SECOND)) == pytest.approx(0.92931185, abs=1e-8)


def test_frechet_distance_against_torchmetrics_and_scipy():
    found = frechet.distance(*map(frechet.moments, vectors()))
    assert found == pytest.approx(float(OUTSIDE["fid"]), rel=1e-9)
    assert found == pytest.approx(float(OUTSIDE["fid_scipy"]), rel=1e-9)


def test_frechet_distance_with_fewer_samples_than_dimensions():
    x, y = normal(12, 40), normal(12, 40, 1) + 0.3
    moments = frechet.moments(x), frechet.moments(y)
    roots = np.sqrt(np.linalg.eigvals(moments[0].covariance @ moments[1].covariance).astype(complex)).real.sum()
    apart = moments[0].mean - moments[1].mean
    expected = apart @ apart + sum(np.trace(one.covariance) for one in moments) - 2 * roots
    assert frechet.distance(*moments) == pytest.approx(expected, rel=1e-6)


@cache
def of_samples(count: int) -> float:
    """Mean distance of samples of the standard normal law of 64 dimensions from the law."""
    truth = Moments(2, np.zeros(64), np.eye(64))
    return float(np.mean([frechet.distance(frechet.moments(normal(count, 64, i)), truth) for i in range(4)]))


def predicted(count: int) -> float:
    """The same to the second order in 1 / count."""
    return 64 / count + (64 * 64 + 64) / (4 * (count - 1))


@pytest.mark.parametrize("count", [500, 2000])
def test_frechet_distance_falls_with_the_number_of_samples_as_predicted(count: int):
    assert of_samples(count) == pytest.approx(predicted(count), rel=0.03)


def test_kid_against_torchmetrics():
    first, second = vectors()  # torchmetrics takes as many of both
    assert kernels.kid(first[: len(second)], second) == pytest.approx(float(OUTSIDE["kid"]), rel=1e-9)


@cache
def kid_of_shifted(apart: float) -> tuple[float, float]:
    """KID of normal laws of 64 dimensions, and its standard error over subsets."""
    shift = np.zeros(64)
    shift[0] = apart
    found = kernels.kid_subsets(normal(8000, 64), normal(8000, 64, 1) + shift, 20, 1000)
    return float(found.mean()), float(found.std()) / 20**0.5


def kid_of_laws(apart: float, d: int = 64) -> float:
    a = apart**2
    return (a**3 + 6 * a**2 + 6 * a) / d**3 + (3 * a + 3 * a**2) / d**2 + 3 * a / d


@pytest.mark.parametrize("apart", [1.0, pytest.param(2.0, marks=pytest.mark.long)])
def test_kid_of_shifted_normals(apart: float):
    found, error = kid_of_shifted(apart)
    assert found == pytest.approx(kid_of_laws(apart), abs=4 * error)
    assert kernels.kid_subsets(normal(50, 4), normal(30, 4), 2, 1000).shape == (2,)


def test_cmmd_is_nearly_the_squared_difference_of_means():
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (normal(400, 32) + 0.5, normal(300, 32, 1) + 0.3)]
    apart = unit[0].mean(axis=0) - unit[1].mean(axis=0)
    assert kernels.cmmd(unit[0], 3 * unit[1]) == pytest.approx(10 * apart @ apart, rel=0.01)
    assert kernels.cmmd(unit[0], unit[0]) == pytest.approx(0, abs=1e-9)


def test_cmmd_of_two_vectors():
    first, second = np.eye(2)[:1], np.eye(2)[1:]
    assert kernels.cmmd(first, second) == pytest.approx(2000 * (1 - np.exp(-2 / 200)), rel=1e-12)


def test_precision_and_recall_against_torch_fidelity():
    assert neighbours.precision_recall(*vectors()) == pytest.approx(tuple(OUTSIDE["precision_recall"]), abs=1e-7)


def test_precision_and_recall_of_points_on_a_line():
    reference, generated = np.array([[0.0], [1.0], [3.0], [6.0]]), np.array([[2.0], [6.5], [20.0]])
    # Radii with k = 1: 1, 1, 2, 3. In a ball: 2 (of 1: its border), 6.5; not 20.
    assert np.sqrt(neighbours.radii(reference, 1)).tolist() == [1, 1, 2, 3]
    assert neighbours.covered(generated, reference, neighbours.radii(reference, 1)) == pytest.approx(2 / 3)


def test_psnr_and_ssim_against_torchmetrics():
    assert pairs.psnr(*pair()) == pytest.approx(float(OUTSIDE["psnr"]), rel=1e-6)
    assert pairs.ssim(*pair()) == pytest.approx(float(OUTSIDE["ssim"]), rel=1e-6)
    first, _ = pair()
    assert (pairs.psnr(first, first), pairs.ssim(first, first)) == (pairs.EQUAL_DB, pytest.approx(1.0))


def test_psnr_of_a_known_difference():
    assert pairs.psnr(BLACK, BLACK + np.uint8(255)) == 0
    assert pairs.psnr(BLACK, BLACK + np.uint8(1)) == pytest.approx(20 * np.log10(255))


def test_the_numbers_of_the_page_are_these():
    """Its table {closed form, outside code, ours}, each digit of it."""

    def short(*values: float, digits: int) -> str:
        return ", ".join(f"{value:.{digits}f}".removeprefix("0") for value in values)

    first, second = vectors()
    distance = frechet.distance(*map(frechet.moments, vectors()))
    apart = [kid_of_shifted(1.0), kid_of_shifted(2.0)]
    outside = {name: OUTSIDE[name].tolist() for name in ("fid", "fid_scipy", "kid", "precision_recall", "psnr", "ssim")}
    rows = [
        ("Fréchet distance", "two covariances of 2 dimensions", ".92931185", "",
         short(frechet.distance(of([0, 0], FIRST), of([0, 0], SECOND)), digits=8)),
        ("", "300 and 260 vectors of 24 numbers", "",
         f"torchmetrics {outside['fid']:.12f}, scipy's `sqrtm` {outside['fid_scipy']:.12f}", f"{distance:.12f}"),
        ("", "500 samples of a standard normal law of 64 dimensions, and the law (mean of 4)",
         short(predicted(500), digits=3), "", short(of_samples(500), digits=3)),
        ("", "the same with 2,000 samples", short(predicted(2000), digits=3), "", short(of_samples(2000), digits=3)),
        ("KID", "the same vectors", "", f"torchmetrics {short(outside['kid'], digits=12)}",
         short(kernels.kid(first[: len(second)], second), digits=12)),
        ("", "normal laws of 64 dimensions, 1 and 2 apart (20 subsets of 1,000)",
         short(kid_of_laws(1.0), kid_of_laws(2.0), digits=4), "",
         ", ".join(f"{short(mean, digits=4)} ± {short(error, digits=4)}" for mean, error in apart)),
        ("precision, recall", "the same vectors", "", f"torch-fidelity {short(*outside['precision_recall'], digits=7)}",
         short(*neighbours.precision_recall(*vectors()), digits=7)),
        ("CMMD", "two orthogonal vectors", f"{2000 * (1 - np.exp(-2 / 200)):.7f}", "",
         f"{kernels.cmmd(np.eye(2)[:1], np.eye(2)[1:]):.7f}"),
        ("PSNR", "a difference of 1; two images of 48 x 40 px", f"{20 * np.log10(255):.7f}",
         f"torchmetrics {outside['psnr']:.6f}",
         f"{pairs.psnr(BLACK, BLACK + np.uint8(1)):.7f}; {pairs.psnr(*pair()):.6f}"),
        ("SSIM", "the same images", "", f"torchmetrics {short(outside['ssim'], digits=9)}",
         short(pairs.ssim(*pair()), digits=9)),
    ]  # fmt: skip
    written = (
        PAGE.read_text(encoding="utf-8").partition("| formula | of | closed form |")[2].splitlines()[2:][: len(rows)]
    )
    assert written == [re.sub(" +", " ", f"| {' | '.join(row)} |") for row in rows]
