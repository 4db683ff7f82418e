"""Index files joined to one: any number of them, long texts, ids that are there twice."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from daguerre.data.filters.evaluate import verdict
from daguerre.data.filters.parser import expression
from daguerre.data.index import file, join
from daguerre.data.index.file import About, ShardIndex
from daguerre.data.index.join import chance_pairs, combined
from daguerre.errors import UserError


def save(path: Path, ids: list[int], digests: list[int] | None = None, **columns) -> Path:
    table = {
        "id": np.array(ids, np.int64),
        "height": np.array(ids, np.int32),
        "width": np.array(ids, np.int32) + 1,
        "digest": np.array(digests or ids, np.uint64),
        **columns,
    }
    about = About("kind", path.name, 1, "00" * 16)
    file.save(ShardIndex(pa.table(table), about), path)
    return path


@pytest.fixture
def paths(tmp_path):
    """Five shards, the fourth without samples, the last without metadata."""
    found = []
    for shard, count in enumerate((2, 1, 3, 0)):
        ids = [10 * shard + row for row in range(count)]
        columns = {
            "n:score": pa.array([i / 2 for i in ids], pa.float64()),
            "s:word": pa.array([f"word {i}" for i in ids], pa.string()),
            "c:text": pa.array([i % 2 == 0 for i in ids], pa.bool_()),
        }
        found.append(save(tmp_path / f"{shard}.index", ids, **columns))
    return [*found, save(tmp_path / "4.index", [40], **{"c:other": pa.array([True])})]


@pytest.mark.parametrize("group", [1, 2, 5, 1000])
def test_columns_are_put_together_in_groups_of_shards(paths, group, monkeypatch):
    monkeypatch.setattr(join, "GROUP_SHARDS", group)
    index = combined(paths)
    assert index.ids.tolist() == index.heights_px.tolist() == [0, 1, 10, 20, 21, 22, 40]
    assert index.numbers["score"].to_pylist() == [0.0, 0.5, 5.0, 10.0, 10.5, 11.0, None]
    assert index.texts["word"].to_pylist() == [*(f"word {i}" for i in (0, 1, 10, 20, 21, 22)), None]
    assert index.captioned["text"].to_pylist() == [True, False, True, True, False, True, False]


def test_no_file_stays_mapped_for_an_index(paths):
    index = combined(paths)
    columns = [index.numbers["score"], index.texts["word"], index.captioned["text"]]
    file._loaded.cache_clear()
    assert str(paths[0].parent) not in Path("/proc/self/maps").read_text()
    assert [len(column) for column in columns] == [7, 7, 7]
    assert index.numbers["score"].equals(columns[0])  # loaded again


def test_texts_may_be_more_than_two_gigabytes(paths):
    index = combined(paths)
    assert index.texts["word"].type == pa.large_string()
    for rule, passing in (("word == 'word 10'", 1), ("word in ['word 10', 'word 22']", 2), ("word > 'word 1'", 4)):
        assert verdict(expression(rule), index).passes.sum() == passing, rule


def test_whether_there_is_a_column_is_known_without_reading(paths, monkeypatch):
    index = combined(paths)
    monkeypatch.delattr(join, "load")
    assert "score" in index.numbers
    assert "score" not in index.texts
    assert (list(index.captioned), len(index.captioned)) == (["text", "other"], 2)


def test_an_index_that_is_replaced_meanwhile(paths, monkeypatch):
    index = combined(paths)
    save(paths[0], [5])
    with pytest.raises(UserError, match="was replaced while the data set was being opened"):
        _ = index.captioned["text"], index.numbers["score"]


def test_a_sample_that_is_there_twice(tmp_path):
    paths = [save(tmp_path / "a", [1, 2, 3]), save(tmp_path / "b", [4, 3, 2])]
    with pytest.raises(UserError, match=r"sample 1 of a and sample 2 of b have the same id, as have 1 more"):
        combined(paths)


def test_different_samples_may_share_an_id_by_chance_where_there_are_many(tmp_path, monkeypatch):
    paths = [save(tmp_path / "a", [1, 2, 3]), save(tmp_path / "b", [4, 3, 2], [4, 33, 22])]
    with pytest.raises(UserError, match="have the same id"):
        combined(paths)  # so few samples do not meet by chance: these were packed twice, and not alike
    monkeypatch.setattr(join, "chance_pairs", lambda count: 1)
    with pytest.raises(UserError, match="have the same id"):
        combined(paths)
    monkeypatch.setattr(join, "chance_pairs", lambda count: 2)
    assert combined(paths).ids.tolist() == [1, 2, 3, 4, 3, 2]
    save(tmp_path / "b", [4, 3, 2], [4, 33, 2])
    with pytest.raises(UserError, match=r"sample 1 of a and sample 2 of b have the same id"):
        combined(paths)


def test_how_many_pairs_chance_explains():
    assert [chance_pairs(10**power) for power in (0, 6, 7, 9, 10)] == [0, 0, 4, 4, 25]
