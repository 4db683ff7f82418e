"""Objects below a place in a store: conditional writes, large ones, faults on the way."""

from __future__ import annotations

import hashlib
import threading

import pytest
from buckets import either, moto, s3_run  # noqa: F401 (fixtures)
from faulty_store import SECRETS, Faults

from daguerre.errors import UserError
from daguerre.storage import io as storage_io
from daguerre.storage.bucket import PART_BYTES, Prefix, prefix
from daguerre.storage.errors import Missing, StoreError


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/runs", "s3://bucket/runs"),
        ("S3://bucket/runs/", "s3://bucket/runs"),
        ("gs://bucket", "gs://bucket"),
        ("gs://bucket/a/b c", "gs://bucket/a/b c"),
    ],
)
def test_an_address(given, url):
    assert prefix(given).url == url


@pytest.mark.parametrize("given", ["s3://", "s3:///x", "gs://bucket//x", "s3://bucket/../x", "az://c/x", "https://h/x"])
def test_what_is_no_address_of_a_run(given):
    with pytest.raises(UserError, match=r"(s3|gs)://"):
        prefix(given)


def test_a_web_address_shows_no_secret():
    with pytest.raises(UserError) as caught:
        prefix("https://me:hunter2@host/runs?token=hunter3")
    assert "hunter" not in str(caught.value)


def test_what_is_written_is_read_listed_and_deleted(either):  # noqa: F811
    either.write("a/b.txt", b"one")
    either.write("a/c.txt", b"")
    either.write("ab.txt", b"three")
    assert either.read("a/b.txt")[0] == b"one"
    assert [(one.name, one.bytes) for one in either.listing()] == [("a/b.txt", 3), ("a/c.txt", 0), ("ab.txt", 5)]
    assert [one.name for one in either.listing("a/")] == ["a/b.txt", "a/c.txt"]
    assert [one.name for one in (either / "a").listing()] == ["b.txt", "c.txt"]
    either.delete(["a/b.txt", "never/was"])
    with pytest.raises(Missing):
        either.read("a/b.txt")


def test_long_listings_come_whole(either, monkeypatch):  # noqa: F811
    monkeypatch.setattr(storage_io, "_PAGE_KEYS", 3)
    for number in range(10):
        either.write(f"x/{number}", b"%d" % number)
    assert [one.name for one in either.listing()] == [f"x/{number}" for number in range(10)]


def test_an_object_is_created_once_and_replaced_by_who_knows_it(either):  # noqa: F811
    first = either.create("lock", b"one")
    assert first is not None
    assert either.create("lock", b"two") is None
    second = either.replace("lock", b"three", first)
    assert second is not None
    assert either.replace("lock", b"four", first) is None
    assert either.read("lock") == (b"three", second)
    either.delete(["lock"])
    assert either.replace("lock", b"five", second) is None
    assert either.listing() == []


def test_of_many_that_create_at_once_one_does(monkeypatch):
    from buckets import in_memory

    in_memory(monkeypatch)
    at = prefix("gs://bucket/x")
    ready, won = threading.Barrier(8), []

    def come(number: int) -> None:
        ready.wait()
        if at.create("lock", b"%d" % number) is not None:
            won.append(number)

    threads = [threading.Thread(target=come, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert at.read("lock")[0] == b"%d" % won[0]


@pytest.mark.parametrize(
    "length",
    [0, 1, PART_BYTES + 1, *(pytest.param(n, marks=pytest.mark.long) for n in (PART_BYTES, 3 * PART_BYTES + 5))],
)
def test_objects_of_any_size_arrive(either, length):  # noqa: F811
    data = bytes(hashlib.shake_128(b"x").digest(1000) * (length // 1000 + 1))[:length]
    sent = either.send("x", lambda: [data[:100], data[100:]])
    assert (sent.size_bytes, sent.sha256) == (length, hashlib.sha256(data).hexdigest())
    assert either.digest("x", length) == sent.sha256
    assert either.digest("x", length + 1) == ""
    assert [one.tag for one in either.listing()] == [sent.tag]


def test_a_store_that_tells_md5s_is_not_read_back(s3_run, moto):  # noqa: F811
    s3_run.send("x", lambda: [bytes(2 * PART_BYTES)])
    assert {seen.method for seen in moto.proxy.seen} == {"POST", "PUT"}


@pytest.mark.parametrize("kind", ["error", pytest.param("stall", marks=pytest.mark.long), "upload"])
def test_faults_on_the_way_are_outlived(s3_run, moto, kind):  # noqa: F811
    data = hashlib.shake_128(b"y").digest(PART_BYTES + 12345)
    moto.proxy.faults = Faults(share=0.3, kinds=(kind,))
    version = s3_run.create("lock", b"one")
    assert version is not None
    for number in range(6):
        version = s3_run.replace("lock", b"write %d" % number, version)
        assert version is not None
    s3_run.send("x", lambda: [data])
    moto.proxy.faults = Faults()
    assert s3_run.read("lock")[0] == b"write 5"
    assert s3_run.digest("x", len(data)) == hashlib.sha256(data).hexdigest()


def test_a_refusal_names_place_and_remedy_and_no_secret(s3_run):  # noqa: F811
    with pytest.raises(StoreError) as caught:
        Prefix("s3://nowhere/run").create("lock", b"x")
    text = caught.value.explanation
    assert "s3://nowhere/run/lock" in text
    assert "bucket that does not exist" in text
    assert not any(secret in text for secret in SECRETS)
