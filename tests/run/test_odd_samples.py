"""One sample that is no text, no file or no image ends nothing: every verb and training go on, and name it."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import data_sets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from daguerre.checkpoint.atomic import to_json
from daguerre.cli import main
from daguerre.config import options
from daguerre.data.dataset import open_dataset
from daguerre.data.loading.loader import Loading
from daguerre.data.settings import LoaderSettings
from daguerre.data.skipped import Skips
from daguerre.settings import Settings

HALF = b"\\ud83d"
"""As JSON writes it."""
CESU = b"\xed\xa0\xbd cat"
"""As programs write it that take UTF-16 for characters."""
NO_TEXT = "caption that is no text"
NO_FILE = "there is no image file at the path"


def shard(folder: Path, *odd: tuple[str, bytes]) -> None:
    files = [file for i in range(4) for file in ((f"g{i}.jpg", data_sets.jpeg(i)), (f"g{i}.txt", b"a cat"))]
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for name, data in [*files, *odd]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_folder(folder: Path, **odd: bytes) -> None:
    data_sets.folder(folder, 4)
    (folder / "x.jpg").write_bytes(data_sets.jpeg(9))
    for suffix, data in odd.items():
        (folder / f"x.{suffix}").write_bytes(data)


def listed(folder: Path) -> None:
    write_folder(folder)
    lines = [b'{"file_name": "x.jpg", "text": "%s cat", "m": "a"}' % HALF]
    lines += [b'{"file_name": "00%d.jpg", "text": "a cat", "%s": "%s"}' % (i, HALF, HALF) for i in range(4)]
    lines += [b'{"file_name": "%s.jpg", "text": "a cat"}' % HALF]
    (folder / "metadata.jsonl").write_bytes(b"\n".join(lines))


def table(folder: Path, *rows: bytes, header: bytes = b"image,text,m") -> None:
    data_sets.folder(folder, 4)
    good = [b"%03d.jpg,a cat,1" % i for i in range(4)]
    (folder / "a.csv").write_bytes(b"\n".join([header, *good, *rows, b""]))


def loop(folder: Path) -> None:
    table(folder, b"loop.jpg,a cat,1")
    os.symlink("loop.jpg", folder / "loop.jpg")


def rows(label: bool = False) -> pa.Table:
    """Five rows; the last one's text is not UTF-8, or its class has a name that is no text."""
    images = [data_sets.jpeg(i) for i in range(5)]
    if label:
        feature = b'{"_type": "ClassLabel", "names": ["cat", "%s"]}' % HALF
        noted = {"huggingface": b'{"info": {"features": {"label": %s}}}' % feature}
        return pa.table({"image": images, "label": [0, 0, 0, 0, 1]}).replace_schema_metadata(noted)
    raw = pa.array([b"a cat", b"a cat", b"a cat", b"a cat", CESU], pa.binary())
    return pa.table({"image": images, "text": pa.Array.from_buffers(pa.string(), 5, raw.buffers())})


def parquet(folder: Path, label: bool = False) -> None:
    folder.mkdir()
    pq.write_table(rows(label), folder / "a.parquet")


def arrow(folder: Path, label: bool = False) -> None:
    folder.mkdir()
    with ipc.new_stream(str(folder / "a.arrow"), rows(label).schema) as writer:
        writer.write_table(rows(label))
    (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')


def json_member(said: bytes) -> Callable[[Path], None]:
    return lambda folder: shard(folder, ("x.jpg", data_sets.jpeg(9)), ("x.json", said))


Case = tuple[str, Callable[[Path], None], str, str, int]
"""Source, what writes the data, why the odd sample is left out, how it is named, and how many samples stay."""
CASES: dict[str, Case] = {
    "a caption in the JSON of a shard": ("webdataset", json_member(b'{"caption": "%s"}' % HALF), NO_TEXT, "x.jpg", 4),
    "beside other texts": ("webdataset", json_member(b'{"caption": "%s", "url": "u"}' % HALF), NO_TEXT, "x.jpg", 4),
    "names and metadata in the JSON of a shard": (
        "webdataset",
        json_member(b'{"caption": "a cat", "%s": "%s", "l": ["%s"], "d": {"%s": 1}}' % (HALF, HALF, HALF, HALF)),
        "",
        "",
        5,
    ),
    "a text member of a shard": (
        "webdataset",
        lambda folder: shard(folder, ("x.jpg", data_sets.jpeg(9)), ("x.txt", CESU)),
        "caption that is not UTF-8",
        "x.jpg",
        4,
    ),
    "names in a shard": (
        "webdataset",
        lambda folder: shard(
            folder, ("x\udcff.jpg", data_sets.jpeg(9)), ("x\udcff.txt", b"a cat"), ("x\udcff.m\udcff", b"text")
        ),
        "",
        "",
        5,
    ),
    "a long caption in a shard": (
        "webdataset",
        lambda folder: shard(folder, ("x.jpg", data_sets.jpeg(9)), ("x.txt", b"cat " * 260_000)),
        "",
        "",
        5,
    ),
    "a JSON file": (
        "folder",
        lambda folder: write_folder(folder, json=b'{"text": "%s", "%s": "%s"}' % (HALF, HALF, HALF)),
        NO_TEXT,
        "x.jpg",
        4,
    ),
    "metadata.jsonl": ("folder", listed, NO_TEXT, "x.jpg", 4),
    "a caption file": ("folder", lambda folder: write_folder(folder, txt=CESU), "not UTF-8", "x.txt", 4),
    "a caption file without end": (
        "folder",
        lambda folder: write_folder(folder, txt=b"cat " * 270_000),
        "caption file of more than 1,048,576 bytes",
        "x.txt",
        4,
    ),
    "a parquet file": ("parquet", parquet, "no caption", "row 4", 4),
    "a class of a parquet file": (
        "parquet",
        lambda folder: parquet(folder, label=True),
        "class label without a name",
        "row 4",
        4,
    ),
    "an arrow file": ("huggingface", arrow, "text that is not UTF-8", "row 4", 4),
    "a class of an arrow file": (
        "huggingface",
        lambda folder: arrow(folder, label=True),
        "class label without a name",
        "row 4",
        4,
    ),
    "a line of a CSV": ("csv", lambda folder: table(folder, b"000.jpg," + CESU + b",1"), "not UTF-8", "line 6", 4),
    "a long path": ("csv", lambda folder: table(folder, b"a" * 300 + b".jpg,a cat,1"), NO_FILE, "line 6", 4),
    "a deep path": ("csv", lambda folder: table(folder, b"a/" * 3000 + b"a.jpg,a cat,1"), NO_FILE, "line 6", 4),
    "a link to itself": ("csv", loop, NO_FILE, "line 6", 4),
    "a device": ("csv", lambda folder: table(folder, b"/dev/zero,a cat,1"), NO_FILE, "line 6", 4),
}


def trained(given: list[str], file: Path) -> tuple[set[str], dict[str, dict]]:
    """Captions of an epoch as a tokenizer takes them, and what data.json says was left out."""
    request = options.read([*given, "data.resolution=32"], Settings)
    data = open_dataset(request.settings, "train")
    skips = Skips(file=file, say=lambda line: line.encode())
    run = Loading(data, LoaderSettings(num_workers=0), 0, 2, 2, lambda batch: {}, lambda texts: {}, skips=skips)
    with run.updates(0) as updates:
        batches = [batch for _ in range(4) for batch in next(updates)]
    for name in (name for batch in batches for name in batch.names):
        name.encode()
    return {text.encode().decode() for batch in batches for text in batch.texts}, json.loads(to_json(run.report()))[
        "skipped"
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_odd_sample_is_named_and_ends_nothing(tmp_path, monkeypatch, capsys, case):
    source, write, reason, name, stay = case
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "odd")
    limits = ["data.max_skipped=1", "data.held_out_fraction=0", "data.cache_dir=cache"]
    given = [f"data.source={source}", "data.path=odd", *limits]
    for verb, own in (
        ("stats", []),
        ("verify", ["processes=1"]),
        ("show", ["data.resolution=32"]),
        ("pack", ["-o", "p"]),
    ):
        capsys.readouterr()
        assert main.run(["data", verb, *given, *own]) in (0, int(verb == "verify")), capsys.readouterr().err
        if verb != "show" and reason:
            said = next(line for line in capsys.readouterr().out.splitlines() if reason in line)
            assert name in said
    assert json.loads(Path("p/dataset.json").read_text())["samples"] == stay
    texts, skipped = trained(given, tmp_path / "skipped.jsonl")
    assert any(text.startswith(("a cat", "image", "picture", "cat")) for text in texts)
    if reason:
        assert any(reason in found and name in entry["examples"][0] for found, entry in skipped.items())
    if source == "webdataset":
        assert main.run(["data", "index", "odd", "again=true"]) == 0


@contextmanager
def pipe(path: Path, data: bytes):
    """A pipe that gives `data` to whoever opens it, so that a reader that should not is found out and does not hang."""
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(data), daemon=True)
    writer.start()
    yield
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer.join(30)
    os.close(reader)
    assert not writer.is_alive()


def test_a_pipe_in_place_of_an_image_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "odd", b"pipe.jpg,a cat,1")
    with pipe(tmp_path / "odd" / "pipe.jpg", data_sets.jpeg(0)):
        assert main.run(["data", "stats", "odd/a.csv", "data.cache_dir=cache"]) == 0
        assert NO_FILE in capsys.readouterr().out


def test_a_pipe_in_place_of_an_index_is_passed_by(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shard(tmp_path / "odd")
    with pipe(tmp_path / "odd" / "a.tar.index", b"no index"):
        assert main.run(["data", "stats", "odd", "data.cache_dir=cache"]) == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["data", "stats", "odd", "data.idx_to_prompt=pipe"], "is a pipe, a socket or a device"),
        (["data", "stats", "odd", "data.idx_to_prompt=halves.json"], "has no text for the class '1'"),
        (["data", "stats", "odd.csv"], "the header, is not UTF-8"),
    ],
)
def test_what_names_no_text_is_refused(tmp_path, monkeypatch, capsys, arguments, why):
    monkeypatch.chdir(tmp_path)
    shard(tmp_path / "odd", ("x.jpg", data_sets.jpeg(9)), ("x.cls", b"0"))
    Path("halves.json").write_bytes(b'["a cat", "%s"]' % HALF)
    Path("odd.csv").write_bytes(b"image,text,\xff\n000.jpg,a cat,1\n")
    with pipe(Path("pipe"), b'["a cat"]'):
        assert main.run([*arguments, "data.cache_dir=cache"]) == 2
    assert why in capsys.readouterr().err


def test_messages_with_what_is_no_text_are_printed(tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stderr", stream)
    arrow(tmp_path / "odd")
    (tmp_path / "odd" / "state.json").write_bytes(b'{"_data_files": [{"filename": "%s"}]}' % HALF)
    assert main.run(["data", "stats", "data.source=huggingface", f"data.path={tmp_path}/odd"]) == 2
    stream.flush()
    assert b"lacks 1 of its 1 files: \\ud83d" in stream.buffer.getvalue()
