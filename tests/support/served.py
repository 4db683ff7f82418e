"""A page over folders of made-up runs, asked without a network, or by a real server in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from daguerre.queue.queue import Queue
from daguerre.remote.copies import Copies
from daguerre.serve import server
from daguerre.serve.app import application
from daguerre.serve.catalog import Catalog, identity
from daguerre.serve.gate import Rules
from daguerre.serve.site import Site

HERE = "http://127.0.0.1:8800"


def site(folder: Path, *roots: Path, copies: Copies | None = None, **rules: Any) -> Site:
    whole = folder.resolve()
    catalog = Catalog(whole, (whole, *(root.resolve() for root in roots)), copies)
    # However busy the machine is, an answer is whole.
    return Site(catalog, Rules(**rules), queue_of(folder), patience_seconds=600.0)


def queue_of(folder: Path) -> Queue:
    """The queue of a page over a folder: next to it."""
    return Queue(folder.resolve().with_name(f"{folder.name}-queue"))


@contextmanager
def asked(folder: Path, *roots: Path, **rules: Any) -> Iterator[TestClient]:
    """A client of the page."""
    with TestClient(application(site(folder, *roots, **rules)), HERE, follow_redirects=False) as client:
        yield client


def address(folder: Path, run: str) -> str:
    return f"/run/{identity(folder.resolve() / run, folder.resolve())}/"


@contextmanager
def running(folder: Path, **rules: Any) -> Iterator[str]:
    """The address of a real server, which ends with the block."""
    own = site(folder, **rules)
    over = threading.Event()
    with server.listening("127.0.0.1", 0) as (socket, port):
        thread = threading.Thread(target=server.serve, args=(own, socket), kwargs={"ended": over})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            over.set()
            thread.join(20)
    assert not thread.is_alive()
