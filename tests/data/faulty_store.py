"""Object stores and web servers on loopback for tests, and a proxy in front of them that hurts what passes.

    from faulty_store import s3, faulty_s3        # fixtures

`s3` is moto's server, reached through a `Proxy` that counts requests and injects no fault until `proxy.faults` says so;
`faulty_s3` hurts 30 % of them. The environment of the test (and of processes it starts) points there.
"""

from __future__ import annotations

import atexit
import http.client
import logging
import random
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from daguerre.storage import clients
from daguerre.storage.location import Location

ACCESS_KEY, SECRET_KEY, SESSION_TOKEN = "AKIADAGUERRETEST", "s3cretKeyOfTheTests/+", "t0kenOfTheTests=="
SECRETS = (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN)
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_SESSION_TOKEN": SESSION_TOKEN,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}
SHORT = clients.Patience(
    attempts=12,
    first_pause_seconds=0.005,
    longest_pause_seconds=0.05,
    connect_seconds=1,
    stall_seconds=0.3,
    sending_seconds=1.5,
    unreachable_seconds=1,
)
"""Patience for tests: a stall is over after 0.3 s."""


@dataclass(frozen=True)
class Faults:
    """What happens to a share of the requests."""

    share: float = 0.0
    kinds: tuple[str, ...] = ("error", "cut", "stall", "flip")
    """`error`: 500 or 503; `cut`: the connection ends in the middle of the body; `stall`: nothing comes for
    `stall_seconds`, before the answer or in the middle of it; `flip`: one bit of the body is another; `upload`: one bit
    of what is written."""
    stall_seconds: float = 0.8
    methods: tuple[str, ...] = ("GET", "HEAD", "PUT", "POST")


@dataclass(frozen=True)
class Seen:
    """One request that came by."""

    method: str
    path: str
    range: str
    fault: str
    sent_bytes: int
    authorization: str


@dataclass
class Proxy:
    """Passes requests on to `upstream` (host, port)."""

    upstream: tuple[str, int]
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Passing, self))
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that go away are part of the game
        self._thread = threading.Thread(target=partial(self.server.serve_forever, poll_interval=0.01), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def draw(self, method: str) -> tuple[str, float]:
        """The fault of the next request, and a number in [0, 1) for where it strikes."""
        with self._lock:
            faulty = self._random.random() < self.faults.share and method in self.faults.methods
            return self._random.choice(self.faults.kinds) if faulty else "", self._random.random()

    @property
    def body_bytes(self) -> int:
        """Of all answers so far."""
        return sum(one.sent_bytes for one in self.seen)


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: Proxy, *arguments: object) -> None:
        self.proxy = proxy
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault, where = self.proxy.draw(self.command)
        if fault == "upload":
            body = _flipped(body, where)
        upstream = http.client.HTTPConnection(*self.proxy.upstream, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if fault in ("cut", "flip") and not data:
            fault = "error"
        sent = 0 if fault == "error" else len(data)
        asked, signed = self.headers.get("Range", ""), self.headers.get("Authorization", "")
        if not fault and self._left():
            # A loaded machine answers later than SHORT waits: the client has asked again, and that one counts.
            self.close_connection = True
            return
        self.proxy.seen.append(Seen(self.command, self.path, asked, fault, sent, signed))
        self._answer(answer, data, fault, where)

    def _left(self) -> bool:
        """True if the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _answer(self, answer: http.client.HTTPResponse, data: bytes, fault: str, where: float) -> None:
        if fault == "error":
            self._error(500 if where < 0.5 else 503)
            return
        if fault == "stall" and where < 0.5:
            self.proxy.closing.wait(self.proxy.faults.stall_seconds)
        if fault == "flip":
            data = _flipped(data, where)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        half = int(where * len(data)) if fault in ("cut", "stall") else len(data)
        self.wfile.write(data[:half])
        self.wfile.flush()
        if fault == "stall":
            self.proxy.closing.wait(self.proxy.faults.stall_seconds)
        self.close_connection = self.close_connection or fault in ("cut", "stall")

    def _error(self, status: int) -> None:
        body = b"<Error><Code>InternalError</Code><Message>signed with " + ACCESS_KEY.encode() + b"</Message></Error>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _flipped(data: bytes, where: float) -> bytes:
    place = int(where * len(data))
    return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :] if data else data


@dataclass(frozen=True)
class S3:
    """A bucket of its own on a server of its own."""

    proxy: Proxy
    direct: str
    """Endpoint without the proxy."""
    bucket: str = "bucket"

    def put(self, key: str, data: bytes) -> Location:
        """Stores an object, past the proxy."""
        self.boto().put_object(Bucket=self.bucket, Key=key, Body=data)
        return Location(f"s3://{self.bucket}/{key}")

    def get(self, key: str) -> bytes:
        return self.boto().get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def boto(self):
        return boto3.client(
            "s3",
            endpoint_url=self.direct,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )


@lru_cache
def _moto() -> tuple[str, int]:
    """Host and port of the one server of this process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    atexit.register(moto.stop)
    return moto.get_host_and_port()


@contextmanager
def s3_server() -> Iterator[S3]:
    """moto's server, emptied, with a bucket and a proxy in front."""
    host, port = _moto()
    reset = http.client.HTTPConnection(host, port)
    reset.request("POST", "/moto-api/reset")
    reset.getresponse().read()
    reset.close()
    proxy = Proxy((host, port))
    store = S3(proxy, f"http://{host}:{port}")
    try:
        store.boto().create_bucket(Bucket=store.bucket)
        yield store
    finally:
        proxy.close()


@contextmanager
def environment(patch: pytest.MonkeyPatch, **variables: str) -> Iterator[None]:
    """The environment of a user of that store, with little patience; connections begin anew."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_SKIP_SIGNATURE"):
        patch.delenv(name, raising=False)
    for name, value in {**ENVIRONMENT, **variables}.items():
        patch.setenv(name, value)
    patch.setattr(clients, "PATIENCE", SHORT)
    clients.forget()
    yield
    clients.forget()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server() as store, environment(monkeypatch, AWS_ENDPOINT_URL=store.proxy.url):
        yield store


@pytest.fixture
def faulty_s3(s3: S3) -> S3:
    s3.proxy.faults = Faults(share=0.3)
    return s3


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_server(folder: Path) -> Iterator[Proxy]:
    """A folder over plain HTTP, without ranges (Python's own server knows none), behind a proxy."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
    proxy = Proxy(server.server_address[:2])
    try:
        yield proxy
    finally:
        proxy.close()
        server.shutdown()
        server.server_close()
