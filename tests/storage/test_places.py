"""What a path setting means, and what is refused with words that help."""

import os
from pathlib import Path

import pytest
from faulty_store import SECRETS, Faults, s3  # noqa: F401

from daguerre import credentials
from daguerre.errors import UserError
from daguerre.storage import expand as storage_expand
from daguerre.storage import io as storage_io
from daguerre.storage.errors import BadName
from daguerre.storage.expand import expand
from daguerre.storage.location import Location, redacted


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """part-000.tar to part-004.tar, their indexes, and a folder inside."""
    folder = tmp_path / "set"
    (folder / "more").mkdir(parents=True)
    for i in range(5):
        (folder / f"part-{i:03}.tar").write_bytes(b"x")
        (folder / f"part-{i:03}.tar.index").write_bytes(b"x")
    (folder / "more" / "part-005.tar").write_bytes(b"x")
    (folder / ".part-009.tar").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    return folder


def names(given, **more) -> list[str]:
    return [os.path.basename(place.url) for place in expand(given, **more)]


FIVE = [f"part-{i:03}.tar" for i in range(5)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("set/part-{000..004}.tar", FIVE),
        ("set/part-{003..001}.tar", ["part-003.tar", "part-002.tar", "part-001.tar"]),
        ("set/part-{000,002}.tar", ["part-000.tar", "part-002.tar"]),
        (
            "set/part-00{0..1}.t{ar,ar.index}",
            ["part-000.tar", "part-000.tar.index", "part-001.tar", "part-001.tar.index"],
        ),
        ("set/part-*.tar", FIVE),
        ("set/part-*", FIVE),
        ("set/part-00?.tar", FIVE),
        ("set/part-00[13].tar", ["part-001.tar", "part-003.tar"]),
        ("set/**/*.tar", ["part-005.tar", *FIVE]),
        ("set", FIVE),
        ("set/", FIVE),
        ("./set/../set/part-000.tar", ["part-000.tar"]),
        ("file:set/part-000.tar", ["part-000.tar"]),
        ("pipe:cat set/part-{000..001}.tar", ["part-000.tar", "part-001.tar"]),
        ("set/part-003.tar::set/part-000.tar", ["part-003.tar", "part-000.tar"]),
        (
            ["set/part-003.tar", "set/part-{000..001}.tar", "set/more"],
            ["part-003.tar", "part-000.tar", "part-001.tar", "part-005.tar"],
        ),
        ((" set/part-003.tar ",), ["part-003.tar"]),
    ],
)
def test_local_spellings(shards, given, expected):
    assert names(given) == expected


def test_a_local_place_is_absolute_and_knows_its_path(shards):
    (place,) = expand("set/part-000.tar")
    assert place.local == shards / "part-000.tar"
    assert place.name == str(shards / "part-000.tar")


@pytest.mark.parametrize(
    "form", ["file:{}", "file://{}", "file://localhost{}", "FILE://{}", "pipe:cat '{}'", "pipe: cat {}"]
)
def test_file_addresses_are_paths(shards, form):
    assert expand(form.format(shards / "part-000.tar")) == [Location(str(shards / "part-000.tar"))]


def test_a_file_address_may_be_percent_encoded(shards):
    (shards / "a b.tar").write_bytes(b"x")
    (shards / "c%20d.tar").write_bytes(b"x")
    assert names(f"file://{shards}/a%20b.tar") == ["a b.tar"]
    assert names(f"file://{shards}/c%20d.tar") == ["c%20d.tar"]


def test_home_is_a_tilde(shards, monkeypatch):
    monkeypatch.setenv("HOME", str(shards))
    assert expand("~/part-000.tar") == [Location(str(shards / "part-000.tar"))]


@pytest.mark.parametrize("name", ["a{0..1}.tar", "a[1].tar", "a*.tar", "a{.tar", "a::b.tar", "a?b.tar"])
def test_a_file_of_exactly_that_name_is_meant(shards, name):
    (shards / name).write_bytes(b"x")
    assert names(f"set/{name}") == [name]


def test_other_suffixes(shards):
    assert names("set", suffixes=(".txt", ".csv")) == ["notes.txt"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", ["it is empty"]),
        ([], ["it is empty"]),
        (
            "set/part-{000..009}.tar",
            ["10 files, of which 5 do not exist", "part-005.tar", "part-006.tar", "part-007.tar", "..."],
        ),
        ("set/prat-000.tar", ["there is no 'set/prat-000.tar'", "seen from", "part-000.tar"]),
        ("set/sub/deep/x.tar", ["there is no", "nearest folder that exists is", "/set'", "13 entries"]),
        ("set/x*.tar", ["nothing matches 'set/x*.tar'", "/set'"]),
        ("set/**/x*.tar", ["nothing matches"]),
        ("nowhere", ["there is no 'nowhere'"]),
        ("set/part-000.tar::", ["one of the names is empty"]),
        (["set/part-000.tar", " "], ["one of the names is empty"]),
        ("a\0b.tar", ["there is no"]),
        ("set/part-{000..", ["missing closing brace"]),
        (["set/part-000.tar", "set/part-*.tar"], ["part-000.tar is listed twice", "repeats"]),
        ("file://host/x.tar", ["another machine"]),
        ("file:", ["names no file"]),
        ("az://container/x.tar", ["az:// is not supported", "Azure", "s3://"]),
        ("abfss://c@account/x.tar", ["abfss:// is not supported", "Azure"]),
        ("s3a://bucket/x.tar", ["write s3://"]),
        ("gcs://bucket/x.tar", ["write gs://"]),
        ("hf://datasets/a/b.tar", ["https://huggingface.co"]),
        ("ftp://host/x.tar", ["s3://, gs://, http:// and https://"]),
        ("https://host/part-*.tar", ["web servers do not list", "range"]),
        ("https://host/part-[01].tar", ["web servers do not list"]),
        ("https://host/part-????.tar", ["web servers do not list"]),
        ("https://host/folder/", ["web servers do not list"]),
        ("https://host", ["the address of a file"]),
        ("https:///x.tar", ["the address of a file"]),
        ("s3:///x.tar", ["s3://BUCKET/KEY"]),
        ("s3://b*/x.tar", ["s3://BUCKET/KEY"]),
        ("s3://key:sec/ret@bucket/x.tar", ["s3://BUCKET/KEY", "credentials come from the environment"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_setting(shards, given, said):
    with pytest.raises(UserError) as refused:
        expand(given, setting="data.sources.a.path")
    message = str(refused.value)
    assert message.startswith("data.sources.a.path: ")
    for words in said:
        assert words in message, message


def test_a_range_without_measure_is_refused(shards, monkeypatch):
    monkeypatch.setattr(storage_expand, "FILES_LIMIT", 1000)
    with pytest.raises(UserError, match="names more than 1,000 files"):
        expand("set/part-{000..9999999999}.tar")


def test_a_folder_without_shards_says_what_is_in_it(shards):
    (shards / "more" / "part-005.tar").rename(shards / "more" / "part-005.zip")
    with pytest.raises(
        UserError, match=r"ends in \.tar; found: part-005\.zip\. For files in folders inside it write .*\*\*/\*\.tar"
    ):
        expand("set/more")


def test_a_folder_that_may_not_be_read(shards, monkeypatch):
    monkeypatch.setattr(storage_expand.os, "access", lambda *_: False)
    with pytest.raises(UserError, match=r"'set/more' cannot be read"):
        expand("set/more")


def test_a_link_that_leads_nowhere(shards):
    (shards / "dead.tar").symlink_to("gone")
    with pytest.raises(UserError, match="a broken link"):
        expand("set/dead.tar")


def test_a_name_that_is_no_text_can_be_shown(shards):
    strange = os.fsdecode(b"caf\xe9.tar")
    (shards / strange).write_bytes(b"x")
    (place,) = expand(f"set/{strange}")
    assert place.name.endswith(r"caf\udce9.tar")
    place.name.encode("utf-8")


def test_web_addresses_stay_as_they_are():
    given = "https://user:pa55@host:8443/a%20b/part-{000..001}.tar?X-Amz-Signature=s1gn#top"
    expanded = expand(given)
    assert [place.url for place in expanded] == [
        f"https://user:pa55@host:8443/a%20b/part-00{i}.tar?X-Amz-Signature=s1gn#top" for i in (0, 1)
    ]
    assert [place.name for place in expanded] == [f"https://host:8443/a%20b/part-00{i}.tar" for i in (0, 1)]
    assert expand("http://[::1]:80/x.tar") == [Location("http://[::1]:80/x.tar")]
    assert expand("HTTPS://host/x.tar") == [Location("https://host/x.tar")]


def test_ranges_of_a_store_need_no_store():
    assert expand("s3://bucket/a/{00..01}.tar") == [Location("s3://bucket/a/00.tar"), Location("s3://bucket/a/01.tar")]
    assert expand("gs://bucket/a b%20.tar") == [Location("gs://bucket/a b%20.tar")]


@pytest.mark.parametrize(
    "given",
    [
        "https://user:pa55word@host/*.tar?sig=s1gnature",
        "https://user:pa55/word@host/x.tar?sig=s1gnature",
        "https://user:pa55word@host:port/x.tar?sig=s1gnature",
        "s3://key:pa55word@bucket/x.tar",
        "az://key:pa55word@bucket/x.tar",
        "ftp://user:pa55word@host/x?s1gnature",
        "pipe:curl -H 's1gnature: pa55word' https://host/x.tar",
        "pipe:pa55word=s1gnature aws s3 cp s3://bucket/x.tar -",
        "pipe:curl 'https://user:pa55word@host/{x.tar?s1gnature",
        ["https://user:pa55word@host/x.tar?s1gnature"] * 2,
        "https://user:pa55word@host?s1gnature",
    ],
)
def test_refusals_hold_no_secrets(given):
    with pytest.raises(UserError) as refused:
        expand(given)
    secret = [word for word in ("pa55", "word", "s1gn") if word in str(refused.value).replace("password", "")]
    assert not secret, str(refused.value)


def test_addresses_that_differ_in_what_is_kept_secret_are_one():
    assert len(expand(["https://host/get?file=1.tar&sig=a", "https://host/get?file=2.tar&sig=a"])) == 2
    with pytest.raises(UserError, match="https://host/get is listed twice"):
        expand(["https://host/get?code=a", "https://host/get?code=b"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://u:p@h/a/b?c#d", "https://h/a/b"),
        ("https://h/a@b/c.tar", "https://h/a@b/c.tar"),
        ("https://h?c", "https://h/"),
        ("s3://b/a?b#c@d", "s3://b/a?b#c@d"),
        ("/a b/c?d", "/a b/c?d"),
        ("pipe:x y", "pipe:..."),
    ],
)
def test_what_is_shown_of_an_address(text, expected):
    assert redacted(text) == expected


@pytest.fixture
def stored(s3):  # noqa: F811
    for key in (
        *(f"set/part-{i:03}.tar" for i in range(3)),
        "set/part-000.tar.index",
        "set/.hidden.tar",
        "set/notes.txt",
    ):
        s3.put(key, b"x")
    for key in (
        "set/more/part-003.tar",
        "set/more/deep/part-004.tar",
        "set/a+b c%20[1].tar",
        "sets/part-005.tar",
        "top.tar",
    ):
        s3.put(key, b"x")
    return s3


LISTINGS = [
    ("s3://bucket/set/", ["a+b c%20[1].tar", "part-000.tar", "part-001.tar", "part-002.tar"]),
    ("s3://bucket/set/part-*.tar", ["part-000.tar", "part-001.tar", "part-002.tar"]),
    ("s3://bucket/set/part-*", ["part-000.tar", "part-001.tar", "part-002.tar"]),
    ("s3://bucket/set/part-00[!1].tar", ["part-000.tar", "part-002.tar"]),
    ("s3://bucket/set/part-00[0-1].tar", ["part-000.tar", "part-001.tar"]),
    ("s3://bucket/set/*/*.tar", ["part-003.tar"]),
    ("s3://bucket/set/**/part-00[34].tar", ["part-004.tar", "part-003.tar"]),
    (
        "s3://bucket/set/**",
        ["a+b c%20[1].tar", "part-004.tar", "part-003.tar", "notes.txt", *(f"part-00{i}.tar" for i in range(3))],
    ),
    ("s3://bucket/set*/part-005.tar", ["part-005.tar"]),
    ("s3://bucket/*.tar", ["top.tar"]),
    ("s3://bucket", ["top.tar"]),
    ("s3://bucket/", ["top.tar"]),
    ("S3://bucket/set/{part,nothing}-001.tar", ["part-001.tar", "nothing-001.tar"]),
    ("pipe:aws s3 cp s3://bucket/set/part-{000..001}.tar -", ["part-000.tar", "part-001.tar"]),
    ("pipe:aws s3 cp --quiet 's3://bucket/set/*.txt' -", ["notes.txt"]),
]


def test_listing_a_store(stored):
    for given, keys in LISTINGS:
        assert names(given) == keys, given


def test_a_glob_means_what_the_local_disk_means_by_it(stored, tmp_path, monkeypatch):
    for place in storage_io.listing("s3://bucket/"):
        path = tmp_path / place.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    for pattern in (
        "set/*",
        "**/*.tar",
        "set/**/part-*",
        "set/m?re/*",
        "*/*.tar",
        "set/[a-p]*",
        "set/[!a]*.tar",
        "s*/**",
    ):
        near = [place.url.removeprefix(f"{tmp_path}/") for place in expand(pattern)]
        far = [place.key for place in expand(f"s3://bucket/{pattern}")]
        assert sorted(near) == far, pattern


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("s3://bucket/empty/", ["no file in 's3://bucket/empty/' ends in .tar", "found: nothing"]),
        ("s3://bucket/set/x*.tar", ["nothing matches 's3://bucket/set/x*.tar'", "of 9 listed files"]),
        (
            "s3://nobucket/set/",
            ["s3://nobucket/set/", "bucket that does not exist", "endpoint http://127.0.0.1", "region"],
        ),
    ],
)
def test_a_listing_without_what_is_meant(stored, given, said):
    with pytest.raises(UserError) as refused:
        expand(given, setting="data.path")
    for words in ("data.path: ", *said):
        assert words in str(refused.value)
    assert not any(secret in str(refused.value) for secret in SECRETS)


def test_a_listing_survives_faults(stored):
    expected = storage_io.listing("s3://bucket/")
    stored.proxy.faults = Faults(0.3)
    for _ in range(5):
        assert storage_io.listing("s3://bucket/") == expected


@pytest.mark.parametrize("readings", [1, None], ids=["once", "always"])
def test_a_listing_is_read_again_when_it_has_a_name_that_cannot_be(stored, monkeypatch, readings):
    expected, entries, bad = storage_io.listing("s3://bucket/"), storage_io.entries, []

    def damaged(location):
        if readings is None or len(bad) < readings:
            bad.append(location)
            raise BadName(location, "has a name that cannot be requested")
        return entries(location)

    monkeypatch.setattr(storage_io, "entries", damaged)
    if readings is None:
        with pytest.raises(BadName):
            storage_io.listing("s3://bucket/")
    else:
        assert storage_io.listing("s3://bucket/") == expected


def test_a_long_listing_comes_in_pages(stored, monkeypatch):
    monkeypatch.setattr(storage_io, "_PAGE_KEYS", 4)
    assert len(storage_io.listing("s3://bucket/")) == 11
    stored.proxy.faults = Faults(0.3)
    assert len(storage_io.listing("s3://bucket/")) == 11


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Broken pipe: the reader has gone, and 3 images are left", None),
        ("the worker's pipe: closed by its parent", None),
        ("mypipe:x is a name", None),
        ("'pipe:curl -u me:word https://h/x' is no file; give a folder", "'pipe:...' is no file; give a folder"),
        ("data.path: \"pipe:curl -H 'a: b'\" is no file", 'data.path: "pipe:..." is no file'),
        ("data.path=pipe:curl -u me:word https://h/x", "data.path=pipe:..."),
        ("pipe: curl -u me:word x", "pipe:..."),
        ("read pipe:curl -u me:word x", "read pipe:..."),
        ("pipe:...: commands are never run", None),
    ],
)  # fmt: skip
def test_a_command_is_cut_and_the_words_around_it_stay(text, expected):
    assert credentials.scrub(text) == (expected or text)
