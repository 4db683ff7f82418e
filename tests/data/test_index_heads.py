"""What is kept in memory of an index file: read once, anew when the file is another."""

import numpy as np
import pyarrow as pa
import pytest

from daguerre.data.index import file, heads
from daguerre.data.index.file import About, BadIndex, ShardIndex


def save(path, count: int) -> None:
    table = {name: np.arange(count) for name in ("id", "height", "width", "digest", "n:score")}
    about = About("kind", "a.tar", 7, "00" * 16, fields=("score",), not_kept=("long",))
    file.save(ShardIndex(pa.table(table), about), path)


def test_a_file_is_read_once(tmp_path, monkeypatch):
    save(tmp_path / "a.index", 3)
    first = heads.head(tmp_path / "a.index")
    assert (first.count, first.columns) == (3, ("id", "height", "width", "digest", "n:score"))
    assert first.about == file.load(tmp_path / "a.index").about
    monkeypatch.delattr(heads, "load")
    assert heads.head(tmp_path / "a.index") is first


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    for count in (1, 2, 3):
        save(tmp_path / "a.index", count)
        assert heads.head(tmp_path / "a.index").count == count


def test_names_of_alike_shards_are_kept_once(tmp_path):
    for name in "ab":
        save(tmp_path / f"{name}.index", 2)
    one, other = (heads.head(tmp_path / f"{name}.index") for name in "ab")
    assert one.columns is other.columns
    assert one.about.fields is other.about.fields


def test_a_file_that_is_no_index_or_missing(tmp_path):
    (tmp_path / "a.index").write_bytes(b"x" * 100)
    with pytest.raises(BadIndex):
        heads.head(tmp_path / "a.index")
    with pytest.raises(FileNotFoundError):
        heads.head(tmp_path / "b.index")
