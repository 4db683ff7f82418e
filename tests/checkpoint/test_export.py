"""A folder is replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from daguerre.checkpoint import export
from daguerre.checkpoint.export import replaced


def write(folder: Path, text: str) -> None:
    with replaced(folder) as fresh:
        (fresh / "sub").mkdir()
        (fresh / "sub" / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_and_its_replacement(tmp_path):
    folder = tmp_path / "deep" / "pipeline"
    for text in ("one", "two"):
        write(folder, text)
        assert (folder / "sub" / "file").read_text() == text
        assert names(folder.parent) == ["pipeline"]


def test_files_get_the_usual_permissions(tmp_path):
    with replaced(tmp_path / "pipeline") as fresh:
        private = fresh / "file"
        private.touch(0o600)
    usual = tmp_path / "usual"
    usual.touch()
    assert (tmp_path / "pipeline" / "file").stat().st_mode == usual.stat().st_mode


def test_an_error_leaves_the_old_content(tmp_path):
    folder = tmp_path / "pipeline"
    write(folder, "one")
    with pytest.raises(FileNotFoundError), replaced(folder) as fresh:
        (fresh / "missing" / "file").touch()
    assert (folder / "sub" / "file").read_text() == "one"
    assert names(tmp_path) == ["pipeline"]


def test_a_disk_that_refuses_weights_is_an_error_of_the_system(tmp_path):
    folder = tmp_path / "pipeline"
    with pytest.raises(FileNotFoundError) as refused, replaced(folder) as fresh:
        save_file({"weight": torch.zeros(2)}, fresh / "missing" / "model.safetensors")
    assert refused.value.filename == str(folder)
    assert names(tmp_path) == []


class Killed(BaseException):
    """Stands for SIGKILL: nothing is tidied after it."""


@pytest.mark.parametrize("killed_at", [0, 1, 2])
def test_a_kill_around_any_rename_leaves_one_of_both_whole(tmp_path, monkeypatch, killed_at):
    """Without renameat2; the next export finds a whole folder and clears the rest."""
    folder = tmp_path / "pipeline"
    write(folder, "one")
    left = [killed_at]

    def rename(source: Path, target: Path, really=os.rename) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        really(source, target)

    def no_tidying(path: Path, ignore_errors: bool = False) -> None:
        if left[0] == 0 and not ignore_errors:
            raise Killed

    monkeypatch.setattr(export, "_exchange", lambda one, other: False)
    with monkeypatch.context() as dying:
        dying.setattr(export.os, "rename", rename)
        dying.setattr(export.shutil, "rmtree", no_tidying)
        with pytest.raises(Killed):
            write(folder, "two")
    assert len(names(tmp_path)) == 2
    seen = []
    with replaced(folder) as fresh:
        seen.append((folder / "sub" / "file").read_text())
        (fresh / "file").touch()
    assert seen == ["two" if killed_at == 2 else "one"]
    assert names(tmp_path) == ["pipeline"]
    assert names(folder) == ["file"]
