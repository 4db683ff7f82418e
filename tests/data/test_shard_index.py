"""Indexes of a data set: found beside a shard or in the cache, made where they are missing, joined to one."""

import errno
import fcntl
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from daguerre.data.index import cache
from daguerre.data.index import file as index_file
from daguerre.data.index.file import About, ShardIndex
from daguerre.errors import UserError
from daguerre.storage.location import Location


@dataclass(frozen=True)
class Lines:
    """Indexes files of one number a line."""

    calls: Path | None = None

    def __call__(self, place: Location) -> ShardIndex:
        if self.calls:
            with self.calls.open("a") as file:
                file.write(f"{place.local.name}\n")
        numbers = [int(line) for line in place.local.read_text().split()]
        digest = index_file.file_digest(place.local)
        rows = [{"n": n, **({"even": "yes"} if n % 2 == 0 else {}), **({"odd": n} if n % 2 else {})} for n in numbers]
        columns, fields, not_kept = index_file.metadata_columns(rows)
        table = {
            "id": index_file.sample_ids(digest, np.arange(len(numbers))),
            "height": np.array(numbers, np.int32),
            "width": np.array(numbers, np.int32),
            "digest": np.array(numbers, np.uint64),
            **columns,
            **index_file.caption_columns([{"odd"} if n % 2 else {"even"} for n in numbers]),
        }
        size = place.local.stat().st_size
        return ShardIndex(pa.table(table), About("lines", place.name, size, digest, fields=fields, not_kept=not_kept))


@pytest.fixture
def files(tmp_path):
    def write(*numbers: tuple[int, ...]) -> list[Location]:
        places = []
        for number, lines in enumerate(numbers):
            path = tmp_path / f"{number}.lines"
            path.write_text("".join(f"{n}\n" for n in lines))
            places.append(Location(str(path)))
        return places

    return write


def test_indexes_are_made_once(files, tmp_path):
    places, build = files((1, 2), (3,), ()), Lines(tmp_path / "calls")
    paths = cache.indexes(places, "lines", build, tmp_path / "cache")
    assert cache.indexes(places, "lines", build, tmp_path / "cache") == paths
    assert sorted((tmp_path / "calls").read_text().split()) == ["0.lines", "1.lines", "2.lines"]
    assert all(path.parent == tmp_path / "cache" / "indexes" for path in paths)
    assert [index_file.load(path).about.shard for path in paths] == [place.name for place in places]


@pytest.mark.long  # of the quick tests, test_crew.py
def test_many_are_made_in_processes(files, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_LITTLE_BYTES", 0)
    monkeypatch.setattr(cache.job_pool, "usual_processes", lambda: 2)
    places = files(*((n, n + 100) for n in range(6)))
    paths = cache.indexes(places, "lines", Lines(), tmp_path / "cache")
    assert cache.combined(paths).heights_px.tolist() == [m for n in range(6) for m in (n, n + 100)]


def test_one_beside_the_shard_comes_first(files, tmp_path):
    places, build = files((1, 2), (3,)), Lines(tmp_path / "calls")
    beside = tmp_path / "0.lines.index"
    index_file.save(Lines()(places[0]), beside)
    paths = cache.indexes(places, "lines", build, tmp_path / "cache")
    assert paths[0] == beside
    assert (tmp_path / "calls").read_text().split() == ["1.lines"]
    assert cache.found(places[0], "lines", tmp_path / "cache") == beside
    assert cache.found(places[1], "other", tmp_path / "cache") is None


def test_one_of_another_kind_or_a_damaged_one_is_made_again(files, tmp_path):
    places, build = files((1, 2), (3,)), Lines(tmp_path / "calls")
    paths = cache.indexes(places, "lines", build, tmp_path / "cache")
    (tmp_path / "0.lines.index").write_bytes(paths[0].read_bytes()[:-1])
    paths[0].write_bytes(paths[0].read_bytes()[5:])
    other = Lines()(places[1])
    index_file.save(ShardIndex(other.table, About("other", "x", 0, "00")), tmp_path / "1.lines.index")
    assert cache.indexes(places, "lines", build, tmp_path / "cache") == paths
    assert sorted((tmp_path / "calls").read_text().split()) == ["0.lines", "0.lines", "1.lines"]


def test_an_index_is_kept_for_a_shard_that_changed_and_the_change_is_said(files, tmp_path):
    places, build = files((1, 2), (3,)), Lines(tmp_path / "calls")
    paths = cache.indexes(places, "lines", build, tmp_path / "cache")
    assert cache.changed(places, paths) == {}
    places[0].local.write_text("1\n")
    assert cache.indexes(places, "lines", build, tmp_path / "cache") == paths
    (entry,) = cache.changed(places, paths).values()
    assert entry == {"count": 1, "examples": [f"{places[0].name} (4 bytes, now 2)"], "kept": True}


def test_a_process_waits_while_another_makes_indexes(files, tmp_path):
    places = files((1,))
    folder = tmp_path / "cache" / "indexes"
    folder.mkdir(parents=True)
    said, done = [], []
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(
            target=lambda: done.extend(
                cache.indexes(places, "lines", Lines(tmp_path / "calls"), tmp_path / "cache", said.append)
            )
        )
        thread.start()
        while not said:
            thread.join(0.01)
        assert "waiting for another process" in said[0]
        index_file.save(Lines()(places[0]), cache.home(places[0], "lines", tmp_path / "cache"))
    thread.join()
    assert len(done) == 1
    assert not (tmp_path / "calls").exists()  # the other had made it


def test_a_long_build_says_how_far_it_is(files, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_PROGRESS_SECONDS", 0.0)
    said = []
    cache.indexes(files((1, 2), (3,)), "lines", Lines(), tmp_path / "cache", said.append)
    assert said[-1].startswith("2 of 2 shards have their index here, 3 samples")


def test_a_cache_that_cannot_be_written_names_the_setting(files, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache_dir: .*is not writable"):
        cache.indexes(files((1,)), "lines", Lines(), tmp_path / "cache")


def test_several_as_one(files, tmp_path):
    paths = cache.indexes(files((1, 2), (), (3, 5)), "lines", Lines(), tmp_path / "cache")
    index = cache.combined(paths)
    assert index.count == 4
    assert index.shard_starts.tolist() == [0, 2, 2, 4]
    assert (index.ids.dtype, index.heights_px.dtype, index.widths_px.tolist()) == (np.int64, np.int32, [1, 2, 3, 5])
    assert {name: column.to_pylist() for name, column in index.numbers.items()} == {
        "n": [1, 2, 3, 5],
        "odd": [1, None, 3, 5],
    }
    assert {name: column.to_pylist() for name, column in index.texts.items()} == {"even": [None, "yes", None, None]}
    assert index.captioned["even"].to_pylist() == [False, True, False, False]
    with pytest.raises(KeyError):
        index.numbers["even"]


def test_none_at_all():
    index = cache.combined([])
    assert (index.count, index.shard_starts.tolist(), list(index.numbers)) == (0, [0], [])


def test_what_one_shard_could_not_keep_is_kept_of_none(tmp_path):
    """Otherwise a filter would take a text that is too long for one that is missing."""
    paths = []
    for number, text in enumerate(("short", "long" * 40)):
        columns, fields, not_kept = index_file.metadata_columns([{"text": text, "n": 1}])
        digest = f"{number:032x}"
        table = {"id": [number], "height": [1], "width": [1], "digest": [1], **columns}
        paths.append(tmp_path / f"{number}.index")
        about = About("kind", "x", 1, digest, fields=fields, not_kept=not_kept)
        index_file.save(ShardIndex(pa.table(table), about), paths[-1])
    index = cache.combined(paths)
    assert (list(index.texts), list(index.numbers)) == ([], ["n"])
    assert index.captioned == {}  # these do not say


def test_damage_is_part_of_what_was_left_out(tmp_path):
    paths = []
    for number, damage in enumerate([((512, 2048), (9000, 9000)), ((0, 5),)]):
        left_out = {"broken image": {"count": 2, "examples": ["x"], "kept": False}}
        table = {"id": [number], "height": [1], "width": [1], "digest": [1]}
        paths.append(tmp_path / f"{number}.index")
        about = About("kind", f"{number}.tar", 1, "00", left_out=left_out, damage=damage)
        index_file.save(ShardIndex(pa.table(table), about), paths[-1])
    report = cache.left_out(paths)
    assert report["broken image"]["count"] == 4
    assert report[cache.DAMAGED] == {
        "count": 3,
        "examples": ["0.tar: bytes 512 to 2,048", "0.tar: cut off at byte 9,000", "1.tar: bytes 0 to 5"],
        "kept": False,
    }
    assert report == cache.skipped.merged(*(cache.found_in(index_file.load(path).about) for path in paths))


def test_damage_that_shows_later_says_what_to_do(files, tmp_path):
    places = files((1, 2), (3,))
    paths = cache.indexes(places, "lines", Lines(), tmp_path / "cache")
    data = bytearray(paths[1].read_bytes())
    at = data.index(index_file.load(paths[1]).numpy("id").tobytes())
    data[at] ^= 1
    paths[1].write_bytes(data)
    assert cache.indexes(places, "lines", Lines(), tmp_path / "cache") == paths  # columns are not read yet
    with pytest.raises(UserError, match=r"this index is damaged \(column id\): delete it"):
        cache.combined(paths)


def test_a_file_system_without_locks(files, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = []
    paths = cache.indexes(files((1,)), "lines", Lines(), tmp_path / "cache", said.append)
    assert paths[0].exists()
    assert "does not support locks (No locks available)" in said[0]


def test_a_name_that_is_not_utf_8_has_a_home(tmp_path):
    homes = {cache.home(Location(f"/data/\udc80{name}.tar"), "lines", tmp_path) for name in "ab"}
    assert len(homes) == 2
