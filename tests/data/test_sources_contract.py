"""What every data source promises, over all files of data/sources that open one."""

import csv
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from emoji_fonts import colour_font

from daguerre import plugins
from daguerre.contracts.sources import SourceContract
from daguerre.data.cached.samples import Fact
from daguerre.data.cached.source import SETS, image_digest, table
from daguerre.types import IMAGE

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
def given(name: str, image_folder: Path, tmp_path: Path) -> dict[str, object]:
    """The least settings that a source takes; a new source starts with none."""
    if name in DRAWN:
        return {"font": str(DRAWN[name](image_folder, tmp_path / "made"))}
    if name in MAKE:
        return {"path": str(MAKE[name](image_folder, tmp_path / "made")), "resolution": 32}
    return {"path": str(image_folder), "resolution": 32} if name == "folder" else {}


class TestSource(SourceContract):
    """The contract, over all of them, and what they are given."""

    def test_the_images_are_those_that_were_given(self, opened, image_folder, name):
        source = opened("train")
        if source.index is not None and name not in DRAWN:
            given = rows(image_folder)
            records = [source.record(i) for i in range(source.index.count)]
            found = {
                record.texts["text"]: record.images.get(IMAGE) or record.features.digests[IMAGE] for record in records
            }
            assert all(record.sizes == {IMAGE: (40, 48)} for record in records if record.features is not None)
            kept = bytes if records[0].features is None else image_digest
            assert found == dict(zip(given["text"], map(kept, given["image"]), strict=True))


def test_every_file_with_settings_names_itself():
    for name in plugins.names("sources"):
        assert plugins.find("sources", name).Settings.model_fields["source"].default == name


def test_no_source_imports_torch():
    code = (
        "import sys; from daguerre import plugins\n"
        "for name in plugins.names('sources'): plugins.find('sources', name).Settings\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
