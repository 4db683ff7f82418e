"""Packed shards: what they hold, what is kept of an earlier start, and indexes that are what reading them gives."""

import io
import json
from dataclasses import asdict

import numpy as np
import pytest
from faulty_store import Faults, s3  # noqa: F401
from PIL import Image
from shards import build
from tars import jpeg, sample, write

from daguerre import plugins
from daguerre.data.images.headers import USUAL
from daguerre.data.index import cache
from daguerre.data.loading import job_pool
from daguerre.data.sources import webdataset
from daguerre.data.tools import pack as tools_pack
from daguerre.data.tools.pack import Packer
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location


def source(path):
    settings = webdataset.Settings(path=str(path))
    return webdataset.open_source(settings, "train")


def pack(of, to, samples_per_shard=4, recorded=(), processes=1, numbers=None):
    numbers = np.arange(of.index.count) if numbers is None else numbers
    packer = Packer(of, USUAL, str(to), tuple(recorded))
    steps = list(job_pool.run_jobs(packer, tools_pack.shards(numbers, samples_per_shard), processes))
    done = sorted((step.result for step in steps if isinstance(step, job_pool.Done)), key=lambda result: result[0].name)
    assert sum(step for step in steps if isinstance(step, int)) == len(numbers)
    return [packed for packed, _ in done], [kept for _, kept in done]


@pytest.fixture
def raw(tmp_path):
    return source(build(tmp_path / "raw", 3, 6))


def same(first, second, number, other):
    a, b = first.record(number), second.record(other)
    assert first.sample_id(number) == second.sample_id(other)
    assert a.image == b.image
    assert a.texts == b.texts
    assert {**a.metadata, "daguerre_id": 0} == {**b.metadata, "daguerre_id": 0}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_samples_come_back_with_their_bytes_words_and_ids(raw, tmp_path, processes):
    (tmp_path / "out").mkdir()
    packed, kept = pack(raw, tmp_path / "out", processes=processes)
    assert [one.samples for one in packed] == [4, 4, 4, 4, 2]
    assert not any(kept)
    again = source(tmp_path / "out")
    assert again.index.count == raw.index.count == 18
    for number in range(18):
        same(raw, again, number, number)
    assert np.array_equal(again.index.heights_px, raw.index.heights_px)


def test_a_choice_in_another_order_is_packed_in_that_order(raw, tmp_path):
    (tmp_path / "out").mkdir()
    pack(raw, tmp_path / "out", numbers=np.array([17, 3, 5]), samples_per_shard=2)
    again = source(tmp_path / "out")
    for place, number in enumerate((17, 3, 5)):
        same(raw, again, number, place)


def test_the_index_beside_is_what_reading_the_shard_gives(raw, tmp_path):
    (tmp_path / "out").mkdir()
    packed, _ = pack(raw, tmp_path / "out")
    for one in packed:
        path = tmp_path / "out" / one.name
        beside = cache.load(path.with_name(f"{one.name}.index"))
        built = webdataset.build(Location(str(path)))
        assert beside.table.equals(built.table)
        assert beside.about == built.about
        assert (one.bytes, one.digest) == (path.stat().st_size, cache.file_digest(path))


def test_packing_what_was_packed_changes_no_byte(raw, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    pack(raw, tmp_path / "first")
    pack(source(tmp_path / "first"), tmp_path / "second")
    for path in sorted((tmp_path / "first").glob("*.tar")):
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_a_finished_shard_is_kept_only_if_it_is_whole(raw, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    packed, _ = pack(raw, out)
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert pack(raw, out, recorded=packed)[1] == [True] * 5
    (out / "shard-00000.tar").write_bytes(first["shard-00000.tar"].replace(b"image 1", b"image X", 1))
    (out / "shard-00001.tar").unlink()
    (out / "shard-00002.tar.index").write_bytes(b"no index")
    (out / ".shard-00003.tar.tmp").write_bytes(b"left by a kill")
    again, kept = pack(raw, out, recorded=packed)
    assert kept == [False, False, False, True, True]
    assert again == packed
    now = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".tar"}
    assert now == {name: data for name, data in first.items() if name.endswith(".tar")}


def test_what_cannot_be_packed_is_counted(tmp_path):
    good = [member for i in range(5) for member in sample(f"{i:03}", i)]
    raw = source(write(tmp_path / "raw.tar", good))
    data = bytearray((tmp_path / "raw.tar").read_bytes())
    at = bytes(data).index(jpeg(2)) + 100
    data[at] ^= 255
    (tmp_path / "raw.tar").write_bytes(data)
    (tmp_path / "out").mkdir()
    (packed,), _ = pack(raw, tmp_path / "out", samples_per_shard=9)
    assert packed.samples == 4
    ((reason, entry),) = packed.left_out.items()
    assert "differ from the index" in reason
    assert entry["count"] == 1
    assert "002" in entry["examples"][0]
    assert source(tmp_path / "out").index.count == 4


def test_drawn_images_keep_their_pixels_and_ids(tmp_path):
    shapes = plugins.find("sources", "shapes")
    drawn = shapes.open_source(shapes.Settings(), "train")
    (tmp_path / "out").mkdir()
    pack(drawn, tmp_path / "out", numbers=np.arange(5))
    again = source(tmp_path / "out")
    for number in range(5):
        first, second = drawn.record(number), again.record(number)
        assert again.sample_id(number) == drawn.sample_id(number)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(second.image))), first.image)
        assert second.texts["text"] == first.texts["text"]


def test_what_a_sample_takes_in_a_shard(raw, tmp_path):
    numbers = np.arange(18)
    sizes = [len(raw.record(n).image) for n in range(18)]
    each = tools_pack.mean_bytes(raw, numbers, USUAL)
    assert np.mean(sizes) + 1536 + 512 < each < np.mean(sizes) + 1536 + 512 + 1536
    (packed,), _ = pack(raw, tmp_path, samples_per_shard=18)
    assert packed.bytes == pytest.approx(18 * each, abs=10240 + 1024)  # the archive's end


def test_names_are_sorted_however_many_there_are():
    names = [shard.name for shard in tools_pack.shards(np.arange(100_001), 1)]
    assert names == sorted(names)
    assert names[-1] == "shard-100000.tar"
    assert tools_pack.shards(np.arange(0), 4) == []


def test_a_packing_is_known_by_what_is_packed_and_how():
    marks = {tools_pack.fingerprint(ids, how) for ids in ([1, 2], [2, 1], [1, 2, 3]) for how in ("a", "b")}
    assert len(marks) == 6
    assert tools_pack.fingerprint([1, 2], "a") == tools_pack.fingerprint(np.array([1, 2]), "a")


@pytest.mark.long  # of the quick tests, test_tools_far.py packs into one
@pytest.mark.parametrize("share", [0.0, pytest.param(0.3, marks=pytest.mark.long)])
def test_into_a_store_and_back(raw, tmp_path, s3, share):  # noqa: F811
    s3.proxy.faults = Faults(share)
    packed, _ = pack(raw, "s3://bucket/packed")
    assert all(one.version for one in packed)
    s3.proxy.faults = Faults(0.0)
    names = [place.url.rpartition("/")[2] for place in storage_io.listing("s3://bucket/packed/")]
    assert names == sorted(f"shard-0000{i}.tar{end}" for i in range(5) for end in ("", ".index"))
    again = source("s3://bucket/packed/")
    for number in range(18):
        same(raw, again, number, number)
    storage_io.write("s3://bucket/packed/shard-00001.tar", b"other")
    assert pack(raw, "s3://bucket/packed", recorded=packed)[1] == [True, False, True, True, True]


def test_a_listing_document_holds_what_a_shard_is():
    packed = tools_pack.Packed("shard-00000.tar", 3, 10240, "00" * 16, {"broken": {"count": 1, "examples": ["x"]}}, "v")
    document = json.loads(json.dumps(asdict(packed)))
    assert tools_pack.Packed(**document) == packed
