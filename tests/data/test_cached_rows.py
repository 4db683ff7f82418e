"""Rows of a cache by key, and what is noted of samples: what was written is read, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from daguerre.data.cached import rows
from daguerre.data.cached.rows import Lost, Rows, Writer, key
from daguerre.data.cached.samples import SUFFIX, Fact, Facts, Picture
from daguerre.data.index.file import decoded, encoded
from daguerre.storage import io as storage_io

KEYS = [b"\0" * 16, b"a" + b"\0" * 15, b"\0" + b"a" * 15, b"ab" + b"\0" * 14, *(key(bytes([i])) for i in range(9))]
"""Those with zeros at their end are what numpy takes for shorter ones."""


def row(number: int) -> dict[str, np.ndarray]:
    whole = np.random.default_rng(number).standard_normal((2, 3, 4), dtype=np.float32)
    more = {} if number % 3 else {"mask": whole[0, 0] > 0}
    return {"mean": whole, "logvar": whole.astype(np.float16), "scale": np.float32(number).reshape(()), **more}


def test_what_was_written_is_read_whatever_the_key_ends_with(tmp_path):
    writer = Writer(str(tmp_path), shard_bytes=300)
    for number, each in enumerate(KEYS):
        writer.add(each, row(number))
    writer.flush()
    held = Rows.found(str(tmp_path))
    assert len(held.shards) > 3
    assert held.has(KEYS).all()
    for number, each in reversed([*enumerate(KEYS)]):
        found, given = held.read(each), row(number)
        assert found.keys() == given.keys()
        for name, array in given.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array, strict=True)
    assert not held.has([key(b"other")]).any()
    with pytest.raises(Lost, match="damaged or gone"):
        held.read(key(b"other"))


def test_a_row_that_is_damaged_is_told_and_another_of_its_key_is_read(tmp_path):
    writer = Writer(str(tmp_path), shard_bytes=1e9)
    for number, each in enumerate(KEYS):
        writer.add(each, row(number % 3))
    writer.flush()
    hurt = KEYS[4]
    (shard, place), *_ = Rows.found(str(tmp_path))._found(hurt)
    head = Rows.found(str(tmp_path)).heads[shard]
    data = bytearray((tmp_path / shard).read_bytes())
    data[head.start + place * head.dtype.itemsize + 3] ^= 4
    (tmp_path / shard).write_bytes(data)
    held = Rows.found(str(tmp_path))
    assert held.damaged == []
    assert held.has(KEYS).all()
    assert (~held.sound(KEYS)).nonzero()[0].tolist() == [4]
    assert held.lost() == {hurt}
    assert held.shapes(hurt)["mean"] == ((2, 3, 4), "<f4")
    with pytest.raises(Lost):
        held.read(hurt)
    for number in range(2):  # whichever name comes first
        writer = Writer(str(tmp_path), shard_bytes=1)
        writer.add(hurt, row(1))
        writer.add(key(bytes([number])), row(1))
        writer.flush()
    held = Rows.found(str(tmp_path))
    np.testing.assert_array_equal(held.read(hurt)["mean"], row(1)["mean"])
    assert held.sound(KEYS).all()
    assert not held.lost()
    (tmp_path / shard).unlink()
    with pytest.raises(Lost):
        held.read(KEYS[7])


def test_facts_are_found_by_sample_and_stamp(tmp_path):
    facts = [Fact(key(bytes([i])), 40 + i, 48, {"text": f"image {i}"}, "" if i else "damaged") for i in range(5)]
    for stamp, few in ((7, facts[:3]), (8, facts[3:])):
        noted = Facts(str(tmp_path))
        for i, fact in enumerate(few):
            noted.add(i, stamp, fact)
        noted.flush()
    held = Facts(str(tmp_path))
    places = held.places(np.array([2, 0, 1, 2]), np.array([7, 7, 8, 8], dtype=np.uint64))
    assert (places >= 0).tolist() == [True, True, True, False]
    assert held.noted(places[:3]) == [facts[2], facts[0], facts[4]]
    assert held.noted(places[3:3]) == []


def test_a_name_that_was_damaged_on_the_way_is_no_file(monkeypatch):
    """A listing of a store is read until two readings agree."""
    listed = iter([["cache/x/aB-8.safetensors"], ["cache/x/ab-8.safetensors"], ["cache/x/ab-8.safetensors"]])
    monkeypatch.setattr(storage_io, "entries", lambda location: [{"path": path} for path in next(listed)])
    assert rows.files("s3://bucket/cache/x", rows.SUFFIX) == ["ab-8.safetensors"]


def test_facts_of_thousands_of_samples_keep_their_further_images_and_those_of_earlier_versions_have_none(tmp_path):
    count, facts = 5000, Facts(str(tmp_path))
    pictures = {n: {"rejected": Picture(key(bytes([n % 256])), n, 7)} if n % 3 else {} for n in range(count)}
    for number in range(count):
        facts.add(number, number + 1, Fact(key(b"image"), 1, 2, {"text": "x"}, "", pictures[number]))
    facts.flush()
    ids = np.arange(count)
    found = Facts(str(tmp_path))
    noted = found.noted(found.places(ids, (ids + 1).astype(np.uint64)))
    assert [dict(fact.further) for fact in noted] == [pictures[number] for number in range(count)]
    (name,) = found.files()
    place = tmp_path / "samples" / name
    before = decoded(pa.py_buffer(place.read_bytes()), place)
    data = encoded(replace(before, table=before.table.drop_columns("further")))
    place.unlink()
    place.with_name(f"{xxhash.xxh3_128_hexdigest(data)}{SUFFIX}").write_bytes(data)
    earlier = Facts(str(tmp_path))
    (fact,) = earlier.noted(earlier.places(ids[1:2], (ids[1:2] + 1).astype(np.uint64)))
    assert fact == noted[1]._replace(further={})
