"""What threads share of a source: what is made when it is first asked for is made once, or twice alike."""

import json
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tars
from quick_cases import quick_where

from daguerre import plugins
from daguerre.data.index import file as index_file
from daguerre.data.table import parquet as table_parquet
from daguerre.threads import made_once

RECORDS, THREADS = 400, 8


def caption(i: int) -> str:
    return f"image {i}"


def write_folder(path):
    image = tars.jpeg(0)
    for i in range(RECORDS):
        (path / f"{i:05}.jpg").write_bytes(image)
        (path / f"{i:05}.json").write_text(json.dumps({"text": caption(i), "n": i}))


def write_webdataset(path):
    image, half = tars.jpeg(0), RECORDS // 2
    for shard in range(2):
        numbers = range(shard * half, (shard + 1) * half)
        documents = ((i, json.dumps({"caption": caption(i), "n": i}).encode()) for i in numbers)
        members = (part for i, text in documents for part in ((f"{i:05}.jpg", image), (f"{i:05}.json", text)))
        tars.write(path / f"{shard}.tar", members)


def write_parquet(path):
    texts = [caption(i) for i in range(RECORDS)]
    table = {"jpg": [tars.jpeg(0)] * RECORDS, "text": texts, "n": range(RECORDS)}
    pq.write_table(pa.table({**table, "n": pa.array(table["n"])}), path / "a.parquet", row_group_size=40)


def write_jsonl(path):
    (path / "a.jpg").write_bytes(tars.jpeg(0))
    lines = (json.dumps({"file_name": "a.jpg", "text": caption(i), "n": i}) for i in range(RECORDS))
    (path / "a.jsonl").write_text("\n".join(lines))


def forgotten() -> None:
    """Nothing of the files is in memory, as at a start."""
    index_file._loaded.cache_clear()
    index_file._head.cache_clear()
    for cached in (table_parquet._parquet, table_parquet._starts, table_parquet._chunks):
        cached.cache_clear()
    table_parquet._GROUPS.held.clear()


@pytest.fixture
def eager_threads():
    """Threads that take turns after a few steps, so that they meet where they share something."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "kind", quick_where({"folder", "parquet"}.__contains__, ["folder", "webdataset", "parquet", "jsonl"])
)
def test_eight_threads_read_what_one_reads(kind, tmp_path, eager_threads):
    place = tmp_path / "data"
    place.mkdir()
    globals()[f"write_{kind}"](place)
    found = plugins.find("sources", kind)
    settings = found.Settings(path=str(place), cache_dir=str(tmp_path / "cache"))
    found.open_source(settings, "train")  # indexed

    for _ in range(5):  # most of what is made late is made in the first moments
        forgotten()
        source = found.open_source(settings, "train")
        assert source.index.count == RECORDS
        together = threading.Barrier(THREADS)

        def read(first, source=source, together=together):
            together.wait()
            return [source.record(i) for i in range(first, RECORDS, RECORDS // 40)]

        with ThreadPoolExecutor(THREADS) as pool:
            each = list(pool.map(read, range(THREADS)))
        for first, records in enumerate(each):
            wanted = range(first, RECORDS, RECORDS // 40)
            assert [(r.texts["text"], r.metadata["n"]) for r in records] == [(caption(i), i) for i in wanted]

    with ThreadPoolExecutor(THREADS) as pool:
        records = list(pool.map(source.record, range(RECORDS)))
    assert [record.texts["text"] for record in records] == [caption(i) for i in range(RECORDS)]


def test_a_column_is_checked_by_threads_at_once(tmp_path, eager_threads):
    index = index_file.ShardIndex(
        pa.table({f"n:{i}": pa.array(range(1000)) for i in range(300)}), index_file.About("kind", "a", 0, "0" * 32)
    )
    index_file.save(index, tmp_path / "a.index")
    loaded = index_file.load(tmp_path / "a.index")
    together = threading.Barrier(THREADS)

    def ask(_):
        together.wait()
        for name in loaded.table.column_names:
            loaded.column(name)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(ask, range(THREADS)))
    assert not loaded.digests


@pytest.mark.parametrize("kind", ["folder", "webdataset", "parquet", "jsonl"])
def test_what_is_made_late_does_not_travel(kind, tmp_path, monkeypatch):
    """A source is sent to workers while the thread that fetches ahead asks it for more."""
    monkeypatch.setattr(sys.modules[__name__], "RECORDS", 10)
    globals()[f"write_{kind}"](tmp_path)
    found = plugins.find("sources", kind)
    source = found.open_source(found.Settings(path=str(tmp_path), cache_dir=str(tmp_path / "cache")), "train")
    before = pickle.dumps(source)
    assert source.index.count == 10
    source.record(0)
    assert pickle.dumps(source) == before


def test_what_is_dear_is_made_by_one_thread(eager_threads):
    calls, together = [], threading.Barrier(THREADS)

    @made_once(2)
    def dear(name):
        calls.append(name)
        time.sleep(0.01)
        return object()

    def ask(_):
        together.wait()
        return dear("a")

    with ThreadPoolExecutor(THREADS) as pool:
        assert len(set(pool.map(ask, range(THREADS)))) == 1
    assert calls == ["a"]
    dear.cache_clear()
    dear("a")
    assert calls == ["a", "a"]
