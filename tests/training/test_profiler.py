"""Records of single updates: which they are, where they end up, and that the updates stay the same."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import tiny_runs
import torch

from daguerre import errors
from daguerre.config import config
from daguerre.config.errors import ConfigError
from daguerre.training import profiler
from daguerre.training.loop import Update

CPU = torch.device("cpu")


def updates(begin: int, end: int):
    """Updates that each multiply two matrices."""
    for step in range(begin + 1, end + 1):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        yield Update(step, None)


def names(trace: Path) -> list[str]:
    with gzip.open(trace) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


@pytest.mark.parametrize(
    ("steps", "done", "end", "first", "last"),
    [([3, 4], 0, 6, 3, 4), ([3, 9], 0, 6, 3, 6), ([3, 5], 3, 6, 4, 5), ([1, 1], 0, 2, 1, 1)],
    ids=["in the middle", "the run ends earlier", "a run that goes on", "the first"],
)
def test_the_named_updates_are_recorded(tmp_path, steps, done, end, first, last):
    trace, table = profiler.files(tmp_path / "profile", first, last, 0)
    written = []

    def write(found, begin, finish):
        written.append((begin, finish))
        profiler.save(found, trace, table)

    found = profiler.recorded(updates(done, end), steps, done, CPU, write)
    assert [update.step for update in found] == list(range(done + 1, end + 1))
    assert written == [(first, last)]
    kept = [name for name in names(trace) if name.startswith("update ")]
    assert list(dict.fromkeys(kept))[: last - first + 1] == [f"update {step}" for step in range(first, last + 1)]
    assert names(trace).count("aten::mm") == last - first + 1
    assert "aten::mm" in table.read_text()


@pytest.mark.parametrize(("steps", "done"), [([1, 0], 0), ([2, 3], 3), ([9, 10], 0)])
def test_nothing_is_recorded_of_other_updates(steps, done):
    found = profiler.recorded(updates(done, 6), steps, done, CPU, lambda *given: pytest.fail("written"))
    assert [update.step for update in found] == list(range(done + 1, 7))


def test_a_run_that_is_stopped_leaves_what_there_is():
    written = []
    found = profiler.recorded(updates(0, 9), [2, 8], 0, CPU, lambda _, begin, finish: written.append((begin, finish)))
    assert [next(found).step for _ in range(4)] == [1, 2, 3, 4]
    found.close()
    assert written == [(2, 4)]


def test_an_error_of_an_update_is_the_one_that_is_raised():
    def failing():
        yield from updates(0, 3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(profiler.recorded(failing(), [2, 8], 0, CPU, lambda *given: None))
    with torch.profiler.profile():
        """It was ended, so that another may begin."""


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("profile=steps 10..15", [10, 15]),
        ("profile=10..15", [10, 15]),
        ("profile=step 4", [4, 4]),
        ("profile=none", None),
    ],
)
def test_the_short_way_to_name_them(given, steps):
    assert config.load("quickstart", [given]).config.profiler.steps == steps


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["profile=some"], "write the updates as in profile='steps 10..15', got 'some'"),
        (["profiler.steps=[5, 2]"], "the first and the last update"),
        (["profiler.ranks=all"], "no effect while profiler.steps is null"),
        (["profiler.steps=[1, 2]", "profiler.ranks=all", "output_dir=s3://bucket/runs"], "only rank 0 writes into an"),
    ],
)
def test_what_cannot_be_recorded_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        config.load("quickstart", given)


@pytest.mark.long
def test_a_run_that_is_recorded_learns_the_same(tmp_path, capsys):
    assert tiny_runs.train(tmp_path / "plain") == errors.DONE
    assert tiny_runs.train(tmp_path / "seen", "profile=steps 2..4", "profiler.ranks=all") == errors.DONE
    run = tmp_path / "seen" / "tiny"
    assert f"profile of updates 2 to 4: {run}/profile/steps-2-4-rank0.json.gz" in capsys.readouterr().out
    assert "aten::convolution" in names(run / "profile" / "steps-2-4-rank0.json.gz")
    tiny_runs.assert_equal(run, tiny_runs.outcome(tmp_path / "plain" / "tiny"))
