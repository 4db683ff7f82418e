"""Far shards on the local disk: fetched once, bounded, shared by processes, never half a file."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash
from faulty_store import Faults, environment, s3, web_server  # noqa: F401

from daguerre.errors import UserError
from daguerre.storage import download, file_cache
from daguerre.storage import io as storage_io
from daguerre.storage.file_cache import ShardCache, default_folder
from daguerre.storage.location import Location

SHARD_BYTES = 50_000


def content(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(SHARD_BYTES)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


@pytest.fixture
def shards(s3, monkeypatch):  # noqa: F811
    """Six of them."""
    monkeypatch.setattr(download, "PART_BYTES", 10_000)
    return [s3.put(f"{i}.tar", content(i)) for i in range(6)]


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", 10 * SHARD_BYTES)


def kept(cache: ShardCache) -> list[Path]:
    return sorted(cache.folder.glob("shards/*/*"))


def parts(cache: ShardCache) -> list[Path]:
    return sorted(cache.folder.glob("parts/*"))


def held(cache: ShardCache, shards: list[Location]) -> set[int]:
    return {number for number, place in enumerate(shards) if cache.holds(place)}


def test_a_shard_is_fetched_once(s3, shards, cache):  # noqa: F811
    assert not cache.holds(shards[0])
    path = cache.path(shards[0], digest(content(0)))
    assert path.read_bytes() == content(0)
    assert cache.holds(shards[0])
    asked = len(s3.proxy.seen)
    assert cache.path(shards[0], digest(content(0))) == path
    assert cache.read(shards[0], 100, 50, digest(content(0))) == content(0)[100:150]
    assert len(s3.proxy.seen) == asked
    assert s3.proxy.body_bytes == SHARD_BYTES
    assert kept(cache) == [path]
    assert parts(cache) == []


def test_a_local_file_is_where_it_is(tmp_path, cache):
    (tmp_path / "x.tar").write_bytes(b"0123456789")
    place = Location(str(tmp_path / "x.tar"))
    assert cache.path(place) == tmp_path / "x.tar"
    assert cache.holds(place)
    assert cache.read(place, 2, 3) == b"234"
    assert not cache.folder.exists()


def test_a_cache_travels_to_workers(cache):
    assert pickle.loads(pickle.dumps(cache)) == cache  # noqa: S301


def test_the_least_recently_used_goes_first(shards, tmp_path):
    cache = ShardCache(tmp_path, 3 * SHARD_BYTES)
    known = [digest(content(i)) for i in range(6)]
    for number in (0, 1, 2):
        cache.path(shards[number], known[number])
        time.sleep(0.01)  # times of use are told apart
    cache.path(shards[0], known[0])
    time.sleep(0.01)
    cache.path(shards[3], known[3])
    assert held(cache, shards) == {0, 2, 3}
    cache.path(shards[4], known[4])
    assert held(cache, shards) == {0, 3, 4}
    assert sum(path.stat().st_size for path in kept(cache)) == 3 * SHARD_BYTES


def test_a_lower_limit_counts_from_the_next_fetch_on(shards, cache):
    for place in shards[:5]:
        cache.path(place)
    lower = ShardCache(cache.folder, 2 * SHARD_BYTES)
    lower.path(shards[5])
    assert len(kept(lower)) == 2
    assert lower.holds(shards[5])


def test_a_shard_that_does_not_fit_at_all(s3, shards, tmp_path):  # noqa: F811
    cache = ShardCache(tmp_path, SHARD_BYTES - 1)
    with pytest.raises(
        UserError, match=r"^data\.cache_gb: s3://bucket/0\.tar has 5e-05 GB, more than the 5e-05 GB .* raise"
    ):
        cache.path(shards[0])
    assert s3.proxy.body_bytes == 0


def test_other_bytes_than_expected_come_all_the_same(s3, shards, cache):  # noqa: F811
    expected = digest(content(99))
    assert cache.path(shards[0], expected).read_bytes() == content(0)
    asked = len(s3.proxy.seen)
    for _ in range(5):
        assert cache.path(shards[0], expected).read_bytes() == content(0)
    assert len(s3.proxy.seen) - asked <= 2  # whether the store still holds them; the minute may end in between
    assert cache.path(shards[0], digest(content(0))).read_bytes() == content(0)
    assert len(kept(cache)) == 1


def test_a_shard_that_changed_in_the_store_replaces_the_copy(s3, shards, cache):  # noqa: F811
    cache.path(shards[0])
    s3.put("0.tar", content(50))
    assert cache.path(shards[0], digest(content(0))).read_bytes() == content(0)  # that copy is what was asked for
    assert cache.path(shards[0], digest(content(50))).read_bytes() == content(50)
    s3.put("0.tar", content(51))
    assert cache.path(shards[0]).read_bytes() == content(51)
    assert len(kept(cache)) == 1


def test_a_copy_that_is_removed_before_it_is_read_comes_again(shards, cache, monkeypatch):
    found, removed = ShardCache.path, []

    def stolen(self, place, known=None):
        path = found(self, place, known)
        if len(removed) < 3:
            removed.append(path)
            path.unlink()
        return path

    monkeypatch.setattr(ShardCache, "path", stolen)
    assert cache.read(shards[0], 0, 10, digest(content(0))) == content(0)[:10]
    removed.clear()
    monkeypatch.setattr(file_cache, "_OPENINGS", 3)
    with pytest.raises(
        storage_io.Transient,
        match=r"^data\.cache_gb: .*was removed .* several times before it could be read: raise data\.cache_gb",
    ):
        cache.read(shards[1], 0, 10, digest(content(1)))


def test_so_does_one_that_is_opened_by_its_path(tmp_path, monkeypatch):
    """As indexes are made: other processes fetch into the same cache while a copy is read through."""
    cache, place, tried = ShardCache(tmp_path, 100), Location("s3://bucket/0.tar"), []

    def fetched(self, location, digest=None):
        (self.folder / "copy").write_bytes(b"whole")
        return self.folder / "copy"

    def opened(path):
        tried.append(path)
        if len(tried) < 3:
            path.unlink()
        return path.read_bytes()

    monkeypatch.setattr(ShardCache, "path", fetched)
    assert cache.using(place, opened) == b"whole"
    monkeypatch.setattr(file_cache, "_OPENINGS", 2)
    tried.clear()
    with pytest.raises(storage_io.Transient, match=r"several times before it could be read: raise data\.cache_gb"):
        cache.using(place, opened)
    with pytest.raises(FileNotFoundError, match="elsewhere"):  # that is not the copy
        cache.using(place, lambda path: Path("elsewhere").read_bytes())


def test_a_file_that_is_nowhere_is_missing(cache, shards, tmp_path):
    with pytest.raises(storage_io.Missing, match=r"^data\.path: s3://bucket/nope\.tar does not exist"):
        cache.read(Location("s3://bucket/nope.tar"), 0, 10)
    with pytest.raises(FileNotFoundError):
        cache.read(Location(str(tmp_path / "nope.tar")), 0, 10)


def test_a_copy_that_rots_is_told_from_a_shard_that_is_damaged(s3, shards, cache):  # noqa: F811
    known = digest(content(0))
    path = cache.path(shards[0], known)
    path.write_bytes(content(1))
    assert cache.read(shards[0], 0, 100, known, lambda data: data == content(0)[:100]) == content(0)[:100]
    with pytest.raises(storage_io.Mismatch, match=r"^data\.path: s3://bucket/0\.tar has other bytes") as found:
        cache.read(shards[0], 0, 100, known, lambda data: False)
    assert found.value.data == content(0)[:100]
    assert s3.proxy.body_bytes == 2 * SHARD_BYTES


def test_a_removed_copy_that_was_open_is_not_read_on(shards, cache):
    known = digest(content(0))
    assert cache.read(shards[0], 0, 10, known) == content(0)[:10]
    kept(cache)[0].unlink()
    assert cache.read(shards[0], 10, 10, known) == content(0)[10:20]
    assert cache.holds(shards[0])


def test_what_a_power_cut_hurt_is_fetched_again(s3, shards, cache, monkeypatch):  # noqa: F811
    known = digest(content(0))
    path = cache.path(shards[0], known)
    cache.path(shards[1])
    started = time.time() + 1
    monkeypatch.setattr(file_cache.time, "clock_gettime", lambda _: time.time() - started)  # the machine starts now
    path.write_bytes(bytes(SHARD_BYTES))
    before = s3.proxy.body_bytes
    assert cache.path(shards[0], known).read_bytes() == content(0)
    assert s3.proxy.body_bytes - before == SHARD_BYTES
    assert cache.path(shards[1], digest(content(1))).read_bytes() == content(1)
    assert s3.proxy.body_bytes - before == SHARD_BYTES


def test_a_full_disk_names_the_setting(shards, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.os, "pwrite", full)
    with pytest.raises(
        UserError, match=r"^data\.cache_dir: the disk of .* is full: choose another folder, or lower data\.cache_gb"
    ):
        cache.path(shards[0])
    assert parts(cache) == kept(cache) == []


def test_a_folder_that_cannot_be_made(shards, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"^data\.cache_dir: .*file/cache' cannot be used \(Not a directory\)"):
        ShardCache(tmp_path / "file" / "cache", 10**9).path(shards[0])


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "daguerre"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "daguerre"


def test_a_store_that_fails_leaves_nothing(s3, shards, cache):  # noqa: F811
    s3.proxy.faults = Faults(1.0, ("error",))
    with pytest.raises(storage_io.StoreError, match=r"0\.tar cannot be read: the server repeatedly answered HTTP 50"):
        cache.path(shards[0])
    assert parts(cache) == kept(cache) == []
    s3.proxy.faults = Faults()
    assert cache.path(shards[0]).read_bytes() == content(0)


def test_a_web_server_without_ranges_is_read_from_the_copy(tmp_path, monkeypatch):
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "x.tar").write_bytes(content(0))
    cache = ShardCache(tmp_path / "cache", 10**9)
    with web_server(tmp_path / "www") as web, environment(monkeypatch):
        web.faults = Faults(0.3)
        place = Location(f"{web.url}/x.tar?X-Amz-Signature=s1gn")
        assert cache.read(place, 7, 9) == content(0)[7:16]
    assert "s1gn" not in str(kept(cache))


def test_threads_share_one_fetch(s3, shards, cache):  # noqa: F811
    with ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(lambda _: cache.path(shards[0], digest(content(0))), range(8)))
    assert len(paths) == 1
    assert s3.proxy.body_bytes == SHARD_BYTES


READER = """
import random, sys
import numpy as np
sys.path.insert(0, {tests!r})
from faulty_store import SHORT
from pathlib import Path
import xxhash
from daguerre.storage import download as fetching, clients as store_clients
from daguerre.storage.location import Location
from daguerre.storage.file_cache import ShardCache
store_clients.PATIENCE, fetching.PART_BYTES = SHORT, 10_000
cache, seed, rounds = ShardCache(Path({folder!r}), {limit}), int(sys.argv[1]), {rounds}
draw = random.Random(seed)
content = [np.random.default_rng(i).bytes({shard_bytes}) for i in range(6)]
for _ in range(rounds):
    i, start = draw.randrange(6), draw.randrange({shard_bytes} - 100)
    known = xxhash.xxh3_128_hexdigest(content[i])
    assert cache.read(Location(f"s3://bucket/{{i}}.tar"), start, 100, known) == content[i][start : start + 100]
    if rounds == 1:
        print("ready", flush=True)
"""


def reader(cache: ShardCache, rounds: int, seed: int) -> subprocess.Popen:
    script = READER.format(
        tests=str(Path(__file__).parent.parent / "data"),
        folder=str(cache.folder),
        limit=cache.limit_bytes,
        rounds=rounds,
        shard_bytes=SHARD_BYTES,
    )
    return subprocess.Popen([sys.executable, "-W", "error", "-c", script, str(seed)], stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen) -> str:
    return f"{process.communicate(timeout=120)[1]}{process.returncode}"


@pytest.mark.parametrize("share", [0.0, pytest.param(0.3, marks=pytest.mark.long)])
def test_processes_share_a_cache_with_room_for_all(s3, shards, cache, share):  # noqa: F811
    s3.proxy.faults = Faults(share)
    processes = [reader(cache, 40, seed) for seed in range(2)]
    assert [ended(process) for process in processes] == ["0"] * 2
    assert held(cache, shards) == set(range(6))
    assert parts(cache) == []
    if not share:
        assert s3.proxy.body_bytes == 6 * SHARD_BYTES  # each once, whoever came first


@pytest.mark.long
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_processes_share_a_cache_that_is_too_small(s3, shards, tmp_path, share):  # noqa: F811
    s3.proxy.faults = Faults(share)
    cache = ShardCache(tmp_path / "cache", int(2.5 * SHARD_BYTES))
    done, most = threading.Event(), []

    def watch() -> None:
        while not done.wait(0.002):
            most.append(len(kept(cache)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    processes = [reader(cache, 25, seed) for seed in range(3)]
    endings = [ended(process) for process in processes]
    done.set()
    watcher.join()
    assert endings == ["0"] * 3
    assert max(most) <= 3  # a listing is no snapshot: it may see a copy and the one that replaced it
    assert len(kept(cache)) <= 2
    assert parts(cache) == []


@pytest.mark.long
def test_a_killed_fetch_leaves_nothing_that_is_taken_for_whole(s3, shards, cache):  # noqa: F811
    s3.proxy.faults = Faults(1.0, ("stall",), stall_seconds=60, methods=("GET",))
    process = reader(cache, 1, 0)
    deadline = time.monotonic() + 60
    while not parts(cache) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(parts(cache)) == 1
    assert parts(cache)[0].stat().st_size == SHARD_BYTES
    assert held(cache, shards) == set()
    s3.proxy.faults = Faults()
    for number, place in enumerate(shards):
        assert cache.path(place).read_bytes() == content(number)
    assert parts(cache) == []
    assert len(kept(cache)) == 6


def test_names_that_are_no_text_have_a_place(cache):
    assert not cache.holds(Location(f"s3://bucket/{os.fsdecode(bytes([0xE9]))}"))
