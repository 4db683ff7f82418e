"""Index files: what is kept, read back, and told from damage."""

import os
import random

import numpy as np
import pyarrow as pa
import pytest
from quick_cases import quick_where

from daguerre.data.index import file
from daguerre.data.index.file import FIELD_LIMIT, TEXT_LIMIT, About, BadIndex, ShardIndex


def made(count: int = 4, **about) -> ShardIndex:
    digest = "0123456789abcdef" * 2
    columns, fields, not_kept = file.metadata_columns([{"n": i, "s": f"text {i}"} for i in range(count)])
    table = {
        "id": file.sample_ids(digest, np.arange(count)),
        "height": np.arange(count, dtype=np.int32),
        "width": np.arange(count, dtype=np.int32) + 1,
        "digest": np.arange(count, dtype=np.uint64),
        **columns,
        **file.caption_columns([{"text"} if i % 2 else set() for i in range(count)]),
    }
    left_out = {"a reason": {"count": 2, "examples": ["x", "\udcff"], "kept": False}}
    about = {"left_out": left_out, "damage": ((3, 3), (512, 1024)), **about}
    return ShardIndex(
        pa.table(table), About("kind", "a.tar", 77, digest, "v", fields=fields, not_kept=not_kept, **about)
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    index = made()
    file.save(index, tmp_path / "deep" / "a.index")
    loaded = file.load(tmp_path / "deep" / "a.index")
    assert loaded.whole().equals(index.table)
    assert loaded.about == index.about
    assert not loaded.numpy("id").flags.owndata  # a view of the file
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.index"]
    assert (tmp_path / "deep" / "a.index").read_bytes() == file.encoded(index) == file.encoded(loaded)


def test_an_index_without_samples(tmp_path):
    file.save(made(0), tmp_path / "a.index")
    assert file.load(tmp_path / "a.index").table.num_rows == 0


def test_a_file_that_is_written_anew_is_loaded_anew(tmp_path):
    path = tmp_path / "a.index"
    for count in (1, 2, 3):
        file.save(made(count), path)
        assert file.load(path).table.num_rows == count


@pytest.mark.parametrize("seed", quick_where(lambda seed: seed < 50, range(200)))
def test_damage_is_told_unless_it_changes_nothing(seed, tmp_path):
    draw = random.Random(seed)
    data = bytearray(file.encoded(made()))
    at = draw.randrange(len(data))
    if seed % 3 == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif seed % 3 == 1:
        del data[at:]
    else:
        data[at : at + 64] = draw.randbytes(64)
    (tmp_path / "a.index").write_bytes(data)
    try:
        loaded = file.load(tmp_path / "a.index").whole()
    except BadIndex:
        return
    assert loaded.equals(made().table)  # it was in the bytes between columns


@pytest.mark.parametrize("data", [b"", b"x", b"ARROW1", bytes(100)])
def test_files_of_another_kind(data, tmp_path):
    (tmp_path / "a.index").write_bytes(data)
    with pytest.raises(BadIndex):
        file.load(tmp_path / "a.index")


def test_another_version_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "FORMAT", 99)
    file.save(made(), tmp_path / "a.index")
    monkeypatch.undo()
    with pytest.raises(BadIndex, match="format is 99"):
        file.load(tmp_path / "a.index")


def test_an_index_that_is_missing_is_an_error_of_the_disk(tmp_path):
    with pytest.raises(FileNotFoundError):
        file.load(tmp_path / "a.index")


def test_a_thousand_indexes_hold_no_files_open(tmp_path):

    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for number in range(50):
        file.save(made(3), tmp_path / f"{number}.index")
        kept.append(file.load(tmp_path / f"{number}.index"))
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(index.numpy("width").tolist() == [1, 2, 3] for index in kept)


def test_ids_hang_on_contents_and_row():
    first = file.sample_ids("00" * 16, np.arange(1000))
    assert len(set(first.tolist())) == 1000
    assert first.min() >= 0
    assert not set(first.tolist()) & set(file.sample_ids("01" + "00" * 15, np.arange(1000)).tolist())
    assert file.sample_ids("00" * 16, np.array([999])) == first[999]


def test_metadata_that_filters_can_use():
    rows = [
        {"n": 1, "b": True, "mixed": 1, "long": "x" * (TEXT_LIMIT + 1), "list": [1], "null": None, "big": 10**400},
        {"n": 2.5, "mixed": "one", "long": "short", "object": {}, "\ud800": "\ud800", "nan": float("nan")},
    ]
    columns, kept, not_kept = file.metadata_columns(rows)
    assert {name: column.to_pylist() for name, column in columns.items()} == {
        "n:b": [1.0, None],
        "n:big": [None, None],
        "n:mixed": [1.0, None],
        "n:n": [1.0, 2.5],
        "n:nan": [None, None],
        "s:mixed": [None, "one"],
        "s:?": [None, "?"],
    }
    assert kept == ("?", "b", "big", "mixed", "n", "nan")
    assert not_kept == ("list", "long", "object")
    assert file.metadata_columns([file.brief(row) for row in rows]) == (columns, kept, not_kept)


def test_made_up_names_do_not_fill_the_memory():
    rows = [{f"key {number}": number} for number in range(3000)]
    columns, kept, not_kept = file.metadata_columns(rows)
    assert len(columns) == len(kept) == FIELD_LIMIT
    assert len(not_kept) == 3000 - FIELD_LIMIT


def save_columns(path, count: int) -> None:
    table = {name: np.arange(count) for name in ("id", "height", "width", "digest", "n:score")}
    about = About("kind", "a.tar", 7, "00" * 16, fields=("score",), not_kept=("long",))
    file.save(ShardIndex(pa.table(table), about), path)


def test_a_file_is_read_once(tmp_path, monkeypatch):
    save_columns(tmp_path / "a.index", 3)
    first = file.head(tmp_path / "a.index")
    assert (first.count, first.columns) == (3, ("id", "height", "width", "digest", "n:score"))
    assert first.about == file.load(tmp_path / "a.index").about
    monkeypatch.delattr(file, "load")
    assert file.head(tmp_path / "a.index") is first


def test_a_head_that_is_written_anew_is_read_anew(tmp_path):
    for count in (1, 2, 3):
        save_columns(tmp_path / "a.index", count)
        assert file.head(tmp_path / "a.index").count == count


def test_names_of_alike_shards_are_kept_once(tmp_path):
    for name in "ab":
        save_columns(tmp_path / f"{name}.index", 2)
    one, other = (file.head(tmp_path / f"{name}.index") for name in "ab")
    assert one.columns is other.columns
    assert one.about.fields is other.about.fields


def test_a_file_that_is_no_index_or_missing(tmp_path):
    (tmp_path / "a.index").write_bytes(b"x" * 100)
    with pytest.raises(BadIndex):
        file.head(tmp_path / "a.index")
    with pytest.raises(FileNotFoundError):
        file.head(tmp_path / "b.index")
