"""Each formula against its closed form, and against torchmetrics, torch-fidelity and scipy as recorded."""

from __future__ import annotations

import numpy as np
import pytest
from outside_inputs import pair, vectors
from recorded_metrics import recorded

from daguerre import keys
from daguerre.evaluation.formulas import bootstrap, frechet, kernels, neighbours, pairs
from daguerre.evaluation.formulas.frechet import Moments

OUTSIDE = recorded()


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
    first, second = [[2.0, 0.5], [0.5, 1.0]], [[1.0, -0.3], [-0.3, 3.0]]
    assert frechet.distance(of([0, 0], first), of([0, 0], second)) == pytest.approx(0.92931185, abs=1e-8)


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


@pytest.mark.parametrize(("count", "predicted"), [(500, 2.212), (2000, 0.552)])
def test_frechet_distance_falls_with_the_number_of_samples_as_predicted(count: int, predicted: float):
    truth = Moments(2, np.zeros(64), np.eye(64))
    found = [frechet.distance(frechet.moments(normal(count, 64, i)), truth) for i in range(4)]
    assert np.mean(found) == pytest.approx(predicted, rel=0.03)


def test_kid_against_torchmetrics():
    first, second = vectors()  # torchmetrics takes as many of both
    assert kernels.kid(first[: len(second)], second) == pytest.approx(float(OUTSIDE["kid"]), rel=1e-9)


@pytest.mark.parametrize(("a", "expected"), [(1.0, 0.048389), (4.0, 0.202850)])
def test_kid_of_shifted_normals(a: float, expected: float):
    shift = np.zeros(64)
    shift[0] = a**0.5
    found = kernels.kid_subsets(normal(8000, 64), normal(8000, 64, 1) + shift, 20, 1000)
    assert found.mean() == pytest.approx(expected, abs=4 * found.std() / 20**0.5)
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
    black = np.zeros((12, 12, 3), np.uint8)
    assert pairs.psnr(black, black + np.uint8(255)) == 0
    assert pairs.psnr(black, black + np.uint8(1)) == pytest.approx(20 * np.log10(255))


def test_bootstrap_interval_of_a_mean_is_that_of_the_normal_law():
    x = normal(400, 1)[:, 0]
    low, high = bootstrap.interval(lambda rows: float(x[rows].mean()), len(x), 2000)
    assert high - low == pytest.approx(2 * 1.96 * x.std() / 20, rel=0.06)
    assert low < x.mean() < high
