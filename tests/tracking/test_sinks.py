"""metrics.jsonl round-trips, survives a kill at any byte, and is cut to the checkpoint."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daguerre.tracking import sinks


def write_steps(path: Path, steps: range) -> None:
    file = sinks.MetricsFile(path)
    for step in steps:
        file.write(step, step * 32, {"learning/loss": 1 / step, "learning/nonfinite_steps": 0})
    file.close()


@given(st.lists(st.floats(), min_size=1, max_size=8))
def test_floats_round_trip_to_the_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    file = sinks.MetricsFile(path)
    file.write(7, 224, {f"v{i}": value for i, value in enumerate(values)})
    file.close()
    [line] = sinks.read_metrics(path)
    assert (line["step"], line["samples"]) == (7, 224)
    for i, value in enumerate(values):
        read = line[f"v{i}"]
        assert math.isnan(read) if math.isnan(value) else np.float64(read).tobytes() == np.float64(value).tobytes()


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "metrics.jsonl"
    file = sinks.MetricsFile(path)
    file.write(1, 32, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": np.float32(0.1), "n": 3})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    line = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)  # on disk before the file is closed
    file.close()
    assert (line["a"], line["b"], line["c"]) == ("nan", "inf", "-inf")
    assert line["d"] == float(np.float32(0.1))
    assert isinstance(line["n"], int)
    assert line["time"].endswith("+00:00")


def test_numbers_stand_in_one_order_whoever_gives_them(tmp_path: Path) -> None:
    """Sums that come from a checkpoint stand in its order, others in that in which they were first added."""
    path = tmp_path / "metrics.jsonl"
    file = sinks.MetricsFile(path)
    file.write(1, 32, {"perf/b": 1, "learning/loss": 2, "learning/gradient_norm": 3})
    file.write(2, 64, {"learning/gradient_norm": 3, "learning/loss": 2, "perf/b": 1})
    file.close()
    first, second = (list(json.loads(line)) for line in path.read_text().splitlines())
    assert first == second == ["step", "samples", "time", "learning/gradient_norm", "learning/loss", "perf/b"]


def test_cut_leaves_the_steps_up_to_the_checkpoint(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    write_steps(whole, range(1, 11))
    assert sinks.truncate_after(whole, 6) == 4
    write_steps(part, range(1, 7))
    assert [line["step"] for line in sinks.read_metrics(whole)] == [1, 2, 3, 4, 5, 6]
    assert sinks.truncate_after(whole, 6) == 0
    write_steps(whole, range(7, 11))
    assert [line["step"] for line in sinks.read_metrics(whole)] == list(range(1, 11))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part.jsonl", "whole.jsonl"]


def test_without_a_checkpoint_every_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert sinks.truncate_after(path, -1) == 0
    assert not path.exists()
    file = sinks.MetricsFile(path)
    file.write(0, 0, {"validation/loss": 1.0})
    file.close()
    assert sinks.truncate_after(path, -1) == 1
    assert path.read_bytes() == b""


def test_a_kill_at_any_byte_of_the_last_line_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    content = path.read_bytes()
    start_of_last = content.rstrip(b"\n").rindex(b"\n") + 1
    for length in range(start_of_last, len(content)):
        path.write_bytes(content[:length])
        assert [line["step"] for line in sinks.read_metrics(path)] == [1, 2]
        assert sinks.truncate_after(path, 3) == (length > start_of_last)
        assert path.read_bytes() == content[:start_of_last]


def test_a_torn_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "sam')
    with pytest.raises(AssertionError, match="cut_after"):
        sinks.MetricsFile(path)


@pytest.mark.parametrize("damage", [b"garbage\n", b"\xff\xfe\n", b"[1, 2]\n", b'{"step": "1", "samples": 2}\n'])
def test_a_damaged_line_inside_is_an_error_that_names_it(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 3))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + second)
    for read in (sinks.read_metrics, lambda p: sinks.truncate_after(p, 1)):
        with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not a line of metrics"):
            read(path)
    assert path.read_bytes() == first + damage + second


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    file = sinks.MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(AssertionError, match="no names for metrics"):
        file.write(1, 32, {"samples": 3.0})
    file.close()


def test_importing_the_sinks_is_light() -> None:
    code = (
        "import sys, daguerre.tracking.sinks, daguerre.tracking.console; "
        "print([m for m in ('torch', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
