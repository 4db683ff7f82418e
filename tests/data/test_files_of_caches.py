"""Files of caches that are no longer what was written: another file, half of one, a folder, a pipe. Nothing but what
was lost is made again, and nothing is read wrongly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from daguerre import documents
from daguerre.data.cached import rows, samples
from daguerre.data.cached.rows import Lost, Rows, Writer
from daguerre.data.cached.samples import Fact, Facts
from daguerre.data.index.file import About, ShardIndex, encoded
from daguerre.evaluation import blocks
from daguerre.models.weights import conversion_cache, file_digests, seals

NAMED = {  # names under which no row was ever written
    "far beyond the file": "abc-99999999999999.safetensors",
    "beyond all files": f"abc-{'9' * 60}.safetensors",
    "of nothing": "99aa06d3014798d86001c324468d497f-0.safetensors",
    "of other digits": "abc-\u0663.safetensors",
    "a word": "abc.safetensors",
}


def swap(path: Path) -> None:
    other = next(each for each in sorted(path.parent.iterdir()) if each != path)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def in_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def done(path: Path) -> None:
        path.unlink()
        make(path)

    return done


ATTACKS: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "cut in its head": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "swapped": swap,
    "folder": in_place(Path.mkdir),
    "pipe": in_place(os.mkfifo),
    "endless": in_place(lambda path: path.symlink_to("/dev/zero")),
    "nowhere": in_place(lambda path: path.symlink_to("nowhere")),
    "loop": in_place(lambda path: path.symlink_to(path.name)),
    **{what: lambda path, name=name: path.rename(path.with_name(name)) for what, name in NAMED.items()},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_rows(attack: str, tmp_path: Path):
    writer, written = Writer(str(tmp_path), 1500), {}
    for i in range(40):
        written[rows.key(bytes([i]))] = {"x": np.full((4, 6), i, np.float16)}
        writer.add(*list(written.items())[-1])
    writer.flush()
    ATTACKS[attack](sorted(tmp_path.iterdir())[0])
    found = Rows.found(str(tmp_path))
    read = 0
    for key, row in written.items():
        try:
            assert (found.read(key)["x"] == row["x"]).all()
            read += 1
        except Lost:
            pass
    assert read == found.sound(list(written)).sum() == found.has(list(written)).sum()
    assert 0 < read < 40 if attack != "swapped" else not read
    assert len(found.damaged) == (2 if attack == "swapped" else 1)


@pytest.mark.parametrize("attack", [*ATTACKS, "another kind"])
def test_facts_of_samples(attack: str, tmp_path: Path):
    for i in range(2):
        facts = Facts(str(tmp_path))
        facts.add(i, i + 1, Fact(b"x" * 16, 10, 20, {"text": f"{i}"}, ""))
        facts.flush()
    first = sorted((tmp_path / samples.FOLDER).iterdir())[0]
    if attack == "another kind":
        columns = {name: pa.array([1], pa.int64()) for name in ("id", "height", "width", "digest")}
        first.write_bytes(encoded(ShardIndex(pa.table(columns), About("webdataset", "a.tar", 1, "0" * 32))))
    else:
        ATTACKS[attack](first)
    known = Facts(str(tmp_path))
    places = known.places(np.arange(2), np.arange(2) + 1)
    texts = [fact.texts["text"] for fact in known.noted(places[places >= 0])]
    assert texts == [str(i) for i in np.flatnonzero(places >= 0)]
    assert len(texts) == (0 if attack == "swapped" else 1)


def test_arrays_of_an_evaluation_that_changed_places(tmp_path: Path, capsys):
    one, two = tmp_path / "features-a.npy", tmp_path / "features-b.npy"
    for path, value in ((one, 1), (two, 2)):
        blocks.save(path, np.full(3, value))
    swap(one)
    assert blocks.sound(one) is blocks.sound(two) is None
    assert "features-a.npy is damaged" in capsys.readouterr().out
    blocks.save(one, np.ones(3))
    assert blocks.sound(one, 4) is None
    assert "it has 3 rows, not 4" in capsys.readouterr().out


def test_a_document_of_a_cache(tmp_path: Path, monkeypatch):
    """Flipped bits, and a cut at each byte: it is made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = {"inode": 1}
    assert file_digests.remembered(known, lambda: "abc") == "abc"
    (path,) = (tmp_path / "daguerre" / "digests").iterdir()
    data = path.read_bytes()
    bad = [
        data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        for bit in range(0, 8 * len(data), 11)
    ]
    for each in [
        *bad,
        *(data[:end] for end in range(0, len(data) - 2, 9)),
        b"[]",
        b'{"is": 1}',
        b'{"is": null, "xxh3_128": 1}',
    ]:
        path.write_bytes(each)
        assert file_digests.remembered(known, lambda: "abc") == "abc"
    path.write_bytes(data)
    assert documents.undigested(path) == {"of": known, "is": "abc"}


@pytest.mark.parametrize("attack", ["cut", "empty", "config", "gone"])
def test_a_converted_copy_is_made_again(attack: str, tmp_path: Path, monkeypatch):
    """Of a damaged one in the user's cache the message would be about a place that nobody knows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "source").write_text("x")
    made = []

    def make(fresh: Path) -> None:
        made.append(fresh)
        (fresh / "unet").mkdir()
        (fresh / "unet" / "config.json").write_text("{}")
        seals.write(fresh / "unet" / "a.safetensors", {"a": seals.Tensor([1.0])})

    folder = conversion_cache.once([tmp_path / "source"], make)
    assert conversion_cache.once([tmp_path / "source"], make) == folder
    assert len(made) == 1
    weights = folder / "unet" / "a.safetensors"
    {
        "cut": lambda: ATTACKS["cut"](weights),
        "empty": lambda: ATTACKS["empty"](weights),
        "config": lambda: (folder / "unet" / "config.json").write_text('{"x": 1}'),
        "gone": weights.unlink,
    }[attack]()
    assert conversion_cache.once([tmp_path / "source"], make) == folder
    assert len(made) == 2
    assert conversion_cache.once([tmp_path / "source"], make) == folder
    assert len(made) == 2
