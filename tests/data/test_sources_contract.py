"""What every data source promises, over all files of data/sources that open one."""

import csv
import json
import pickle
import subprocess
import sys
import tarfile
from dataclasses import fields
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from emoji_fonts import colour_font

from daguerre import plugins
from daguerre.data.cached.samples import Fact
from daguerre.data.cached.source import SETS, image_digest, table
from daguerre.data.settings import SourceSettings
from daguerre.data.source import RemoteSource, Split
from daguerre.types import IMAGE, Record

SPLITS: tuple[Split, Split] = ("train", "held_out")
LOOKED_AT = 16
"""Records of a source that are looked at; an endless one has no last."""
SOURCES = [name for name in plugins.names("sources") if hasattr(plugins.find("sources", name), "open_source")]
"""All but the mix, which opens others."""


def rows(image_folder: Path) -> dict[str, list]:
    """The images of the folder as columns."""
    files = sorted(path for path in image_folder.iterdir() if path.suffix != ".txt")
    return {
        "image": [path.read_bytes() for path in files],
        "file_name": [str(path) for path in files],
        "text": [path.with_suffix(".txt").read_text().strip() for path in files],
        "score": [float(i) for i in range(len(files))],
    }


def tables(image_folder: Path, folder: Path) -> Path:
    """Two parquet files."""
    table = pa.table({name: column for name, column in rows(image_folder).items() if name != "file_name"})
    folder.mkdir()
    for i, start in enumerate((0, 5)):
        pq.write_table(table.slice(start, 5 + 2 * i), folder / f"{i}.parquet", row_group_size=2)
    return folder


def text_table(image_folder: Path, folder: Path) -> Path:
    folder.mkdir()
    with (folder / "set.csv").open("w", newline="") as file:
        columns = {name: column for name, column in rows(image_folder).items() if name != "image"}
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    return folder / "set.csv"


def json_lines(image_folder: Path, folder: Path) -> Path:
    folder.mkdir()
    columns = {name: column for name, column in rows(image_folder).items() if name != "image"}
    lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    (folder / "set.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def saved(image_folder: Path, folder: Path) -> Path:
    columns = {name: column for name, column in rows(image_folder).items() if name != "file_name"}
    columns["image"] = [{"bytes": data, "path": None} for data in columns["image"]]
    kinds = {"image": datasets.Image(), "text": datasets.Value("string"), "score": datasets.Value("float32")}
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    datasets.disable_progress_bars()
    made.save_to_disk(folder, num_shards=2)
    return folder


def shards(image_folder: Path, folder: Path) -> Path:
    folder.mkdir()
    files = sorted(image_folder.iterdir())
    for i, start in enumerate((0, 10)):
        with tarfile.open(folder / f"{i}.tar", "w") as tar:
            for path in files[start : start + 10 + 4 * i]:
                tar.add(path, path.name)
    return folder


def known(image_folder: Path, folder: Path) -> Path:
    """A cache that knows all of the folder's samples; rows of features are tests/run/test_cached_runs.py."""
    module = plugins.find("sources", "folder")
    inner = module.open_source(module.Settings(path=str(image_folder), resolution=32), "train")
    records = [inner.record(number) for number in range(inner.index.count)]
    facts = {n: Fact(image_digest(one.image), 40, 48, one.texts, "") for n, one in enumerate(records)}
    (folder / SETS).mkdir(parents=True)
    (folder / SETS / f"{0:016x}.index").write_bytes(table(inner, inner.index, facts, "folder"))
    return folder


def font(_: Path, path: Path) -> Path:
    """A font that draws a few emoji."""
    return colour_font(path)


MAKE = {
    "parquet": tables,
    "csv": text_table,
    "jsonl": json_lines,
    "huggingface": saved,
    "webdataset": shards,
    "cache": known,
}
"""What sources that want a path are given, made from a folder of images."""
DRAWN = {"emoji": font}
"""What sources are given that draw their images, and have an end."""


@pytest.fixture(params=SOURCES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened(name: str, image_folder: Path, tmp_path: Path):
    """Opens a split of the source with the least settings that it takes; a new source starts with none."""
    least: dict[str, object] = {"path": str(image_folder), "resolution": 32} if name == "folder" else {}
    if name in MAKE:
        least = {"path": str(MAKE[name](image_folder, tmp_path / "made")), "resolution": 32}
    if name in DRAWN:
        least = {"font": str(DRAWN[name](image_folder, tmp_path / "made"))}
    module = plugins.find("sources", name)
    settings = module.Settings(**least)

    def source(split):
        found = module.open_source(settings, split)
        assert settings.endless == (found.index is None)
        return found

    return source


def numbers(source) -> range:
    return range(LOOKED_AT if source.index is None else min(source.index.count, LOOKED_AT))


def content(record: Record) -> list[object]:
    values = [getattr(record, field.name) for field in fields(record)]
    images = {n: one.tobytes() if isinstance(one, np.ndarray) else one for n, one in record.images.items()}
    return [images if value is record.images else value for value in values]


def test_settings_start_from_the_shared_ones_and_name_their_file(name):
    settings = plugins.find("sources", name).Settings
    assert issubclass(settings, SourceSettings)
    assert settings.model_fields["source"].default == name


def test_every_file_with_settings_names_itself():
    for name in plugins.names("sources"):
        assert plugins.find("sources", name).Settings.model_fields["source"].default == name


def test_both_splits_hold_something(opened):
    assert all(numbers(opened(split)) for split in SPLITS)


@pytest.mark.parametrize("split", SPLITS)
def test_a_record_is_an_image_with_a_caption(opened, split):
    source = opened(split)
    for number in numbers(source):
        record = source.record(number)
        assert record.key
        assert record.texts["text"].strip()
        if record.features is not None:
            assert record.sizes == {"image": (40, 48)}
            assert not record.images
        elif not isinstance(record.image, bytes):
            assert record.image.dtype == np.uint8
            assert record.image.ndim == 3
            assert record.image.shape[2] == 3


@pytest.mark.parametrize("split", SPLITS)
def test_a_number_gives_the_same_record_for_ever(opened, split):
    first = opened(split)
    again, sent = opened(split), pickle.loads(pickle.dumps(first))  # noqa: S301 - as it goes to a worker
    for number in reversed(numbers(first)):
        expected = content(first.record(number))
        assert content(again.record(number)) == expected
        assert content(sent.record(number)) == expected
        assert again.sample_id(number) == sent.sample_id(number) == first.sample_id(number)
        assert again.name(number) == sent.name(number) == first.name(number)


def test_the_name_is_the_records_key_and_no_other_has_it(opened):
    for split in SPLITS:
        source = opened(split)
        names = [source.name(number) for number in numbers(source)]
        assert names == [source.record(number).key for number in numbers(source)]
        assert len(set(names)) == len(names)


def test_the_images_are_those_that_were_given(opened, image_folder, name):
    source = opened("train")
    if source.index is not None and name not in DRAWN:
        given = rows(image_folder)
        records = [source.record(i) for i in range(source.index.count)]
        found = {record.texts["text"]: record.images.get(IMAGE) or record.features.digests[IMAGE] for record in records}
        kept = bytes if records[0].features is None else image_digest
        assert found == dict(zip(given["text"], map(kept, given["image"]), strict=True))


def test_ids_are_unlike_each_other(opened):
    """Of an endless source within and across the splits; a finite one has the same samples in both."""
    sources = [opened(split) for split in SPLITS]
    if sources[0].index is not None:
        sources = sources[:1]
    ids = [source.sample_id(i) for source in sources for i in numbers(source)]
    assert len(set(ids)) == len(ids)
    assert all(type(i) is int and 0 <= i < 2**63 for i in ids)


def test_the_index_is_of_all_samples_whatever_the_split(opened):
    train, held_out = (opened(split) for split in SPLITS)
    if train.index is None:
        assert held_out.index is None
        return
    index = train.index
    assert index.ids.tolist() == held_out.index.ids.tolist()
    assert index.ids.tolist() == [train.sample_id(i) for i in range(index.count)]
    assert index.ids.dtype == np.int64
    assert index.shard_starts[0] == 0
    assert index.shard_starts[-1] == index.count
    assert (np.diff(index.shard_starts) > 0).all()
    for sizes in (index.heights_px, index.widths_px):
        assert sizes.dtype == np.int32
        assert len(sizes) == index.count
    images = [train.record(i).images.get(IMAGE, b"") for i in range(index.count)]
    shapes = {(40, 48) if isinstance(image, bytes) else image.shape[:2] for image in images}
    assert shapes == set(zip(index.heights_px.tolist(), index.widths_px.tolist(), strict=True))
    for columns, kind in ((index.numbers, pa.float64()), (index.texts, pa.string())):
        for column in (columns[name] for name in columns):
            assert len(column) == index.count
            assert column.type == kind


def test_told_what_is_read_it_gives_the_same_records(opened):
    source = opened("train")
    if not isinstance(source, RemoteSource):
        return
    for share in (0.01, 1.0):
        told = source.reading(np.full(len(source.index.shard_starts) - 1, share))
        for number in numbers(source):
            assert content(told.record(number)) == content(source.record(number))


def test_what_is_near_has_nothing_to_fetch(opened):
    source = opened("train")
    if not isinstance(source, RemoteSource):
        return
    assert source.is_remote is False
    files = len(source.files.sizes_bytes)
    assert [source.prefetch(file) for file in range(files)] == [0] * files


def test_a_source_is_small_when_it_travels(opened):
    """Paths, not samples: its index stays where it is, even after it was read."""
    source = opened("train")
    before = len(pickle.dumps(source))
    assert source.index is None or source.index.count
    source.record(0)
    assert len(pickle.dumps(source)) == before < 4096


def test_the_report_is_counts_by_reason(opened):
    for source in map(opened, SPLITS):
        report = source.report()
        assert json.loads(json.dumps(report)) == report
        for entry in report.values():
            assert entry["count"] >= 1
            assert 1 <= len(entry["examples"]) <= entry["count"]


def test_the_metric_is_one_that_exists(opened):
    metric = opened("held_out").metric
    assert metric is None or metric in plugins.names("metrics")


def test_no_source_imports_torch():
    code = (
        "import sys; from daguerre import plugins\n"
        "for name in plugins.names('sources'): plugins.find('sources', name).Settings\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
