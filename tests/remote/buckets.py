"""Object stores for tests of runs in them: moto's S3 behind the proxy, and a store in memory in the place of GCS.

The latter has the semantics that Google's has (creation and replacement under a condition, tags that are no digests)
and none of its protocol; google_store.py has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from faulty_store import S3, environment, s3_server
from google_store import google_server
from obstore.store import MemoryStore

from daguerre.storage import clients
from daguerre.storage.bucket import Prefix, prefix
from daguerre.storage.clients import Client
from daguerre.storage.location import Location


def in_memory(patch: pytest.MonkeyPatch) -> dict[str, MemoryStore]:
    """Every bucket of gs:// is one in memory."""
    stores: dict[str, MemoryStore] = {}

    def opened(place: Location, made: Any) -> Client:
        return Client(stores.setdefault(place.bucket, MemoryStore()), "a store in memory")  # type: ignore[arg-type]

    patch.setattr(clients, "_gs", opened)
    clients.forget()
    return stores


@pytest.fixture(scope="module")
def moto() -> Iterator[S3]:
    """One server for a file of tests; each test takes a prefix of its own."""
    with s3_server() as store:
        yield store


@pytest.fixture
def s3_run(moto: S3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Prefix]:
    """A place for a run of this test, in S3."""
    with environment(monkeypatch, AWS_ENDPOINT_URL=moto.proxy.url):
        moto.proxy.seen.clear()
        yield prefix(f"s3://{moto.bucket}/{request.node.name}/run")
        moto.proxy.faults = type(moto.proxy.faults)()


def _place(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Iterator[Prefix]:
    if request.param == "s3":
        yield request.getfixturevalue("s3_run")
        return
    if request.param == "google":
        yield from _google(patch)
        return
    in_memory(patch)
    yield prefix("gs://bucket/runs/run")
    clients.forget()


def _google(patch: pytest.MonkeyPatch) -> Iterator[Prefix]:
    """Through Google's protocol, as far as google_store.py speaks it."""
    with google_server() as google, environment(patch, GOOGLE_BASE_URL=google.url, GOOGLE_BEARER_TOKEN="t0ken"):
        yield prefix("gs://bucket/runs/run")


@pytest.fixture(params=["gs", "s3", "google"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefix]:
    """A place for a run of this test, in both kinds of store."""
    yield from _place(request, monkeypatch)


@pytest.fixture(params=["gs", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("s3", "google"))])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefix]:
    """The same, for tests of many requests: moto answers one in some 20 ms, so that its turn is a long test."""
    yield from _place(request, monkeypatch)
