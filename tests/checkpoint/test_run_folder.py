"""One process a run folder, named to the second; the lock ends with its process; status.json is whole at any moment."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from daguerre import system
from daguerre.checkpoint import run_dir
from daguerre.checkpoint.run_dir import RunFolder, RunFolderError, RunFolderInUse, _Inside, lock_holder
from daguerre.errors import UserError

HOLD = """
import os, sys, time
from pathlib import Path
from daguerre.checkpoint.run_dir import RunFolder
with RunFolder(Path(sys.argv[1])).hold():
    if "fork" in sys.argv and os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
    else:
        os.write(1, b"held\\n")
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "new")


@pytest.fixture
def start(folder):
    """Start another process that holds the folder."""
    started = []

    def begin(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder.path), *arguments], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        lines = [process.stdout.readline().strip() for _ in range(1 + len(arguments))]
        return process, lines

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_holding_creates_the_folder_and_names_the_holder(folder):
    assert lock_holder(folder.path) is None
    with folder.hold() as held:
        assert held is folder
        holder = lock_holder(folder.path)
        assert holder.pid == os.getpid()
        assert holder.since
    assert lock_holder(folder.path) is None
    with folder.hold():
        pass


def test_a_second_process_is_refused_within_a_second_and_told_who_is_in(folder, start):
    process, _ = start()
    began = time.monotonic()
    with pytest.raises(RunFolderInUse, match=rf"in use by process {process.pid} on .+ \(since 2"), folder.hold():
        raise AssertionError("two processes hold the folder")
    assert time.monotonic() - began < 1
    assert lock_holder(folder.path).pid == process.pid


def test_the_same_process_cannot_hold_twice(folder):
    with folder.hold(), pytest.raises(RunFolderInUse), folder.hold():
        pass


def test_sigkill_releases_the_folder_even_with_a_forked_child_alive(folder, start):
    process, lines = start("fork")
    child = next(int(line) for line in lines if line.isdigit())
    process.kill()
    process.wait()
    try:
        os.kill(child, 0)
        assert lock_holder(folder.path) is None
        with folder.hold():
            assert lock_holder(folder.path).pid == os.getpid()
    finally:
        os.kill(child, signal.SIGKILL)


def test_asking_does_not_disturb_who_comes(folder, monkeypatch):
    with folder.hold():
        pass
    asker = os.open(folder.lock, os.O_RDONLY)
    assert system.try_lock(asker, shared=True)
    waits = []
    monkeypatch.setattr(run_dir.time, "sleep", lambda seconds: (waits.append(seconds), os.close(asker)))
    with folder.hold():
        assert len(waits) == 1


def test_an_error_inside_passes_and_releases(folder):
    with pytest.raises(KeyError), folder.hold():
        raise KeyError
    assert lock_holder(folder.path) is None


def test_a_path_under_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match=r"cannot write to .*file/run: .*Choose an output_dir"):
        RunFolder(tmp_path / "file" / "run").hold().__enter__()
    assert lock_holder(tmp_path / "file" / "run") is None


UNWRITABLE = """
import os, sys
from pathlib import Path
from daguerre.checkpoint.run_dir import RunFolder
if os.getuid() == 0:
    os.setuid(65534)
try:
    RunFolder(Path(sys.argv[1])).hold().__enter__()
except ValueError as error:
    print(error)
"""


def test_a_folder_without_permission_is_told(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", UNWRITABLE, str(closed / "run")], capture_output=True, text=True, check=True
    )
    assert f"cannot write to {closed / 'run'}: Permission denied. Choose an output_dir" in done.stdout


def test_status_is_replaced_whole(folder, monkeypatch):
    assert folder.read_status() is None
    with folder.hold():
        folder.write_status("running", step=0, samples=0, total_steps=100)
        folder.write_status("failed", step=3, samples=96, total_steps=100, reason="a file named \udcff, ä")
        status = folder.read_status()
        assert status.pop("updated").startswith("2")
        assert status.pop("host")
        assert status == {
            "state": "failed",
            "reason": "a file named \udcff, ä",
            "step": 3,
            "samples": 96,
            "total_steps": 100,
            "pid": os.getpid(),
        }
        before = folder.status.read_bytes()

        def full(source, target):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(RunFolderError, match=r"No space left on device\. Free some space"):
            folder.write_status("saved", step=4, samples=128)
        assert folder.status.read_bytes() == before
        assert {path.name for path in folder.path.iterdir()} == {".lock", "status.json"}


def test_asking_needs_no_torch(folder):
    code = "import sys, daguerre.checkpoint.run_dir; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_everything_lies_inside(folder):
    paths = [getattr(folder, name) for name, value in vars(RunFolder).items() if isinstance(value, _Inside)]
    assert len(set(paths)) == len(paths) >= 11
    assert all(path.is_relative_to(folder.path) for path in paths)


def test_a_lock_text_that_is_no_json_is_no_obstacle(folder):
    folder.path.mkdir(parents=True)
    folder.lock.write_text("junk")
    with folder.hold():
        assert json.loads(folder.lock.read_text())["pid"] == os.getpid()
    assert issubclass(RunFolderInUse, UserError)
