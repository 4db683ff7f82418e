"""A disk that refuses to be written: the run goes on, says so and tries again; too often in a row, it stops with what
it had.
"""

from __future__ import annotations

import errno
import json
import os

import pytest
import tiny_runs

from daguerre.checkpoint.store import Store
from daguerre.training import step

SMALL = ["sampling.num_images=0", "validation.every=99 steps", "checkpoint.export=false", "data.checked_prompts=1"]


@pytest.fixture
def disk(monkeypatch):
    """Is full after the updates that are put in."""
    full: set[int] = set()
    fsync, update = os.fsync, step.update
    now = {"step": 0}

    def updated(state, *rest, **named):
        found = update(state, *rest, **named)
        now["step"] = state.step
        return found

    def refusing(descriptor):
        if now["step"] in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(step, "update", updated)
    monkeypatch.setattr(os, "fsync", refusing)
    return full


def checkpoints(folder):
    return Store(folder / "tiny" / "checkpoints")


@pytest.mark.long
def test_a_run_outlives_saves_that_fail(tmp_path, disk, capsys):
    assert tiny_runs.train(tmp_path / "calm", "checkpoint.background=false") == 0
    capsys.readouterr()
    disk.add(3)
    assert tiny_runs.train(tmp_path / "full", "checkpoint.background=false") == 0
    said = capsys.readouterr().out
    assert "SAVE FAILED (1 in a row, 1 in all): cannot save step-00000003" in said
    assert "exporting FAILED" in said
    assert "saving works again after 1 failed save" in said
    assert checkpoints(tmp_path / "full").names() == ["step-00000006", "step-00000008"]
    one, other = (checkpoints(tmp_path / name) for name in ("calm", "full"))
    expected, found = (store.load(store.root / "step-00000008").tensors for store in (one, other))
    for group, tensors in expected.items():
        assert all(tensor.equal(found[group][name]) for name, tensor in tensors.items()), group
    assert json.loads((tmp_path / "full" / "tiny" / "status.json").read_text())["state"] == "finished"


@pytest.mark.long
def test_too_many_failed_saves_in_a_row_stop_the_run_and_older_ones_stay(tmp_path, disk, capsys):
    disk |= {6, 8}
    code = tiny_runs.train(tmp_path, *SMALL, "checkpoint.max_failed_saves=2", "checkpoint.background=false")
    told = capsys.readouterr()
    assert code != 0
    assert "SAVE FAILED (1 in a row, 1 in all): cannot save step-00000006" in told.out
    assert "(2 saves in a row failed)" in told.err
    store = checkpoints(tmp_path)
    assert store.names() == ["step-00000003"]
    assert store.newest_verified().path == store.root / "step-00000003"

    disk.clear()
    assert tiny_runs.train(tmp_path, *SMALL) == 0, "the same command goes on once there is room"
    assert "continuing from step-00000003" in capsys.readouterr().out


@pytest.mark.long
def test_the_last_save_must_not_fail(tmp_path, disk, capsys):
    disk.add(8)
    assert tiny_runs.train(tmp_path) != 0
    assert "cannot save step-00000008" in capsys.readouterr().err
    assert json.loads((tmp_path / "tiny" / "status.json").read_text())["state"] != "finished"
