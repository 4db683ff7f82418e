"""Reading and writing at stores: right bytes or a bounded, clear error, whatever happens on the way."""

import http.server
import os
import pickle
import threading
import time
from dataclasses import replace
from functools import partial
from hashlib import md5
from pathlib import Path

import numpy as np
import pytest
import xxhash
from faulty_store import SECRETS, SHORT, Faults, environment, s3, web_server  # noqa: F401
from obstore.exceptions import GenericError

from daguerre.errors import UserError
from daguerre.storage import clients, download, retry
from daguerre.storage import io as storage_io
from daguerre.storage.errors import Unreachable
from daguerre.storage.location import Location

IMPATIENT = replace(SHORT, attempts=4)
KINDS = ("error", "cut", "stall", "flip")


def content(length: int = 100_000, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(length)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(download, "PART_BYTES", 10_000)


def test_size_range_and_existence(s3):  # noqa: F811
    data = content()
    place = s3.put("a/b c+d%20é.tar", data)
    assert storage_io.size(place) == storage_io.Stat(len(data), f'"{md5(data).hexdigest()}"')
    assert storage_io.read(place, 5_000, 17) == data[5_000:5_017]
    assert storage_io.read(place, 99_999, 1) == data[-1:]
    assert storage_io.read(place, 0, 0) == b""
    assert storage_io.exists(place)
    assert not storage_io.exists(Location("s3://bucket/a"))
    assert s3.proxy.body_bytes < 1_000


def test_the_same_of_a_local_file(tmp_path):
    (tmp_path / "x.tar").write_bytes(content())
    place = Location(str(tmp_path / "x.tar"))
    assert storage_io.size(place).bytes == 100_000
    assert storage_io.read(place, 5_000, 17) == content()[5_000:5_017]
    assert storage_io.exists(place)
    assert storage_io.fetch(place, tmp_path / "y.tar") == digest(content())
    assert (tmp_path / "y.tar").read_bytes() == content()
    with pytest.raises(FileNotFoundError):
        storage_io.size(Location(str(tmp_path / "z.tar")))
    with pytest.raises(storage_io.Mismatch, match="ends at byte 100,000, before 100,005"):
        storage_io.read(place, 99_995, 10)


@pytest.mark.parametrize("kinds", [*(pytest.param((kind,), marks=pytest.mark.long) for kind in KINDS), KINDS])
def test_ranges_with_faults_are_right(s3, kinds):  # noqa: F811
    data = content()
    place = s3.put("x.tar", data)
    s3.proxy.faults = Faults(0.3, kinds)
    for start in range(0, 100_000, 8_000):
        expected = data[start : start + 2_500]
        assert storage_io.read(place, start, 2_500, check=lambda got, right=expected: got == right) == expected
        assert storage_io.read(place, start, 2_500, twice=True) == expected
    assert {one.fault for one in s3.proxy.seen} >= set(kinds)


@pytest.mark.parametrize("kinds", [*(pytest.param((kind,), marks=pytest.mark.long) for kind in KINDS), KINDS])
@pytest.mark.parametrize("known", ["digest", "md5", "nothing"])
def test_whole_files_with_faults_are_right(s3, small_parts, tmp_path, kinds, known):  # noqa: F811
    data = content()
    place = s3.put("x.tar", data)
    if known == "nothing":
        place = uploaded_in_parts(s3, "x.tar", data)
    s3.proxy.faults = Faults(0.3, kinds)
    assert storage_io.fetch(place, tmp_path / "x.tar", digest(data) if known == "digest" else None) == digest(data)
    assert (tmp_path / "x.tar").read_bytes() == data
    assert os.listdir(tmp_path) == ["x.tar"]


def uploaded_in_parts(s3, key: str, data: bytes, part_bytes: int = 5 << 20) -> Location:  # noqa: F811
    """With an entity tag that is no MD5 of the whole, and of parts only if they have a usual length."""
    boto, where = s3.boto(), {"Bucket": s3.bucket, "Key": key}
    upload = boto.create_multipart_upload(**where)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(data), part_bytes), 1):
        body = data[start : start + part_bytes]
        tag = boto.upload_part(**where, UploadId=upload, PartNumber=number, Body=body)["ETag"]
        parts.append({"ETag": tag, "PartNumber": number})
    boto.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
    return Location(f"s3://{s3.bucket}/{key}")


def fetched_bytes(s3, place: Location, to: Path, known: str | None = None) -> int:  # noqa: F811
    before = s3.proxy.body_bytes
    storage_io.fetch(place, to, known)
    return s3.proxy.body_bytes - before


def test_a_file_is_read_twice_only_where_nothing_tells_its_bytes(s3, tmp_path):  # noqa: F811
    data = content(11 << 20)
    plain = s3.put("plain", data)
    usual = uploaded_in_parts(s3, "usual", data)
    odd = uploaded_in_parts(s3, "odd", data, 6 << 20)
    assert storage_io.size(usual).version.endswith('-3"')
    assert fetched_bytes(s3, plain, tmp_path / "x") == len(data)
    assert fetched_bytes(s3, usual, tmp_path / "x") == len(data)
    assert fetched_bytes(s3, odd, tmp_path / "x") == 2 * len(data)
    assert fetched_bytes(s3, odd, tmp_path / "x", digest(data)) == len(data)


def test_bytes_that_are_stored_wrong_are_told_from_a_fault(s3, small_parts, tmp_path):  # noqa: F811
    data = content()
    hurt = data[:500] + b"?" + data[501:]
    place = s3.put("x.tar", hurt)
    s3.proxy.faults = Faults(0.3)
    with pytest.raises(storage_io.Mismatch, match="has other bytes than expected from 0 to 1,000") as found:
        storage_io.read(place, 0, 1_000, check=lambda got: got == data[:1_000])
    assert found.value.data == hurt[:1_000]
    with pytest.raises(storage_io.Mismatch, match=f"digest is {digest(hurt)}, not {digest(data)}"):
        storage_io.fetch(place, tmp_path / "x.tar", digest(data))
    assert os.listdir(tmp_path) == []
    assert storage_io.fetch(place, tmp_path / "x.tar", digest(data), keep_other=True) == digest(hurt)
    assert (tmp_path / "x.tar").read_bytes() == hurt


def test_a_local_file_that_is_damaged_is_a_mismatch(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"damaged")
    with pytest.raises(storage_io.Mismatch) as found:
        storage_io.read(Location(str(tmp_path / "x.tar")), 0, 7, check=lambda data: False)
    assert found.value.data == b"damaged"


def test_a_line_that_hurts_everything_ends_in_an_error(s3, small_parts, tmp_path):  # noqa: F811
    data = content()
    place = s3.put("x.tar", data)
    s3.proxy.faults = Faults(1.0, ("flip",), methods=("GET",))
    with pytest.raises(storage_io.Transient, match="returns different bytes in each of 12 readings"):
        storage_io.read(place, 0, 50_000, check=lambda got: got == data[:50_000])
    with pytest.raises(storage_io.Transient, match="returns different bytes in each of 12 readings"):
        storage_io.fetch(place, tmp_path / "x.tar")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "error",
            r"the server repeatedly answered HTTP 50. (InternalError )?\(",
        ),
        ("cut", "after several tries: the connection broke in the middle of an answer"),
        pytest.param("stall", "after several tries: no answer in time", marks=pytest.mark.long),
    ],
)
def test_a_fault_that_stays_is_bounded_and_clear(s3, small_parts, tmp_path, monkeypatch, kind, said):  # noqa: F811
    monkeypatch.setattr(clients, "PATIENCE", IMPATIENT)
    place = s3.put("set/x.tar", content())
    s3.proxy.faults = Faults(1.0, (kind,), methods=("GET",))
    for request in (lambda: storage_io.read(place, 0, 1_000), lambda: storage_io.fetch(place, tmp_path / "x")):
        began = time.monotonic()
        with pytest.raises(storage_io.StoreError, match=said) as refused:
            request()
        assert time.monotonic() - began < 6
        assert len([one for one in s3.proxy.seen if one.range.startswith("bytes=0-")]) == IMPATIENT.attempts
        s3.proxy.seen.clear()
        message = str(refused.value)
        for words in ("data.path: s3://bucket/set/x.tar ", f"endpoint {s3.proxy.url}", "region us-east-1"):
            assert words in message
        assert not any(secret in message for secret in SECRETS)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("request_of", "said"),
    [
        (lambda place: storage_io.size(Location("s3://bucket/nope")), "s3://bucket/nope does not exist"),
        (lambda place: storage_io.read(Location("s3://nobucket/x"), 0, 1), "bucket that does not exist"),
        (lambda place: storage_io.read(place, 99_995, 10), "ends at byte 100,000, before 100,005"),
        (lambda place: storage_io.read(place, 200_000, 10), "ends before the requested bytes"),
        (lambda place: storage_io.read(Location("s3://bucket/a//b.tar"), 0, 1), "cannot be requested"),
        (lambda place: storage_io.read(Location("s3://bucket/../b.tar"), 0, 1), "cannot be requested"),
        (lambda place: storage_io.listing("s3://nobucket/"), "bucket that does not exist"),
    ],
)
def test_what_will_not_pass_is_asked_for_once(s3, request_of, said, monkeypatch):  # noqa: F811
    monkeypatch.setattr(clients, "PATIENCE", replace(SHORT, stall_seconds=20))  # a slow machine is no fault
    clients.forget()
    place = s3.put("x.tar", content())
    with pytest.raises(storage_io.StoreError, match=said) as refused:
        request_of(place)
    assert not refused.value.passing
    assert len(s3.proxy.seen) <= 1


def test_errors_travel_between_processes(s3):  # noqa: F811
    with pytest.raises(storage_io.Missing) as refused:
        storage_io.size(Location("s3://bucket/nope"))
    copy = pickle.loads(pickle.dumps(refused.value))  # noqa: S301
    assert type(copy) is storage_io.Missing
    assert str(copy) == str(refused.value)
    assert isinstance(copy, FileNotFoundError)


def test_an_object_that_is_replaced_while_it_is_fetched(s3, small_parts, tmp_path, monkeypatch):  # noqa: F811
    place = s3.put("x.tar", content())
    stat = storage_io.size(place)
    s3.put("x.tar", content(seed=1))
    monkeypatch.setattr(storage_io, "size", lambda _: stat)
    with pytest.raises(storage_io.StoreError, match="was replaced while it was being read"):
        storage_io.fetch(place, tmp_path / "x.tar")
    assert os.listdir(tmp_path) == []


def test_writing(s3, tmp_path):  # noqa: F811
    data = content()
    for _ in range(2):
        storage_io.write("s3://bucket/new/x.tar", data)
        storage_io.write(Location("s3://bucket/new/empty"), b"")
        storage_io.write(tmp_path / "new" / "x.tar", data)
    assert s3.get("new/x.tar") == data
    assert s3.get("new/empty") == b""
    assert (tmp_path / "new" / "x.tar").read_bytes() == data
    assert os.listdir(tmp_path / "new") == ["x.tar"]
    with pytest.raises(UserError, match=r"https://host/x\.tar: a web server cannot be written to"):
        storage_io.write("https://user:pa55@host/x.tar?s1gn", data)


@pytest.mark.parametrize("kinds", [KINDS, ("upload",)])
def test_writing_with_faults_arrives_whole(s3, kinds):  # noqa: F811
    s3.proxy.faults = Faults(0.3, kinds)
    for number in range(15):
        storage_io.write(f"s3://bucket/{number}", content(seed=number))
        assert s3.get(str(number)) == content(seed=number)


def test_writing_in_parts_with_faults_arrives_whole(s3, monkeypatch):  # noqa: F811
    monkeypatch.setattr(storage_io, "_PUT_BYTES", 5 << 20)
    s3.proxy.faults = Faults(0.3, ("upload", "error"), methods=("PUT", "POST"))
    data = content(11 << 20)
    storage_io.write("s3://bucket/x", data)
    assert s3.get("x") == data


def test_writing_in_parts_arrives_whole(s3, monkeypatch):  # noqa: F811
    monkeypatch.setattr(storage_io, "_PUT_BYTES", 5 << 20)
    data = content(11 << 20)
    storage_io.write("s3://bucket/x", data)
    assert s3.get("x") == data
    assert not [one for one in s3.proxy.seen if one.method == "GET"]  # the entity tag told that it arrived


def test_writing_where_one_may_not(s3):  # noqa: F811
    with pytest.raises(storage_io.StoreError, match=r"^s3://nobucket/x is in a bucket that does not exist"):
        storage_io.write("s3://nobucket/x", b"x")


@pytest.fixture
def web(tmp_path, monkeypatch):
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "x y.tar").write_bytes(content())
    with web_server(tmp_path / "www") as proxy, environment(monkeypatch):
        yield proxy


def test_a_web_server_without_ranges(web, tmp_path):
    place = Location(f"{web.url}/x%20y.tar?X-Amz-Signature=s1gn")
    assert storage_io.size(place).bytes == 100_000
    assert web.seen[-1].path == "/x%20y.tar?X-Amz-Signature=s1gn"
    with pytest.raises(storage_io.NoRanges, match=r"/x%20y\.tar is on a server that only sends whole files"):
        storage_io.read(place, 5, 10)
    assert storage_io.fetch(place, tmp_path / "x.tar") == digest(content())
    web.faults = Faults(0.3)
    for known in (None, digest(content())) * 5:
        assert storage_io.fetch(place, tmp_path / "x.tar", known) == digest(content())
        assert (tmp_path / "x.tar").read_bytes() == content()


def test_a_web_server_with_ranges(s3, small_parts, tmp_path):  # noqa: F811
    data = content()
    s3.boto().put_object(Bucket=s3.bucket, Key="a b.tar", Body=data, ACL="public-read")
    s3.proxy.faults = Faults(0.3)
    place = Location(f"{s3.proxy.url}/bucket/a%20b.tar")
    for start in range(0, 100_000, 10_000):
        assert storage_io.read(place, start, 50, twice=True) == data[start : start + 50]
    assert storage_io.fetch(place, tmp_path / "x.tar") == digest(data)
    assert (tmp_path / "x.tar").read_bytes() == data


def test_a_web_file_that_is_replaced_while_it_is_fetched(web, tmp_path, monkeypatch):
    place = Location(f"{web.url}/x%20y.tar")
    stat = storage_io.size(place)
    os.utime(tmp_path / "www" / "x y.tar", (1, 1))
    answers = iter([stat])
    monkeypatch.setattr(download, "size", lambda asked: next(answers, None) or storage_io.size(asked))
    with pytest.raises(storage_io.StoreError, match="was replaced"):
        storage_io.fetch(place, tmp_path / "x.tar")


def test_user_and_password_of_an_address_are_sent_and_never_shown(web, monkeypatch):
    monkeypatch.setattr(clients, "PATIENCE", IMPATIENT)
    place = Location(f"{web.url.replace('//', '//us%40er:pa55%2Fword@')}/x%20y.tar?X-Amz-Signature=s1gn")
    storage_io.size(place)
    assert web.seen[-1].authorization == "Basic dXNAZXI6cGE1NS93b3Jk"  # us@er:pa55/word
    for kind in ("error", "cut", "stall"):
        web.faults = Faults(1.0, (kind,))
        with pytest.raises(storage_io.StoreError) as refused:
            storage_io.read(place, 0, 100)
        assert f"data.path: {web.url}/x%20y.tar " in str(refused.value)
        assert not any(
            secret in repr(vars(refused.value)["what"]) + str(refused.value) for secret in ("er:", "word", "s1gn")
        )
        assert refused.value.__context__ is None  # what the library said is nowhere to be found


def test_a_password_is_not_sent_in_clear():
    with pytest.raises(
        storage_io.StoreError, match=r"http://example\.org/x\.tar would send user and password unencrypted"
    ) as refused:
        storage_io.size(Location("http://user:pa55word@example.org/x.tar"))
    assert "pa55" not in str(refused.value)


class _Page(http.server.BaseHTTPRequestHandler):
    """A page that is made when it is asked for: no length. /moved leads to a signed address of another host."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/file?X-Amz-Signature=s1gn")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if self.path == "/head-refused" and self.command == "HEAD":
            self.send_response(403)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(200)
        if self.path == "/page":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", "5")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"5\r\nhello\r\n0\r\n\r\n" if self.path == "/page" else b"hello")
        return None

    do_HEAD = do_GET


@pytest.fixture
def pages(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
    with environment(monkeypatch):
        yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_unusual_web_servers(pages, tmp_path):
    with pytest.raises(storage_io.StoreError, match=r"/page has no known size: .* pages"):
        storage_io.size(Location(f"{pages}/page"))
    assert storage_io.size(Location(f"{pages}/head-refused")).bytes == 5
    assert storage_io.size(Location(f"{pages}/moved")).bytes == 5
    assert storage_io.fetch(Location(f"{pages}/moved"), tmp_path / "x") == digest(b"hello")


@pytest.mark.parametrize(
    ("scheme", "how"),
    [
        ("s3", "nobody listens"),
        ("http", "nobody answers"),
        pytest.param("s3", "nobody answers", marks=pytest.mark.long),
        pytest.param("http", "nobody listens", marks=pytest.mark.long),
    ],
)
def test_an_unreachable_store_says_so_soon(monkeypatch, scheme, how):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as silent:  # its backlog takes connections
        port = 1 if how == "nobody listens" else silent.server_address[1]
        endpoint = f"http://127.0.0.1:{port}"
        with environment(monkeypatch, AWS_ENDPOINT_URL=endpoint):
            place = Location("s3://bucket/x.tar" if scheme == "s3" else f"{endpoint}/x.tar")
            began = time.monotonic()
            with pytest.raises(storage_io.StoreError) as refused:
                storage_io.size(place)
            assert time.monotonic() - began < SHORT.unreachable_seconds + SHORT.stall_seconds + 1
    message = str(refused.value)
    assert f"data.path: {place.name} cannot be reached after several tries: " in message
    assert ("refused" if port == 1 else "no answer in time") in message
    assert (
        "Check endpoint, region and credentials" if scheme == "s3" else "Check the address and the network"
    ) in message


def test_a_store_that_never_answered_is_given_up_before_a_pause_would_end_too_late(monkeypatch):
    """Requests at 0, 1 and 3 seconds; the next would come at 7, and five are the bound."""
    now, asked = [0.0], []
    monkeypatch.setattr(clients, "PATIENCE", clients.Patience(10, 1.0, 4.0, unreachable_seconds=5))
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    clients.forget()

    def request(store, path):
        asked.append(now[0])
        raise GenericError("HTTP error: kind: Connect, refused")

    with pytest.raises(Unreachable):
        retry.with_retries(Location("http://127.0.0.1:9/x.tar"), request)
    assert asked == [0, 1, 3]


def test_real_patience_finds_a_store_unreachable_within_about_20_seconds():
    real = clients.Patience()
    worst = max(real.unreachable_seconds, real.stall_seconds) + real.stall_seconds
    assert worst <= 22
    assert real.attempts * real.stall_seconds <= 120  # the longest that a store which has answered before may be silent
