"""Large sets, whose ids stay in their index files and whose choice is in a file: the same as small ones to the bit."""

import errno
import subprocess
import sys
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from shards import build

from daguerre.data.dataset import open_datasets
from daguerre.data.index import file, index, join
from daguerre.data.index.bitmap import BLOCK, Bitmap, packed
from daguerre.data.index.file import About, ShardIndex
from daguerre.data.plan import buckets, kept, selection
from daguerre.data.plan.batches import BatchPlan
from daguerre.data.plan.selection import select
from daguerre.data.settings import SourceSettings
from daguerre.data.sources import webdataset
from daguerre.errors import UserError

COUNTS = (1700, 0, 1, 900, 2048, 513, 64)
EVERY = ["train", "held_out"]


def save(path: Path, seed: int, count: int) -> Path:
    """An index of random facts."""
    rng = np.random.default_rng(seed)
    known = rng.random(count) < 0.8
    columns = {
        "id": rng.integers(0, 1 << 63, count, np.int64),
        "height": rng.integers(64, 900, count).astype(np.int32),
        "width": rng.integers(64, 900, count).astype(np.int32),
        "digest": np.zeros(count, np.uint64),
        "c:text": pa.array(rng.random(count) < 0.95),
    }
    if seed != 3:  # this shard has neither
        columns["n:score"] = pa.array([s if k else None for s, k in zip(rng.random(count), known, strict=True)])
        columns["i:mask"] = pa.array(rng.random(count) < 0.9)
    file.save(ShardIndex(pa.table(columns), About("kind", path.name, 1, "00" * 16)), path)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes")
    return [save(folder / f"{seed}.index", seed, count) for seed, count in enumerate(COUNTS)]


@pytest.fixture
def large(monkeypatch):
    """Everything is large, and worked on in many parts."""
    monkeypatch.setattr(join, "LARGE_SAMPLES", 1)
    monkeypatch.setattr(join, "_TWIN_BITS", 9)
    monkeypatch.setattr(join, "_CHUNK", 700)
    for module in (index, selection):
        monkeypatch.setattr(module, "PART_SAMPLES", 2 * BLOCK)


def settings(folder, **given):
    usual = {
        "resolution": 256,
        "buckets": {"aspects": "auto", "step": 16},
        "filters": "score > 0.2",
        "held_out_fraction": 0.1,
    }
    return SourceSettings(source="test", cache_dir=str(folder), **{**usual, **given})


def chosen(paths, own, columns=("score",)):
    return select(join.combined(paths), own, EVERY, images=["mask"], columns=columns)


def content(one):
    arrays = (one.numbers[:], one.ids[:], one.shard_starts, one.shares, one.buckets)
    return [array.tolist() for array in arrays], one.left_out, one.images


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"filters": None, "held_out_fraction": 1e-12},
        {"held_out_fraction": 0, "buckets": {"aspects": "auto", "upscale": False, "random": 0.5, "step": 16}},
        {"buckets": {"aspects": "square"}, "filters": "missing(score) or score < 0.5"},
    ],
)
def test_the_same_is_chosen_as_of_a_small_set(paths, tmp_path, request, given):
    own = settings(tmp_path, **given)
    columns = () if "missing" in str(given) else ("score",)
    expected = [content(one) for one in chosen(paths, own, columns)]
    assert not list(tmp_path.iterdir()), "a small set needs no file"
    request.getfixturevalue("large")
    for time in ("made", "found"):
        found = chosen(paths, own, columns)
        assert [content(one) for one in found] == expected, time
    for one in found:
        of = np.searchsorted(one.shard_starts, np.arange(len(one.numbers)), side="right") - 1
        table = np.zeros_like(one.by_shard)
        np.add.at(table, (of, one.buckets), 1)
        assert np.array_equal(one.by_shard, table)
        assert one.in_buckets(table.shape[1]).tolist() == np.bincount(one.buckets, minlength=table.shape[1]).tolist()


def test_a_reader_of_row_after_row_chooses_the_same(paths, tmp_path, large):
    train, held_out = chosen(paths, settings(tmp_path))
    shapes = buckets.buckets(settings(tmp_path))
    found = {}
    for one in (train, held_out):
        rows = zip(one.numbers[:].tolist(), one.ids[:].tolist(), one.buckets.tolist(), strict=True)
        found |= {number: (own, bucket) for number, own, bucket in rows}
    start = 0
    for path in paths:
        for row in file.load(path).table.to_pylist():
            if (row.get("n:score") or 0) > 0.2 and row["c:text"] and row["i:mask"]:
                own, bucket = found.pop(start)
                assert own == row["id"]
                off = [abs(np.log(shape.aspect / (row["width"] / row["height"]))) for shape in shapes]
                assert off[bucket] == pytest.approx(min(off))
            start += 1
    assert not found
    assert 0.05 < len(held_out.numbers) / (len(train.numbers) + len(held_out.numbers)) < 0.15


def batches(one, own, start, count, ranks=1):
    """Batches of this selection: bucket, and numbers and ids, rank after rank."""
    number = len(buckets.buckets(own))
    plan = BatchPlan(5, [one.order(own, 5, number)], [one.buckets], [Fraction(1)], number, 24)
    found = []
    for planned in islice(plan.batches(start), count):
        places = [planned.part(rank, ranks).indexes for rank in range(ranks)]
        read = [
            pair for each in places for pair in zip(one.numbers[each].tolist(), one.ids[each].tolist(), strict=True)
        ]
        found.append((planned.bucket, read))
    return found


def test_batches_are_those_of_a_small_set_from_any_position_for_any_number_of_ranks(paths, tmp_path, request):
    own = settings(tmp_path, lanes=4, lane_samples=64, repeats=2)
    expected = batches(chosen(paths, own)[0], own, 0, 700)
    assert len({bucket for bucket, _ in expected}) > 5
    request.getfixturevalue("large")
    one = chosen(paths, own)[0]
    assert batches(one, own, 0, 300) == expected[:300]
    for start, ranks in ((1, 2), (155, 3), (301, 8), (690, 24)):
        assert batches(one, own, start, 10, ranks) == expected[start : start + 10], start


def test_a_data_set_of_tar_shards_is_the_same(tmp_path, request):
    build(tmp_path / "shards", 3, 20)
    given = {"filters": "score >= 3 and lang == 'en'", "resolution": 32, "held_out_fraction": 0.2}
    given |= {"buckets": {"aspects": [1, "1/2", 2], "step": 16}, "cache_dir": str(tmp_path / "cache")}
    own = webdataset.Settings(path=str(tmp_path / "shards"), **given)

    def facts():
        found = []
        for dataset in open_datasets(own, EVERY):
            slots = dataset.plan(3, 4).slots(0, 100)
            read = dataset.reads(slots)
            found += [
                dataset.fingerprint,
                dataset.report(),
                dataset.notes(4),
                read.numbers.tolist(),
                read.keys.tolist(),
            ]
        return found

    expected = facts()
    request.getfixturevalue("large")
    assert facts() == expected
    assert facts() == expected
    assert len(list((tmp_path / "cache" / "indexes").glob("*.chosen"))) == 1


def test_what_was_chosen_is_read_and_not_chosen_again(paths, tmp_path, large, monkeypatch, capsys):
    expected = [content(one) for one in chosen(paths, settings(tmp_path))]
    assert "once for these settings" in capsys.readouterr().err
    monkeypatch.setattr(selection, "_chosen", None)
    assert [content(one) for one in chosen(paths, settings(tmp_path))] == expected
    assert capsys.readouterr().err == ""
    for other in (settings(tmp_path, filters="score > 0.3"), settings(tmp_path, resolution=128)):
        with pytest.raises(TypeError):
            chosen(paths, other)
    with pytest.raises(TypeError):
        chosen(paths[:-1], settings(tmp_path))


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.9, None])
def test_a_damaged_file_is_seen_and_made_again(paths, tmp_path, large, capsys, where):
    expected = [content(one) for one in chosen(paths, settings(tmp_path))]
    (path,) = (tmp_path / "indexes").glob("*.chosen")
    whole = path.read_bytes()
    damaged = bytearray(whole)
    if where is None:
        del damaged[len(damaged) // 2 :]
    else:
        damaged[int(len(damaged) * where)] ^= 4
    path.write_bytes(damaged)
    capsys.readouterr()
    assert [content(one) for one in chosen(paths, settings(tmp_path))] == expected
    said = capsys.readouterr().err
    assert path.read_bytes() == whole
    assert said.count("is damaged, and made again") == 1, said


_ONE = """
import sys, time
import numpy as np
from pathlib import Path
from daguerre.data.plan.kept import Choice, choices
def choose():
    with open(sys.argv[2], "a") as file:
        file.write("chosen\\n")
    time.sleep(0.5)
    return [Choice(np.zeros((1, 64), np.uint8), np.arange(9, dtype=np.int16), np.ones((2, 3), np.int32), {}, {}, "x")]
print(choices(Path(sys.argv[1]), choose)[0].buckets.sum())
"""


def test_of_processes_that_open_at_once_one_chooses(tmp_path):
    (tmp_path / "indexes").mkdir()
    command = [sys.executable, "-c", _ONE, str(tmp_path / "indexes" / "a.chosen"), str(tmp_path / "said")]
    begun = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in begun] == ["36"] * 2
    assert (tmp_path / "said").read_text() == "chosen\n"


def test_a_full_disk_is_said(paths, tmp_path, large, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept.ipc, "new_stream", full)
    with pytest.raises(UserError, match=r"data\.cache_dir: .*No space left on device.*data\.cache_dir=DIR"):
        chosen(paths, settings(tmp_path))
    assert [path.name for path in (tmp_path / "indexes").iterdir()] == ["lock"]


def test_the_files_that_were_used_last_stay(paths, tmp_path, large, monkeypatch):
    monkeypatch.setattr(kept, "KEPT", 2)
    for score in (0.1, 0.2, 0.1, 0.3):
        chosen(paths, settings(tmp_path, filters=f"score > {score}"))
    assert len(list((tmp_path / "indexes").glob("*.chosen"))) == 2
    monkeypatch.setattr(selection, "_chosen", None)
    for score in (0.1, 0.3):
        chosen(paths, settings(tmp_path, filters=f"score > {score}"))


def test_a_sample_that_is_there_twice_is_found_among_many(paths, tmp_path, large):
    with pytest.raises(
        UserError, match=r"sample (\d+) of 3\.index and sample \1 of 3\.index have the same id, as have 899 m"
    ):
        chosen([*paths, paths[3]], settings(tmp_path))


def test_what_no_sample_has_is_refused_whatever_the_part(paths, tmp_path, large):
    own, whole = settings(tmp_path, buckets={}), join.combined(paths)
    with pytest.raises(UserError, match="no sample has a number 'other'"):
        select(whole, own, EVERY, columns=["other"])
    with pytest.raises(UserError, match="control"):
        select(whole, own, EVERY, images=["control"])
    with pytest.raises(UserError, match="every one of the 5,226 samples is left out"):
        select(whole, settings(tmp_path, filters="score > 2"), EVERY)


def test_an_index_that_was_replaced_is_noticed_when_its_ids_are_read(tmp_path, large):
    paths = [save(tmp_path / "a.index", 0, 600), save(tmp_path / "b.index", 1, 600)]
    one = chosen(paths, settings(tmp_path))[0]
    save(paths[1], 2, 600)
    assert len(one.ids[:5]) == 5
    with pytest.raises(UserError, match="was replaced"):
        one.ids[:]


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 1])
@pytest.mark.parametrize("count", [0, 1, BLOCK, 20_000])
def test_bits_read_as_the_numbers_they_stand_for(count, share):
    rng = np.random.default_rng(count)
    chosen = rng.random(count) < share
    numbers = np.flatnonzero(chosen)
    bits = Bitmap(packed(chosen[first : first + 2 * BLOCK] for first in range(0, count, 2 * BLOCK)))
    assert len(bits) == len(numbers)
    for asked in (slice(None), slice(3, 40), slice(count // 9, count // 7), slice(7, 3), slice(-5, None)):
        assert np.array_equal(bits[asked], numbers[asked])
    if len(numbers):
        places = rng.integers(0, len(numbers), (3, 4000))
        assert np.array_equal(bits[places], numbers[places])
        assert bits[len(numbers) - 1] == numbers[-1]
        assert np.array_equal(bits[numbers % 2 == 0], numbers[numbers % 2 == 0])
        below = np.sort(rng.integers(0, count + 1, 9000))
        assert np.array_equal(bits.rank(below), np.searchsorted(numbers, below))
