"""A save, a purge or a replacement that dies at any moment leaves the old checkpoints or the new one, complete.

In the quick tests a process dies before each of its calls to the file system in turn (half a write included); the long
test kills a real process with SIGKILL at each system call. Full disks are real ones where the system lets us.
"""

import ctypes
import errno
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tiny_checkpoints import same, save
from whole_store import WholeStore

from daguerre.checkpoint import atomic, manifest
from daguerre.checkpoint.manifest import CheckpointError
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.checkpoint.run_dir import RunFolder, RunFolderError

HERE = Path(__file__).parent


class Died(BaseException):
    """Stands for SIGKILL: nothing but the test catches it."""


class Death:
    """Lets `after` calls to the file system pass; then every call dies, as in a process that is no more."""

    def __init__(self, after):
        self.left = after

    def call(self, function):
        def dying(*arguments, **options):
            self.step()
            return function(*arguments, **options)

        return dying

    def step(self):
        self.left -= 1
        if self.left < 0:
            raise Died

    def open(self, path, mode):
        self.step()
        return DyingFile(self, path, mode)


class DyingFile:
    """A file whose writes are calls, the last of which is done by half."""

    def __init__(self, death, path, mode):
        self.death, self.file = death, open(path, mode, buffering=0)  # noqa: SIM115 (it is the context)
        self.fileno, self.flush = self.file.fileno, self.file.flush

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, chunk):
        if self.death.left <= 0:
            self.file.write(memoryview(chunk)[: len(chunk) // 2])
        self.death.step()
        return self.file.write(chunk)


def dies(monkeypatch, after, action):
    """Run an action in a process that dies after so many calls; whether it died."""
    death = Death(after)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "open", death.open, raising=False)
        for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, death.call(getattr(os, name)))
        try:
            action()
        except Died:
            return True
    return False


def deaths(monkeypatch, tmp_path, prepare, action):
    """A fresh store for each moment at which the action can die, and the moment's number."""
    for after in range(1000):
        store = WholeStore(tmp_path / str(after) / "checkpoints")
        prepare(store)
        died = dies(monkeypatch, after, lambda store=store: action(store))
        yield WholeStore(store.root)
        shutil.rmtree(store.root)
        if not died:
            assert after > 10, "the calls are not seen"
            return


def sound(store):
    """Every checkpoint that exists has to be whole; their numbers."""
    for name in store.names():
        manifest.verify(store.root / name)
    return [int(name[-8:]) for name in store.names()]


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch):
    """The deaths are of processes, not of machines: fsync may do nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_save_that_dies_leaves_the_old_or_the_new(monkeypatch, tmp_path):
    def prepare(store):
        save(store, 1)
        save(store, 2)

    seen = set()
    for store in deaths(monkeypatch, tmp_path, prepare, lambda store: save(store, 3)):
        assert sound(store) in ([1, 2], [1, 2, 3])
        found = store.recover()
        assert found.path is not None
        number = int(found.path.name[-8:])
        assert same(store.load(found.path), number)
        assert not list(store.root.glob(".*")), "nothing of the dead process is left"
        seen.add(number)
        save(store, 3)
    assert seen == {2, 3}


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_first_save_that_dies_leaves_none_or_a_whole_one(monkeypatch, tmp_path):
    seen = set()
    for store in deaths(monkeypatch, tmp_path, lambda store: store.root.parent.mkdir(), lambda store: save(store, 1)):
        path = store.recover().path
        assert path is None or same(store.load(path), 1)
        seen.add(path is None)
        store.root.mkdir(exist_ok=True)
    assert seen == {True, False}


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_replacement_that_dies_leaves_the_old_or_the_new(monkeypatch, tmp_path):
    def prepare(store):
        save(store, 1)
        save(store, 2)

    seen = set()
    for store in deaths(monkeypatch, tmp_path, prepare, lambda store: save(store, 2, value=9)):
        found = store.recover()
        assert found.path is not None
        assert found.path.name == "step-00000002"
        seen.add(next(value for value in (2, 9) if same(store.load(found.path), value)))
        assert sound(store) == [1, 2]
        assert not list(store.root.glob(".*"))
    assert seen == {2, 9}


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_purge_that_dies_keeps_the_newest(monkeypatch, tmp_path):
    def prepare(store):
        for number in range(4):
            save(store, number)

    for store in deaths(monkeypatch, tmp_path, prepare, lambda store: store.purge(RetentionPolicy(2))):
        assert sound(store)[-2:] == [2, 3]
        assert same(store.load(store.recover().path), 3)
        store.purge(RetentionPolicy(2))
        assert sorted(path.name for path in store.root.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_recovery_that_dies_can_be_repeated(monkeypatch, tmp_path):
    def prepare(store):
        for number in (1, 2, 3):
            save(store, number)
        (store.root / "step-00000003" / "state.json").write_text("{}")
        (store.root / "step-00000002").rename(store.root / ".replaced-step-00000002")
        shutil.copytree(store.root / "step-00000001", store.root / ".tmp-step-00000004-x")

    for store in deaths(monkeypatch, tmp_path, prepare, lambda store: WholeStore(store.root).recover()):
        found = store.recover()
        assert found.path is not None
        assert same(store.load(found.path), 2)
        assert (store.root / "quarantine" / "step-00000003").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_every_call_that_the_disk_refuses_is_told_and_undone(monkeypatch, tmp_path, number):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    store = WholeStore(tmp_path / "checkpoints")
    save(store, 1)
    for after in range(1000):
        count = [after]

        def refusing(function, count=count):
            def call(*arguments, **options):
                count[0] -= 1
                if count[0] == -1:
                    raise OSError(number, os.strerror(number))
                return function(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(atomic, "open", refusing(open), raising=False)
            for name in ("mkdir", "fsync", "rename"):
                patch.setattr(os, name, refusing(getattr(os, name)))
            try:
                save(store, 2)
                break
            except CheckpointError as error:
                message = str(error)
        assert message.startswith("cannot save step-00000002: ")
        assert os.strerror(number) in message
        assert not list(store.root.glob(".*"))
        assert sound(WholeStore(store.root)) in ([1], [1, 2])
        shutil.rmtree(store.root / "step-00000002", ignore_errors=True)
    assert after > 10


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here ({mounted.stderr.strip()})")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_told_and_loses_nothing(small_disk):
    folder = RunFolder(small_disk / "run")
    with folder.hold():
        store = WholeStore(folder.checkpoints)
        saved = [save(store, 1)]
        with pytest.raises(CheckpointError) as refused:  # noqa: PT012 (the disk fills up at some save)
            for number in range(2, 100):
                saved.append(save(store, number))
        message = str(refused.value)
        assert "No space left on device" in message
        assert "MB are free" in message
        assert f"the newest is {saved[-1].name}" in message
        assert "run the same command again" in message
        assert not list(store.root.glob(".*"))
        assert WholeStore(store.root).recover().path == saved[-1]
        store.purge(RetentionPolicy(2))
        assert same(store.load(save(store, 99)), 99)
        (small_disk / "filler").write_bytes(b"x" * os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize)
        with pytest.raises(RunFolderError, match="No space left on device"):
            folder.write_status("failed", step=1, samples=1)


def test_a_file_size_limit_is_told_and_loses_nothing(tmp_path):
    store = WholeStore(tmp_path / "c")
    save(store, 1)
    said, tell = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            save(store, 2)
        except ValueError as error:
            os.write(tell, str(error).encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(said) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    assert "File too large" in message
    assert ".safetensors" in message
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    assert same(store.load(store.root / "step-00000001"), 1)


SYSCALLS = ("openat", "write", "fsync", "rename", "mkdir", "unlinkat", "rmdir", "close")


def killed_at(syscall, count, root):
    """Fork a saver, attach strace to it, let it be killed on entering a system call for the `count`-th time."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER, any: strace is no parent of ours
        os.write(ready[1], b"r")
        os.read(go[0], 1)
        store = WholeStore(root)
        save(store, 3)
        save(store, 3, value=9)
        store.purge(RetentionPolicy(2))
        os._exit(0)
    os.read(ready[0], 1)
    strace = subprocess.Popen(
        ["strace", "-p", str(child), "-e", f"inject={syscall}:signal=SIGKILL:when={count}", "-o", "/dev/null"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "attached" in strace.stderr.readline()
    os.write(go[1], b"g")
    _, status = os.waitpid(child, 0)
    strace.wait()
    strace.stderr.close()
    for end in (*ready, *go):
        os.close(end)
    return os.WIFSIGNALED(status)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: apt-get install strace")
@pytest.mark.parametrize("syscall", SYSCALLS)
def test_sigkill_at_every_system_call(tmp_path, syscall):
    original = WholeStore(tmp_path / "original")
    save(original, 1)
    save(original, 2)
    for count in range(1, 1000):
        store = WholeStore(tmp_path / "checkpoints")
        shutil.copytree(original.root, store.root)
        killed = killed_at(syscall, count, store.root)
        assert set(sound(store)) >= {2}
        found = store.recover()
        assert found.path is not None
        assert any(same(store.load(found.path), value) for value in (2, 3, 9))
        assert len(sound(store)) >= 2
        assert not list(store.root.glob(".*"))
        shutil.rmtree(store.root)
        if not killed:
            break
    assert count > 1
