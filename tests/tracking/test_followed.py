"""Curves of a metrics file: exact while they are short, means and extremes of buckets beyond; read on, and taken up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from daguerre.errors import UserError
from daguerre.tracking import curves
from daguerre.tracking.curves import Curve, Curves
from daguerre.tracking.followed import Followed, read_curves
from daguerre.tracking.sinks import MetricsFile, truncate_after


def written(path: Path, first: int, last: int) -> None:
    file = MetricsFile(path)
    for step in range(first, last + 1):
        file.write(step, 4 * step, {"learning/loss": 1 / step, "perf/step_time_seconds": 0.5})
    file.close()


def read(followed: Followed) -> Curves:
    for _ in followed.read():
        pass
    return followed.curves


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 40, 133])
@pytest.mark.parametrize("chunk", [1, 5, 200])
def test_buckets_hold_the_mean_and_the_extremes_of_their_values(
    monkeypatch: pytest.MonkeyPatch, count: int, chunk: int
) -> None:
    monkeypatch.setattr(curves, "BUCKETS", 8)
    values, curve = np.random.default_rng(0).normal(size=count), Curve()
    points = np.stack([np.arange(1.0, count + 1), values])
    for start in range(0, count, chunk):
        curve.extend(points[:, start : start + chunk])
    width = 1
    while (count - 1) // width >= 8:
        width *= 2
    assert curve.width == width
    whole = (count - 1) // width
    parts = values[: whole * width].reshape(whole, width)
    steps, means = curve.series()
    np.testing.assert_allclose(means, [*parts.mean(axis=1), *values[whole * width :]], rtol=1e-12)
    np.testing.assert_array_equal(steps[:whole], width * np.arange(1, whole + 1))
    at, raw = curve.extremes()
    np.testing.assert_array_equal(values[at.astype(int) - 1], raw)
    assert {*parts.min(axis=1), *parts.max(axis=1), *values[whole * width :]} == {*raw}
    assert (np.diff(at) >= 0).all()
    assert (at[-1], raw[-1]) == (count, values[-1])


def test_a_growing_file_is_read_on_and_a_replaced_one_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    followed = Followed(path)
    assert read(followed).step == 0
    written(path, 1, 10)
    assert read(followed).series("learning/loss") == ([*range(1, 11)], [1 / step for step in range(1, 11)])
    with path.open("ab") as file:
        file.write(b'{"step": 11, "samples": 44, "learn')
    place = followed.place.offset
    assert read(followed).step == 10
    with path.open("ab") as file:
        file.write(b'ing/loss": "nan"}\n')
    found = read(followed)
    assert (found.step, found.samples, followed.generation) == (11, 44, 1)
    assert np.isnan(found.newest["learning/loss"][1])
    assert found.last("learning/loss") == 0.1
    assert followed.place.offset == path.stat().st_size > place
    truncate_after(path, 5)
    written(path, 6, 7)
    found = read(followed)
    assert (found.step, followed.generation) == (7, 2)
    assert found.training_seconds == 3.5
    assert vars(read_curves(path))["finite"] == found.finite


def test_what_was_read_is_taken_up_and_nothing_else_is(tmp_path: Path) -> None:
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "kept.npz"
    written(path, 1, 30)
    first = Followed(path)
    read(first)
    first.dump(kept)
    written(path, 31, 40)
    second = Followed(path)
    second.take_up(kept)
    assert second.curves.step == 30, "without the file"
    found, fresh = read(second), read_curves(path)
    assert found.series("learning/loss") == fresh.series("learning/loss")
    assert (found.newest, found.loss.value, found.finite) == (fresh.newest, fresh.loss.value, fresh.finite)
    assert second.generation == 0, "the file was never read from its start"
    kept.write_bytes(kept.read_bytes()[:-200])
    third = Followed(path)
    third.take_up(kept)
    assert third.curves.step == 0


def test_a_line_that_is_none_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 3)
    with path.open("ab") as file:
        file.write(json.dumps([1]).encode() + b"\n")
    followed = Followed(path)
    for _ in range(2):
        with pytest.raises(UserError, match="line 4"):
            read(followed)
        assert followed.curves.step == 0, "a part that holds a fault is not taken"
