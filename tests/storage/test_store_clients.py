"""Who asks, and where: credentials from every usual place, endpoints, regions, and what is refused."""

import http.server
import json
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from faulty_store import ACCESS_KEY, SECRETS, Faults, environment, s3, web_server  # noqa: F401

from daguerre.errors import UserError
from daguerre.storage import aws, clients
from daguerre.storage import io as storage_io
from daguerre.storage.errors import StoreError
from daguerre.storage.expand import expand
from daguerre.storage.location import Location

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@pytest.fixture
def stranger(s3, monkeypatch):  # noqa: F811
    """The store, and an environment without any credentials."""
    for name in KEYS:
        monkeypatch.delenv(name)
    s3.put("x.tar", b"0123456789")
    s3.boto().put_object(Bucket=s3.bucket, Key="public.tar", Body=b"0123456789", ACL="public-read")
    clients.forget()
    return s3


def signer(store) -> str:
    """The key that the last request was signed with; nothing if it was not."""
    found = store.proxy.seen[-1].authorization
    return found.partition("Credential=")[2].partition("/")[0]


def access(store) -> str:
    return clients.client(Location(f"s3://{store.bucket}/x.tar")).access


def test_credentials_of_the_environment(s3):  # noqa: F811
    s3.put("x.tar", b"0123456789")
    assert storage_io.read(Location("s3://bucket/x.tar"), 2, 3) == b"234"
    assert signer(s3) == ACCESS_KEY
    assert "credentials from the environment" in access(s3)


def test_credentials_endpoint_and_region_of_the_aws_folder(stranger, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=AKIADEFAULT\naws_secret_access_key=a\n"
        "[mine]\naws_access_key_id=AKIAMINE\naws_secret_access_key=b\naws_session_token=c\n"
    )
    (tmp_path / "config").write_text(
        f"[default]\nregion=eu-north-1\nendpoint_url={stranger.proxy.url}\n"
        "[profile mine]\nregion=us-west-2\nservices=here\n"
        f"[services here]\ns3 =\n  endpoint_url = {stranger.proxy.url}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for profile, key, region in ((None, "AKIADEFAULT", "eu-north-1"), ("mine", "AKIAMINE", "us-west-2")):
        if profile:
            monkeypatch.setenv("AWS_PROFILE", profile)
        clients.forget()
        assert storage_io.read(Location("s3://bucket/x.tar"), 2, 3) == b"234"
        assert signer(stranger) == key
        assert f"/{region}/s3/" in stranger.proxy.seen[-1].authorization
        assert (
            access(stranger) == f"endpoint {stranger.proxy.url}/, region {region}, credentials from ~/.aws/credentials"
        )


class _Instance(http.server.BaseHTTPRequestHandler):
    """What a virtual machine asks for its role's credentials."""

    def log_message(self, *_):
        pass

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_PUT(self):
        self._answer("a-token")

    def do_GET(self):
        role = {
            "Code": "Success",
            "AccessKeyId": "AKIAOFTHEROLE",
            "SecretAccessKey": "a",
            "Token": "b",
            "Expiration": "2099-01-01T00:00:00Z",
        }
        self._answer(json.dumps(role) if self.path.endswith("/trainer") else "trainer")


@contextmanager
def instance():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Instance)
    threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_credentials_of_an_instance_role(stranger, monkeypatch):
    with instance() as address:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)
        assert storage_io.read(Location("s3://bucket/x.tar"), 2, 3) == b"234"
    assert signer(stranger) == "AKIAOFTHEROLE"
    assert "credentials from the instance's role" in access(stranger)


def test_a_public_object_needs_no_credentials(stranger):
    assert storage_io.read(Location("s3://bucket/public.tar"), 2, 3) == b"234"
    assert stranger.proxy.seen[-1].authorization == ""


def test_without_credentials_a_refusal_says_that_there_were_none(stranger):
    with pytest.raises(storage_io.StoreError) as refused:
        storage_io.read(Location("s3://bucket/x.tar"), 2, 3)
    assert "may not be read: HTTP 403" in str(refused.value)
    assert "no credentials found in the environment, ~/.aws or the instance's role" in str(refused.value)
    assert "Only public buckets can be read without credentials" in str(refused.value)


def test_signatures_can_be_left_away(s3, monkeypatch):  # noqa: F811
    s3.boto().put_object(Bucket=s3.bucket, Key="public.tar", Body=b"0123456789", ACL="public-read")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    clients.forget()
    assert storage_io.read(Location("s3://bucket/public.tar"), 2, 3) == b"234"
    assert s3.proxy.seen[-1].authorization == ""


class _Refusing(http.server.BaseHTTPRequestHandler):
    """Answers as AWS does, with what it was sent in the answer."""

    status, code = 403, "InvalidAccessKeyId"

    def log_message(self, *_):
        pass

    def do_GET(self):
        sent = "".join(f"<{name}>{value}</{name}>" for name, value in self.headers.items())
        body = f"<Error><Code>{self.code}</Code><Region>eu-west-1</Region><Key>{SECRETS}</Key>{sent}</Error>"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    do_HEAD = do_PUT = do_GET


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (
            403,
            "InvalidAccessKeyId",
            ["may not be read: HTTP 403 InvalidAccessKeyId", "credentials from the environment"],
        ),
        (403, "ExpiredToken", ["HTTP 403 ExpiredToken", "have not expired", "AWS_SKIP_SIGNATURE=true"]),
        (400, "AuthorizationHeaderMalformed", ["is in another region (eu-west-1): set AWS_REGION"]),
        (301, "PermanentRedirect", ["is in another region: set AWS_REGION", "region us-east-1"]),
        (418, "Teapot", ["cannot be read: the server answered HTTP 418 Teapot"]),
    ],
)
def test_refusals_of_a_store_are_told_without_its_words(monkeypatch, status, code, said):
    handler = type("Refusing", (_Refusing,), {"status": status, "code": code})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
        with environment(monkeypatch, AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_address[1]}"):
            for request in (
                lambda: storage_io.read(Location("s3://bucket/x"), 0, 9),
                lambda: expand("s3://bucket/*.tar"),
            ):
                with pytest.raises((storage_io.StoreError, UserError)) as refused:
                    request()
                for words in ("data.path: s3://bucket/", *said):
                    assert words in str(refused.value)
                told = repr(refused.value) + str(refused.value) + repr(refused.value.__context__)
                assert not any(secret in told for secret in (*SECRETS, "Signature=", "AWS4-HMAC"))
        server.shutdown()


def test_credentials_that_cannot_be_loaded(stranger, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    clients.forget()
    with pytest.raises(storage_io.StoreError, match=r"no usable AWS settings \(ProfileNotFound\).*AWS_PROFILE"):
        storage_io.size(Location("s3://bucket/x.tar"))


def test_half_a_pair_of_credentials(stranger, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAHALF")
    clients.forget()
    with pytest.raises(storage_io.StoreError, match=r"no usable AWS settings \(PartialCredentialsError\)"):
        storage_io.size(Location("s3://bucket/x.tar"))


@pytest.mark.parametrize(
    ("endpoint", "allowed"),
    [
        ("http://127.0.0.1:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://store.example", False),
        ("http://user:pa55word@store.example", False),
        ("https://store.example", True),
    ],
)
def test_unencrypted_only_on_this_machine(monkeypatch, endpoint, allowed):
    place = Location("s3://bucket/x.tar")
    with environment(monkeypatch, AWS_ENDPOINT_URL=endpoint):
        if allowed:
            assert clients.client(place)
            return
        with pytest.raises(
            storage_io.StoreError, match=r"unencrypted connection \(http://store\.example/\).*AWS_ALLOW_HTTP"
        ) as no:
            clients.client(place)
        assert "pa55" not in str(no.value)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        assert "pa55" not in clients.client(place).access


def test_one_connection_a_bucket_and_process(s3):  # noqa: F811
    first = clients.client(Location("s3://bucket/a"))
    assert clients.client(Location("s3://bucket/b/c")) is first
    assert clients.client(Location("s3://other/a")) is not first
    clients.forget()
    assert clients.client(Location("s3://bucket/a")) is not first


@pytest.mark.parametrize(
    ("url", "connected", "name"),
    [
        ("https://host/a/b-1_2.tar", "https://host/", "a/b-1_2.tar"),
        ("http://[::1]:80/a.tar", "http://[::1]:80/", "a.tar"),
        ("https://host/a%20b.tar", "https://host/a%20b.tar", ""),
        ("https://host/a/../b.tar", "https://host/a/../b.tar", ""),
        ("https://host/a//b.tar", "https://host/a//b.tar", ""),
        ("https://host/a.tar?x=1", "https://host/a.tar?x=1", ""),
        ("https://u:p@host/a.tar", "https://u:p@host/a.tar", ""),
        ("https://host/é~+.tar", "https://host/é~+.tar", ""),
    ],
)
def test_one_connection_a_host_where_the_address_stays_as_it_is(url, connected, name):
    place = Location(url)
    assert (clients._parts(place)[0], clients.path_in(place)) == (connected, name)


def test_addresses_are_asked_for_as_they_are_written(tmp_path, monkeypatch):
    with web_server(tmp_path) as web, environment(monkeypatch):
        for path in ("/a/b-1_2.tar", "/a.tar?x=1&y=%2F", "/a%20b%2Fc.tar", "/a+b~.tar"):
            assert not storage_io.exists(Location(web.url + path))
            assert web.seen[-1].path == path


def test_the_region_is_asked_for_where_no_setting_says_it(s3, monkeypatch):  # noqa: F811
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    west = {"LocationConstraint": "us-west-2"}
    s3.boto().create_bucket(Bucket="west", CreateBucketConfiguration=west)
    real = aws.boto3.Session.client
    monkeypatch.setattr(
        aws.boto3.Session, "client", lambda own, *a, **more: real(own, *a, endpoint_url=s3.proxy.url, **more)
    )
    assert "region us-west-2" in clients.client(Location("s3://west/x")).access
    assert "region us-east-1" in clients.client(Location("s3://nobucket/x")).access
    s3.proxy.faults = Faults(1.0, ("error",))
    clients.forget()
    assert "region us-east-1" in clients.client(Location("s3://west/x")).access


@pytest.fixture
def google(s3, monkeypatch, tmp_path):  # noqa: F811
    """A store that speaks Google's dialect of the same interface, without credentials."""
    for name in (
        "SERVICE_ACCOUNT",
        "SERVICE_ACCOUNT_PATH",
        "SERVICE_ACCOUNT_KEY",
        "APPLICATION_CREDENTIALS",
        "BEARER_TOKEN",
    ):
        monkeypatch.delenv(f"GOOGLE_{name}", raising=False)
    monkeypatch.setenv("GOOGLE_BASE_URL", s3.proxy.url)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(clients, "_MACHINE", Path("/nonexistent"))
    return s3


def test_google_storage(google, tmp_path):
    google.boto().put_bucket_acl(Bucket=google.bucket, ACL="public-read")
    for name in ("00", "01"):
        google.boto().put_object(Bucket=google.bucket, Key=f"set/{name}.tar", Body=b"0123456789", ACL="public-read")
    assert [place.url for place in expand("gs://bucket/set/*.tar")] == [
        "gs://bucket/set/00.tar",
        "gs://bucket/set/01.tar",
    ]
    google.proxy.faults = Faults(0.3)
    place = Location("gs://bucket/set/00.tar")
    assert storage_io.read(place, 2, 3, twice=True) == b"234"
    storage_io.fetch(place, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"0123456789"
    assert google.proxy.seen[-1].authorization == ""


def test_google_storage_refuses(google):
    google.put("x.tar", b"x")
    with pytest.raises(
        storage_io.StoreError, match=r"gs://bucket/x\.tar may not be read: HTTP 403.*no credentials found"
    ):
        storage_io.read(Location("gs://bucket/x.tar"), 0, 1)


def test_google_credentials_of_the_environment(google, monkeypatch):
    google.put("x.tar", b"0123456789")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "t0ken")
    clients.forget()
    assert "credentials from GOOGLE_BEARER_TOKEN" in clients.client(Location("gs://bucket/x.tar")).access
    assert storage_io.read(Location("gs://bucket/x.tar"), 2, 3) == b"234"
    assert google.proxy.seen[-1].authorization == "Bearer t0ken"
    google.proxy.faults = Faults(1.0, ("error",))
    with pytest.raises(storage_io.StoreError) as refused:
        storage_io.read(Location("gs://bucket/x.tar"), 0, 1)
    assert "t0ken" not in str(refused.value)


@pytest.mark.parametrize("name", ["APPLICATION_CREDENTIALS", "SERVICE_ACCOUNT", "SERVICE_ACCOUNT_KEY"])
def test_google_credentials_that_cannot_be_read(google, tmp_path, monkeypatch, name):
    clients.forget()
    monkeypatch.setenv(f"GOOGLE_{name}", str(tmp_path / "s3cret.json"))
    with pytest.raises(StoreError, match=f"credentials from GOOGLE_{name} cannot be read") as caught:
        clients.client(Location("gs://bucket/x.tar"))
    assert "s3cret" not in str(caught.value)
