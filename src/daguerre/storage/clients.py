"""Connections to object stores and web servers, one a bucket and process: credentials, endpoints, time-outs.

Credentials come from where each store's own tools take them; without any, requests go unsigned, for public buckets.
"""

from __future__ import annotations

import ipaddress
import os
import re
from base64 import b64encode
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import GCSStore, HTTPStore, S3Store

from daguerre.storage.errors import StoreError
from daguerre.storage.location import STORES, WEB, Location, redacted
from daguerre.threads import made_once

if TYPE_CHECKING:
    from obstore.store import GCSConfig, S3Config

Store = S3Store | GCSStore | HTTPStore


@dataclass(frozen=True)
class Patience:
    """Bounds on retries. Tests set `PATIENCE` to a shorter one and call `forget`."""

    attempts: int = 10
    """Requests for the same bytes, after which the fault is reported."""
    first_pause_seconds: float = 0.1
    """Before the second request; then it doubles."""
    longest_pause_seconds: float = 5.0
    connect_seconds: float = 5.0
    """Longest wait for a connection."""
    stall_seconds: float = 10.0
    """Longest wait for the next bytes of an answer."""
    sending_seconds: float = 60.0
    """Longest time for sending a part of a file, with its answer."""
    unreachable_seconds: float = 12.0
    """A store that has never answered counts as unreachable after that time and two attempts."""


PATIENCE = Patience()
_PLAIN = re.compile(r"(https?://[A-Za-z0-9.:\[\]-]+/)((?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*)")
_PART_RETRIES = 2
"""Retries of a part of a large file; the caller retries the whole file."""
_MACHINE = Path("/sys/class/dmi/id/product_name")


@dataclass(frozen=True)
class Client:
    """A connected store."""

    store: Store
    access: str
    """Endpoint, region and source of the credentials, for messages."""
    answered: Event = field(default_factory=Event, compare=False)
    """Set once it has answered: from then on, silence may pass."""


def client(location: Location, writing: bool = False) -> Client:
    """The connection to a file's store. StoreError if the environment's settings cannot be used.

    The one for writing waits longer, and retries parts of a large file by itself.
    """
    return _opened(_parts(location)[0], writing and location.scheme in STORES)


def path_in(location: Location) -> str:
    """The file's name within its `client`."""
    return _parts(location)[1]


def _parts(location: Location) -> tuple[str, str]:
    """The root of the connection and the name in it: a bucket and a key; a host and a plain path; else the address, as
    the library would rewrite escapes and queries."""
    if location.scheme not in WEB:
        return f"{location.scheme}://{location.bucket}/", location.key
    plain = _PLAIN.fullmatch(location.url)
    return (plain[1], plain[2]) if plain else (location.url, "")


def forget() -> None:
    """Closes all connections, so that changed credentials, endpoints and time-outs take effect."""
    _opened.cache_clear()


@made_once(64)
def _opened(root: str, writing: bool) -> Client:
    location = Location(root)
    if location.scheme not in STORES:
        return _web(location)
    return (_s3 if location.scheme == "s3" else _gs)(location, writing)


def _options(allow_http: bool, writing: bool = False) -> dict[str, Any]:
    backoff = {
        "init_backoff": timedelta(seconds=PATIENCE.first_pause_seconds),
        "max_backoff": timedelta(seconds=PATIENCE.longest_pause_seconds),
    }
    retries = _PART_RETRIES if writing else 0
    return {
        "client_options": {
            "allow_http": allow_http,
            "connect_timeout": timedelta(seconds=PATIENCE.connect_seconds),
            "read_timeout": timedelta(seconds=PATIENCE.sending_seconds if writing else PATIENCE.stall_seconds),
            "timeout": timedelta(hours=1),
        },
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(minutes=2), "backoff": backoff},
    }


def _s3(location: Location, writing: bool) -> Client:
    # Late: AWS's library takes long to load, and most commands ask no store of its kind.
    from daguerre.storage import aws

    found = aws.access(location)
    config: S3Config = {"region": found.region}
    if found.endpoint:
        config["endpoint"] = found.endpoint
    if found.provider is None:
        config["skip_signature"] = True
    options = _options(_plain_http(location, found.endpoint, "AWS_ALLOW_HTTP"), writing)
    store = S3Store(location.bucket, config=config, credential_provider=found.provider, **options)
    return Client(store, f"{_endpoint_name(found.endpoint)}, region {found.region}, {found.credentials}")


def _gs(location: Location, writing: bool) -> Client:
    endpoint = os.environ.get("GOOGLE_BASE_URL")
    credentials = _gs_credentials()
    config: GCSConfig = {} if credentials else {"skip_signature": True}
    if endpoint:
        config["base_url"] = endpoint
    options = _options(_plain_http(location, endpoint, "GOOGLE_ALLOW_HTTP"), writing)
    try:
        store = GCSStore(location.bucket, config=config, **options)
    except BaseError:  # its words may hold a key
        what = f"the credentials from {credentials or 'GOOGLE_BASE_URL'} cannot be read: check the file or the value"
        raise StoreError(location, what) from None
    none = "no credentials found: GOOGLE_APPLICATION_CREDENTIALS"
    origin = f"credentials from {credentials}" if credentials else none
    return Client(store, f"{_endpoint_name(endpoint)}, {origin}")


def _gs_credentials() -> str | None:
    """The place where Google's libraries would find credentials; None if nowhere."""
    if os.environ.get("GOOGLE_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return None
    account = ("SERVICE_ACCOUNT", "SERVICE_ACCOUNT_PATH", "SERVICE_ACCOUNT_KEY")
    for name in (*account, "APPLICATION_CREDENTIALS", "BEARER_TOKEN"):
        if os.environ.get(f"GOOGLE_{name}"):
            return f"GOOGLE_{name}"
    if (Path.home() / ".config/gcloud/application_default_credentials.json").is_file():
        return "gcloud's application default"
    if os.environ.get("GCE_METADATA_HOST") or (_MACHINE.is_file() and "Google" in _MACHINE.read_text(encoding="utf-8")):
        return "the machine's service account"
    return None


def _web(location: Location) -> Client:
    host = urlsplit(location.url)
    options = _options(host.scheme == "http")
    if host.username is not None:
        if host.scheme == "http" and not _loopback(host.hostname):
            raise StoreError(location, "would send user and password unencrypted: write https://")
        pair = f"{unquote(host.username)}:{unquote(host.password or '')}"
        options["client_options"]["default_headers"] = {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
    address = host._replace(netloc=host.netloc.rpartition("@")[2], fragment="").geturl()
    return Client(HTTPStore(address, **options), f"host {host.hostname}")


def _plain_http(location: Location, endpoint: str | None, variable: str) -> bool:
    """True if an endpoint without encryption may be used: on this machine, or if the environment allows it."""
    if not endpoint or urlsplit(endpoint).scheme != "http":
        return False
    if _loopback(urlsplit(endpoint).hostname) or os.environ.get(variable, "").lower() in ("1", "true"):
        return True
    what = f"would be read over an unencrypted connection ({redacted(endpoint)})"
    raise StoreError(location, f"{what}: write https://, or set {variable}=true")


def _loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _endpoint_name(endpoint: str | None) -> str:
    return f"endpoint {redacted(endpoint)}" if endpoint else "the store's own endpoint"
