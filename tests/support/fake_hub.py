"""A model hub on the loopback: the few requests that huggingface_hub makes to fetch and to publish a model, and some
faults."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"


@dataclass
class Hub:
    """What the server holds and how it behaves; tests change it while it runs."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Content by repository and file."""
    commit: str = COMMIT
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    """The one that opens gated repositories."""
    cut_once: dict[str, int] = field(default_factory=dict)
    """Bytes after which the answer for a file breaks off, the first time."""
    damaged: set[str] = field(default_factory=set)
    """Files that arrive with another last byte."""
    answers: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request, with the range that was asked for."""
    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    """Of the repositories that were created here."""
    licences: dict[str, str] = field(default_factory=dict)
    """That the cards of repositories name."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Large files that were sent, by their sha256."""
    sent: list[str] = field(default_factory=list)
    """The sha256 of each large file that was sent, in order."""
    room: int | None = None
    """Large files that are still taken; others are refused."""
    hold: threading.Event | None = None
    """Large files but the first are answered when it is set."""
    commits: list[dict[str, str]] = field(default_factory=list)

    def add(self, repository: str, folder: Path) -> None:
        """All files of a folder."""
        paths = [path for path in folder.rglob("*") if path.is_file()]
        self.files[repository] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

    def fetched(self, name: str) -> list[str]:
        """Ranges of the requests for a file's content."""
        return [
            path.partition(" ")[2] for method, path in self.answers if method == "GET" and f"/{name} " in f"{path} "
        ]


def _facts(name: str, content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    large = {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 134}
    lfs = {"lfs": large} if name.endswith((".safetensors", ".bin", ".ckpt")) else {}
    return {"size": len(content), **lfs}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def do_PUT(self) -> None:
            data, oid = self.read(), self.path.rpartition("/")[2]
            hub.answers.append(("PUT", self.path))
            if hub.hold is not None and hub.sent:
                hub.hold.wait(60)
            whole = hashlib.sha256(data).hexdigest() == oid
            if hub.room == 0 or not whole:
                self.send(400, b"no room", {}, True)
                return
            hub.room = None if hub.room is None else hub.room - 1
            hub.blobs[oid] = data
            hub.sent.append(oid)
            self.send(200, b"", {}, True)

        def do_POST(self) -> None:
            hub.answers.append(("POST", self.path))
            data, words = self.read(), unquote(urlsplit(self.path).path).strip("/").split("/")
            if words[:2] == ["api", "validate-yaml"]:
                self.tell({"errors": [], "warnings": []})
            elif self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.send(401, b"{}", {}, True)
            elif words == ["api", "repos", "create"]:
                self.create(json.loads(data))
            elif words[4:5] == ["preupload"]:
                self.tell({"files": [self.way(file["path"]) for file in json.loads(data)["files"]]})
            elif words[-2:] == ["objects", "batch"]:
                self.tell({"transfer": "basic", "objects": [self.place(o) for o in json.loads(data)["objects"]]})
            elif words[4:5] == ["commit"]:
                self.commit("/".join(words[2:4]), [json.loads(line) for line in data.splitlines()])
            else:
                self.send(404, b"{}", {}, True)

        def read(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        def tell(self, document: object) -> None:
            self.send(200, json.dumps(document).encode(), {"Content-Type": "application/json"}, True)

        def create(self, asked: dict[str, object]) -> None:
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else str(asked["name"])
            if name in hub.files:
                self.send(409, json.dumps({"url": f"{hub.url}/{name}"}).encode(), {}, True)
                return
            hub.files[name] = {}
            hub.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
            self.tell({"url": f"{hub.url}/{name}", "name": name})

        def way(self, path: str) -> dict[str, object]:
            large = path.endswith((".safetensors", ".png"))
            return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

        def place(self, one: dict[str, object]) -> dict[str, object]:
            there = one["oid"] in hub.blobs
            actions = {} if there else {"actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
            return {**one, "authenticated": True, **actions}

        def commit(self, repository: str, lines: list[dict[str, dict[str, str]]]) -> None:
            files = hub.files[repository]
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    hub.commits.append(value)
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.blobs[value["oid"]]
            url = f"{hub.url}/{repository}/commit/{hub.commit}"
            self.tell({"success": True, "commitOid": hub.commit, "commitUrl": url})

        def answer(self, body: bool) -> None:
            wanted = self.headers.get("Range", "")
            hub.answers.append((self.command, f"{self.path} {wanted}".strip()))
            words = unquote(urlsplit(self.path).path).strip("/").split("/")
            if words[:2] == ["api", "models"]:
                self.about("/".join(words[2:4]), words[4:], body)
            elif len(words) > 4 and words[2] == "resolve":
                self.content("/".join(words[:2]), words[3], "/".join(words[4:]), body)
            else:
                self.send(404, b"", {}, body)

        def refused(self, repository: str, revision: str, body: bool) -> bool:
            code = None
            if repository not in hub.files:
                code = (401, "RepoNotFound")
            elif repository in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
                code = (403, "GatedRepo")
            elif revision not in ("main", hub.commit):
                code = (404, "RevisionNotFound")
            if code is not None:
                self.send(code[0], b"{}", {"X-Error-Code": code[1], "X-Error-Message": code[1]}, body)
            return code is not None

        def about(self, repository: str, rest: list[str], body: bool) -> None:
            if self.refused(repository, rest[1] if len(rest) > 1 else "main", body):
                return
            listed = hub.files[repository].items()
            if rest[:1] == ["tree"]:
                found: object = [{"type": "file", "path": n, "oid": "0" * 40, **_facts(n, c)} for n, c in listed]
            else:
                siblings = [{"rfilename": n, "blobId": "0" * 40, **_facts(n, c)} for n, c in listed]
                found = {"id": repository, "sha": hub.commit, "private": False, "siblings": siblings}
                found |= {"downloads": 0, "likes": 0, "tags": []}
                if repository in hub.licences:
                    found["cardData"] = {"license": hub.licences[repository]}
            self.send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body)

        def content(self, repository: str, revision: str, name: str, body: bool) -> None:
            if self.refused(repository, revision, body):
                return
            if name not in hub.files[repository]:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                return
            whole = hub.files[repository][name]
            headers = {"X-Repo-Commit": hub.commit, "ETag": f'"{hashlib.sha256(whole).hexdigest()}"'}
            headers["X-Linked-Size"] = str(len(whole))
            sent = whole[:-1] + bytes([whole[-1] ^ 1]) if name in hub.damaged else whole
            start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
            self.send(
                206 if start else 200, sent[start:], headers, body, hub.cut_once.pop(name, None) if body else None
            )

        def send(self, code: int, data: bytes, headers: dict[str, str], body: bool, cut: int | None = None) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data[:cut])
            if cut is not None:
                self.close_connection = True

    return Handler


@contextmanager
def running() -> Iterator[Hub]:
    """A hub on a free port."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
