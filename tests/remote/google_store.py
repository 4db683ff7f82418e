"""A small stand-in for Google Cloud Storage's XML interface on loopback: what obstore's client for it asks for.

Objects with generations and the conditions on them, ranges, listings in pages, multi-part uploads. Its tags are no
digests of what is stored, as those of Google's composed objects are not.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass
class Stored:
    """One object."""

    data: bytes
    generation: int
    changed: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def tag(self) -> str:
        return f'"gen-{self.generation}"'


@dataclass
class Google:
    """One bucket, `bucket`."""

    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1000))
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""


class _Asked(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, google: Google, *arguments: object) -> None:
        self.google = google
        super().__init__(*arguments)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        asked = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if bucket != "bucket":
            self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif not key:
            self.listing(asked)
        else:
            with self.google.lock:
                getattr(self, f"on_{self.command.lower()}")(key, asked, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def about(self, found: Stored) -> dict[str, str]:
        changed = format_datetime(found.changed, usegmt=True)
        return {"ETag": found.tag, "x_goog_generation": str(found.generation), "Last_Modified": changed}

    def on_get(self, key: str, asked: dict[str, str], body: bytes) -> None:
        found = self.google.objects.get(key)
        if found is None:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        ranged = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if (wanted := self.headers.get("If-Match")) is not None and wanted != found.tag:
            return self.answer(412)
        if ranged is None:
            return self.answer(200, found.data, len(found.data), **self.about(found))
        first, last = int(ranged[1]), min(int(ranged[2]), len(found.data) - 1)
        where = f"bytes {first}-{last}/{len(found.data)}"
        return self.answer(206, found.data[first : last + 1], Content_Range=where, **self.about(found))

    on_head = on_get

    def on_put(self, key: str, asked: dict[str, str], body: bytes) -> None:
        if "uploadId" in asked:
            self.google.uploads[asked["uploadId"]][int(asked["partNumber"])] = body
            return self.answer(200, ETag=f'"part-{asked["partNumber"]}"')
        condition = self.headers.get("x-goog-if-generation-match")
        found = self.google.objects.get(key)
        if condition is not None and int(condition) != (found.generation if found else 0):
            return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        return self.store(key, body)

    def store(self, key: str, data: bytes) -> None:
        found = self.google.objects[key] = Stored(data, next(self.google.numbers))
        self.answer(200, **self.about(found))

    def on_post(self, key: str, asked: dict[str, str], body: bytes) -> None:
        if "uploads" in asked:
            number = f"upload-{next(self.google.numbers)}"
            self.google.uploads[number] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            return self.answer(200, text.encode())
        parts = self.google.uploads.pop(asked["uploadId"])
        found = self.google.objects[key] = Stored(
            b"".join(parts[part] for part in sorted(parts)), next(self.google.numbers)
        )
        text = f"<CompleteMultipartUploadResult><ETag>{escape(found.tag)}</ETag></CompleteMultipartUploadResult>"
        return self.answer(200, text.encode(), **self.about(found))

    def on_delete(self, key: str, asked: dict[str, str], body: bytes) -> None:
        gone = self.google.objects.pop(key, None)
        self.answer(204 if gone else 404)

    def listing(self, asked: dict[str, str]) -> None:
        with self.google.lock:
            after = max(asked.get("start-after", ""), asked.get("continuation-token", ""))
            names = [n for n in sorted(self.google.objects) if n.startswith(asked.get("prefix", "")) and n > after]
            page = names[: int(asked.get("max-keys", 1000))]
            objects = [(name, self.google.objects[name]) for name in page]
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(one.data)}</Size><ETag>{escape(one.tag)}</ETag>"
            f"<LastModified>{one.changed.isoformat()}</LastModified></Contents>"
            for name, one in objects
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(page) < len(names) else ""
        self.answer(200, f"<ListBucketResult>{rows}{more}</ListBucketResult>".encode())


@contextmanager
def google_server() -> Iterator[Google]:
    """A server with one empty bucket."""
    google = Google()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Asked, google))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that go away
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True)
    thread.start()
    google.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield google
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
