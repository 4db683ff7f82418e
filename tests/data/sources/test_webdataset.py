"""Tar shards as a source: what is read of them, as by the webdataset library, and what is lost of damaged ones."""

import json
import os
import pickle
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tars
from faulty_store import Faults, environment, s3, web_server  # noqa: F401
from PIL import Image
from webdataset import tariterators

from daguerre.data.images.headers import Undecodable
from daguerre.data.index import cache
from daguerre.data.plan import selection
from daguerre.data.sources import webdataset as source_file
from daguerre.data.sources.webdataset import Settings, WebdatasetSource, open_source
from daguerre.data.tar import reader
from daguerre.errors import UserError
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location

ODD = [
    "a",
    "deep/er/b",
    "../../etc/passwd",
    "./c",
    "v1.0/d",
    "caf\u00e9",
    "cafe\u0301",
    "e e",
    "\udcff\udcfe",
    "x" * 180,
]


@pytest.fixture
def opened(tmp_path):
    """Opens shards with a cache of their own."""

    def opening(*paths, **settings) -> WebdatasetSource:
        given = tuple(str(path) for path in paths)
        return open_source(Settings(path=given, cache_dir=str(tmp_path / "cache"), **settings), "train")

    return opening


def records(source: WebdatasetSource):
    return [source.record(number) for number in range(source.index.count)]


def contents(source: WebdatasetSource) -> dict[bytes, str]:
    return {record.image: record.texts["text"] for record in records(source)}


def as_webdataset(path: Path) -> dict[str, dict[str, bytes]]:
    """{key: {field: bytes}}; what it yields twice for a key is joined."""
    found: dict[str, dict[str, bytes]] = {}
    with path.open("rb") as stream:  # opened by itself it would leave the file open
        members = tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
        for sample in tariterators.group_by_keys(members):
            key = sample["__key__"]
            found.setdefault(key, {}).update({k: v for k, v in sample.items() if not k.startswith("__")})
    return found


def as_we_read(source: WebdatasetSource) -> dict[str, dict[str, bytes]]:
    """The same of ours, from the bytes that the index points to."""
    found = {}
    for number in range(source.index.count):
        shard, row = source._where(number)
        index = source._shard(shard)
        data = source.locations[shard].local.read_bytes()
        first, *rest = source_file._pieces(index, row)
        extension = next(m.name for m in reader.contents(data).members if m.offset == first.offset).rpartition(".")[2]
        pieces = [first._replace(name=extension.lower()), *rest]
        key = index.column("key")[row].as_py()
        found[key] = {piece.name: data[piece.offset : piece.offset + piece.size] for piece in pieces}
        assert source.record(number).image == found[key][extension.lower()]
    return found


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_that_the_webdataset_library_reads_is_read_equal_to_the_byte(form, tmp_path, opened):
    members = []
    for number, key in enumerate(ODD):
        members += tars.sample(key, number, f"caption {number} \u00fc", number=number, ok=True)
        members += [(f"{key}.tags.TXT", b"one, two"), (f"{key}.cls", b"%d" % number)]
    members += [("webp.webp", tars.jpeg(90, form="WEBP")), ("webp.json", b'{"caption": "webp"}')]
    members += [("png.PNG", tars.jpeg(91, form="PNG")), ("png.txt", b"png"), ("__meta__", b"1"), ("no_dot", b"2")]
    theirs = as_webdataset(tars.write(tmp_path / "a.tar", members, form))
    ours = as_we_read(opened(tmp_path / "a.tar"))
    printable = {
        key.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"): v for key, v in theirs.items()
    }
    assert ours == printable
    assert len(ours) == len(ODD) + 2


@pytest.mark.skipif(not shutil.which("tar"), reason="no GNU tar here")
@pytest.mark.parametrize("order", [["--sort=name"], ["--sort=none"], ["--sort=inode"], ["--format=pax", "--sort=name"]])
def test_tars_made_by_hand(order, tmp_path, opened):
    """`tar -cf` takes the order of the folder, `--sort=name` puts a.jpg, a1.jpg, a.txt: members are not neighbours."""
    folder = tmp_path / "in" / "deep"
    folder.mkdir(parents=True)
    names = [f"{number}" for number in range(12)] + ["a", "a1", "a-b", "a.v2"]
    for number, name in enumerate(random.Random(0).sample(names, len(names))):
        for member, data in tars.sample(name, number, n=number):
            (folder / member).write_bytes(data)
    subprocess.run(["tar", *order, "-cf", tmp_path / "a.tar", "-C", tmp_path, "in"], check=True)
    source = opened(tmp_path / "a.tar")
    assert contents(source) == {tars.jpeg(number): f"image {number}" for number in range(len(names))}
    theirs = {data for sample in as_webdataset(tmp_path / "a.tar").values() for data in sample.values()}
    assert theirs == {data for sample in as_we_read(source).values() for data in sample.values()}


def test_img2datasets_shards(tmp_path, opened):
    def document(number, **more):
        said = {
            "caption": f"image {number}",
            "url": f"https://x/{number}",
            "key": f"{number:09}",
            "status": "success",
        }
        said |= {
            "error_message": None,
            "width": 16,
            "height": 12,
            "original_width": 32,
            "exif": "{}",
            "sha256": "0" * 64,
        }
        return json.dumps({**said, **more}).encode()

    members = []
    for number in range(4):
        key = f"{number:09}"
        members += [(f"{key}.jpg", tars.jpeg(number)), (f"{key}.txt", b"image %d" % number)]
        members += [(f"{key}.json", document(number))]
    members += [("000000009.jpg", tars.jpeg(9)), ("000000009.txt", b""), ("000000009.json", document(9, caption=None))]
    (tmp_path / "00000.parquet").write_bytes(b"PAR1")
    (tmp_path / "00000_stats.json").write_text("{}")
    tars.write(tmp_path / "00000.tar", members)
    source = opened(tmp_path)
    assert [place.local.name for place in source.locations] == ["00000.tar"]
    assert source.index.count == 5
    assert source.index.captioned["text"].to_pylist() == [True] * 4 + [False]
    assert source.index.numbers["original_width"].to_pylist() == [32.0] * 5
    assert source.index.texts["status"].to_pylist() == ["success"] * 5
    assert {"sha256", "error_message"}.isdisjoint(source.index.texts)
    assert source.record(1).texts["text"] == "image 1"
    assert source.record(1).metadata["sha256"] == "0" * 64
    chosen = selection.select(source.index, Settings(path="x", held_out_fraction=0, resolution=8), ["train"])[0]
    assert len(chosen.numbers) == 4
    assert sum(entry["count"] for entry in chosen.left_out.values() if not entry["kept"]) == 1


def test_sizes_are_upright(tmp_path, opened):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (16, 12)).save(tmp_path / "turned.jpg", exif=exif)
    members = [("a.jpg", (tmp_path / "turned.jpg").read_bytes()), ("a.txt", b"a"), *tars.sample("b", 0)]
    index = opened(tars.write(tmp_path / "a.tar", members)).index
    assert (index.heights_px.tolist(), index.widths_px.tolist()) == ([16, 12], [12, 16])


def test_ids_hang_on_the_contents_alone(tmp_path, opened):
    (tmp_path / "a.tar").write_bytes(tars.shard(0))
    (tmp_path / "b.tar").write_bytes(tars.shard(1))
    ids = opened(tmp_path / "a.tar", tmp_path / "b.tar").index.ids.tolist()
    (tmp_path / "a.tar").rename(tmp_path / "z.tar")
    source = opened(tmp_path / "z.tar", tmp_path / "b.tar")
    assert source.index.ids.tolist() == ids
    assert [source.sample_id(number) for number in range(10)] == ids
    assert len(set(ids)) == 10
    assert min(ids) >= 0


def test_ids_that_the_shard_carries(tmp_path, opened):
    members = [*tars.sample("a", 0, daguerre_id=7), *tars.sample("b", 1, daguerre_id=2**63 - 1), *tars.sample("c", 2)]
    members += [*tars.sample("d", 3, daguerre_id=-1), *tars.sample("e", 4, daguerre_id=True)]
    source = opened(tars.write(tmp_path / "a.tar", members))
    assert source.index.ids.tolist()[:2] == [7, 2**63 - 1]
    assert source.index.count == 3
    assert source.report()["daguerre_id that is not a whole number of 63 bits"]["count"] == 2
    assert "daguerre_id" not in source.index.numbers


def test_the_same_shard_twice_is_refused(tmp_path, opened):
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(tars.shard(0))
    with pytest.raises(UserError, match=r"sample (\d) of .*a\.tar and sample \1 of .*b\.tar have the same id.*4 more"):
        _ = opened(tmp_path / "a.tar", tmp_path / "b.tar").index


def test_what_cannot_be_used_is_counted_when_it_is_indexed(tmp_path, opened):
    members = [
        *tars.sample("good", 0),
        ("no_text.jpg", tars.jpeg(1)),
        ("blank.jpg", tars.jpeg(2)),
        ("blank.txt", b" \n"),
    ]
    members += [
        ("bytes.jpg", tars.jpeg(3)),
        ("bytes.txt", b"\xff"),
        ("broken.jpg", b"\xff\xd8\xff"),
        ("broken.txt", b"x"),
    ]
    members += [("json.jpg", tars.jpeg(4)), ("json.json", b"{"), ("no.jpg", b"GIF89a"), ("no.txt", b"x")]
    members += [("array.jpg", tars.jpeg(5)), ("array.txt", b"x"), ("array.npy", b"\x93NUMPY\0"), ("empty.jpg", b"")]
    members += [("empty.txt", b"x"), ("alone.txt", b"x")]
    source = opened(tars.write(tmp_path / "a.tar", members))
    assert {reason: entry["count"] for reason, entry in source.report().items()} == {
        "image without a caption": 1,
        "caption without text": 1,
        "caption that is not UTF-8": 1,
        "JSON that does not parse": 1,
        "broken image": 1,
        "a GIF file, which data.formats does not allow (jpeg, png, webp)": 1,
        "empty file": 1,
        "member that is neither image nor text": 1,
        "member without an image of its name": 1,
    }
    assert source.index.count == 2
    assert all(example.startswith(str(tmp_path)) for entry in source.report().values() for example in entry["examples"])


def test_more_formats_are_another_index(tmp_path, opened):
    members = [*tars.sample("a", 0), ("b.gif", tars.jpeg(1, form="GIF")), ("b.txt", b"b")]
    tars.write(tmp_path / "a.tar", members)
    assert opened(tmp_path / "a.tar").index.count == 1
    assert opened(tmp_path / "a.tar", formats=("jpeg", "gif")).index.count == 2
    assert opened(tmp_path / "a.tar").index.count == 1


def test_a_source_that_travels_is_small_and_reads_the_same(tmp_path, opened):
    (tmp_path / "a.tar").write_bytes(tars.shard(0, 40))
    source = opened(tmp_path / "a.tar")
    assert source.index.count == 40
    sent = pickle.dumps(source)
    assert len(sent) < 1500
    assert records(pickle.loads(sent)) == records(source)  # noqa: S301 - as it goes to a worker


def test_members_far_from_each_other_are_read_one_by_one(tmp_path, opened, monkeypatch):
    first = tars.sample("a", 0)
    members = [first[0], ("between.jpg", b"\xff\xd8\xff" + bytes(3 << 20)), *tars.sample("b", 1), first[1]]
    source = opened(tars.write(tmp_path / "a.tar", members))
    lengths = []
    read = storage_io.read
    monkeypatch.setattr(
        storage_io, "read", lambda place, start, length, *a: lengths.append(length) or read(place, start, length, *a)
    )
    assert contents(source) == {tars.jpeg(0): "image 0", tars.jpeg(1): "image 1"}
    assert len(lengths) == 3
    assert sum(lengths) < 10_000
    hurt = bytearray((tmp_path / "a.tar").read_bytes())
    hurt[600] ^= 1
    (tmp_path / "a.tar").write_bytes(hurt)
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(0)
    (tmp_path / "a.tar").write_bytes(hurt[: 1 << 20])
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(0)


def test_class_labels(tmp_path, opened):
    members = [m for i in range(3) for m in [(f"{i}.jpg", tars.jpeg(i)), (f"{i}.cls", b"%d\n" % i)]]
    path = tars.write(tmp_path / "a.tar", members)
    source = opened(path, idx_to_prompt=["cat", "dog", "eel"])
    assert [record.texts["text"] for record in records(source)] == ["cat", "dog", "eel"]
    assert source.index.numbers["cls"].to_pylist() == [0.0, 1.0, 2.0]
    assert source.index.captioned["text"].to_pylist() == [True] * 3
    with pytest.raises(Undecodable, match="class"):
        opened(path, idx_to_prompt=["cat"]).record(2)
    with pytest.raises(UserError, match=r"data\.idx_to_prompt: .*give a text for each class"):
        opened(path)
    assert opened(path, captions={"fields": ["cls"]}).record(2).texts["cls"].strip() == "2"
    (tmp_path / "b.tar").write_bytes(tars.shard(0))
    with pytest.raises(UserError, match=r"data\.idx_to_prompt has no effect"):
        opened(tmp_path / "b.tar", idx_to_prompt=["cat"])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<!DOCTYPE html><html><title>Sign in</title>", "is not a tar file: it is a web page"),
        (b"\x1f\x8b\x08rest", "compressed with gzip: unpack it"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"nothing of the kind", "is not a tar file: it begins with 'nothing of the kind'"),
    ],
)
def test_files_that_are_no_tar_name_themselves(data, said, tmp_path, opened):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(UserError, match=said) as error:
        opened(tmp_path / "a.tar")
    assert f"data.path: {tmp_path / 'a.tar'}" in str(error.value)


@pytest.mark.parametrize("data", [b"", tars.packed([]), tars.packed([("a.jpg", tars.jpeg(0)), ("readme.txt", b"x")])])
def test_shards_without_a_usable_sample_say_what_is_expected(data, tmp_path, opened):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(UserError, match=r"data\.path: no image with a caption in .*a\.tar(.|\n)*Expected in a tar"):
        opened(tmp_path / "a.tar")


def checked(source: WebdatasetSource, truths) -> tuple[int, int]:
    """Reads all; (equal, counted). What is read must be a sample that was there, with its own caption."""
    equal = counted = 0
    for number in range(int(source.starts[-1])):
        try:
            record = source.record(number)
        except Undecodable:
            counted += 1
            continue
        assert truths[record.image] == record.texts["text"]
        equal += 1
    return equal, counted


def damage_indexed(tmp_path: Path, opened, shards: int, count: int = 5) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    whole = {f"{number:05}.tar": tars.shard(number, count) for number in range(shards)}
    for name, data in whole.items():
        (folder / name).write_bytes(data)
    source = opened(folder)
    assert checked(source, {k: v for n in range(shards) for k, v in tars.truth(n, count).items()}) == (
        shards * count,
        0,
    )
    draw = random.Random(shards)
    total = 0
    kinds = set()
    for name, data in whole.items():
        headers = [member.start for member in reader.contents(data).members]
        kind, hurt = tars.damaged(data, headers, draw)
        kinds.add(kind)
        (folder / name).write_bytes(hurt)
    source = opened(folder)
    assert source.index.count == shards * count
    for number in range(shards):
        truths = tars.truth(number, count)
        part = opened(folder / f"{number:05}.tar")
        equal, counted = checked(part, truths)
        assert equal + counted == count
        total += counted
    assert 0 < total < shards * count
    assert len(kinds) == 9
    resized = sum(len((folder / name).read_bytes()) != len(data) for name, data in whole.items())
    assert source.report()[cache.CHANGED]["count"] == resized


def test_of_100_indexed_shards_that_are_damaged_no_sample_is_lost_uncounted(tmp_path, opened):
    damage_indexed(tmp_path, opened, 100)


@pytest.mark.long
def test_of_2000_indexed_shards_that_are_damaged_no_sample_is_lost_uncounted(tmp_path, opened):
    damage_indexed(tmp_path, opened, 2000)


@pytest.mark.parametrize("seed", range(60))
def test_without_an_index_the_report_gives_the_ranges_and_that_the_count_is_unknown(seed, tmp_path, opened):
    """What is lost of a shard that was damaged before it was indexed lies in the ranges, or was counted by name."""
    draw = random.Random(seed)
    data = tars.shard(seed)
    members = reader.contents(data).members
    kind, hurt = tars.damaged(data, [member.start for member in members], draw)
    (tmp_path / "b.tar").write_bytes(tars.shard(99))
    (tmp_path / "a.tar").write_bytes(hurt)
    source = opened(tmp_path / "a.tar", tmp_path / "b.tar")
    report = source.report()
    found = {record.texts["text"] for record in records(source)} & set(tars.truth(seed).values())
    if len(found) < 5 and len(hurt) == len(data) and kind not in ("flip", "flips", "noise", "zeros"):
        assert report[cache.DAMAGED]["count"] >= 1
        assert all("byte" in example for example in report[cache.DAMAGED]["examples"])
    if kind in ("cut", "end") and len(hurt) < members[-1].offset + members[-1].size + 1024:
        assert "cut off at byte" in str(report) or f"to {len(hurt):,}" in str(report)


@pytest.mark.long
def test_shards_in_a_store_are_read_by_range_or_whole(tmp_path, opened, s3):  # noqa: F811
    for number in range(3):
        s3.put(f"set/{number}.tar", tars.shard(number, 10))
    truths = {k: v for n in range(3) for k, v in tars.truth(n, 10).items()}
    source = opened(f"s3://{s3.bucket}/set/")
    assert contents(source) == truths
    told = source.reading(np.array([0.2, 0.25, 1.0]))
    assert told.is_remote
    shutil.rmtree(tmp_path / "cache" / "shards")
    assert [told.prefetch(shard) for shard in range(3)] == [0, *(len(tars.shard(n, 10)) for n in (1, 2))]
    before = len(s3.proxy.seen)
    assert contents(told) == truths
    assert len(s3.proxy.seen) - before == 10  # one for each sample of the shard that is read by range
    assert [told.cache.holds(place) for place in told.locations] == [False, True, True]


def test_an_index_beside_a_shard_in_a_store_saves_reading_it(tmp_path, opened, s3):  # noqa: F811
    path = tmp_path / "a.tar"
    path.write_bytes(tars.shard(0, 12))
    place = s3.put("set/a.tar", path.read_bytes())
    s3.put("set/a.tar.index", cache.encoded(source_file.build(Location(str(path)))))
    source = opened(place.url)
    assert source.index.count == 12
    assert not source.cache.holds(place)
    assert contents(source) == tars.truth(0, 12)


def test_an_index_in_a_store_whose_shard_is_another_is_said(tmp_path, opened, s3):  # noqa: F811
    path = tmp_path / "a.tar"
    path.write_bytes(tars.shard(0))
    place = s3.put("a.tar", path.read_bytes()[:4000])
    s3.put("a.tar.index", cache.encoded(source_file.build(Location(str(path)))))
    source = opened(place.url)
    assert source.report()[cache.CHANGED]["examples"] == [
        f"s3://bucket/a.tar ({path.stat().st_size:,} bytes, now 4,000)"
    ]
    equal, counted = checked(source, tars.truth(0))
    assert (equal > 0, equal + counted) == (True, 5)


@pytest.mark.long
def test_a_web_server_that_knows_no_ranges(tmp_path, opened, monkeypatch):
    (tmp_path / "served").mkdir()
    for number in range(2):
        (tmp_path / "served" / f"{number}.tar").write_bytes(tars.shard(number))
    with environment(monkeypatch), web_server(tmp_path / "served") as server:
        source = opened(f"{server.url}/{{0..1}}.tar")
        assert contents(source) == {**tars.truth(0), **tars.truth(1)}
        assert contents(source.reading(np.ones(2))) == {**tars.truth(0), **tars.truth(1)}


@pytest.mark.long
def test_faults_of_a_store_change_nothing(tmp_path, opened, s3):  # noqa: F811
    s3.proxy.faults = Faults(0.3, kinds=("error", "cut", "flip"))
    for number in range(2):
        s3.put(f"set/{number}.tar", tars.shard(number, 4))
    truths = {k: v for n in range(2) for k, v in tars.truth(n, 4).items()}
    source = opened(f"s3://{s3.bucket}/set/")
    ids = source.index.ids.tolist()
    assert contents(source) == truths
    assert contents(source.reading(np.ones(2))) == truths
    shutil.rmtree(tmp_path / "cache")
    assert opened(f"s3://{s3.bucket}/set/").index.ids.tolist() == ids


def test_a_far_shard_that_was_replaced_is_counted_sample_by_sample(tmp_path, opened, s3):  # noqa: F811
    place = s3.put("a.tar", tars.shard(0))
    source = opened(place.url)
    hurt = bytearray(tars.shard(0))
    hurt[700] ^= 1
    whole = source.reading(np.ones(1))
    assert checked(whole, tars.truth(0)) == (5, 0)  # from the copy that was fetched to index it
    s3.put("a.tar", bytes(hurt))
    assert checked(source, tars.truth(0)) == (4, 1)
    shutil.rmtree(tmp_path / "cache" / "shards")
    assert checked(whole, tars.truth(0)) == (4, 1)
    s3.put("a.tar", bytes(hurt[:3000]))
    shutil.rmtree(tmp_path / "cache" / "shards")
    for told in (source, whole):
        equal, counted = checked(told, tars.truth(0))
        assert equal + counted == 5
        assert equal < 4


def test_the_stamps_of_a_shard_tell_an_edit_that_size_and_time_hide(tmp_path):
    """So a cache of features reads its samples again, and finds that they are not what was indexed."""
    path = tars.write(tmp_path / "a.tar", [*tars.sample("a", 0, "one"), *tars.sample("b", 1, "two")])
    settings = Settings(path=str(path), cache_dir=str(tmp_path / "cache"))
    before, stat = open_source(settings, "train").stamps(), path.stat()
    path.write_bytes(path.read_bytes().replace(b"two", b"owt"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    source = open_source(settings, "train")
    assert (source.stamps() != before).all()
    assert source.record(0).texts["text"] == "one"
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(1)
