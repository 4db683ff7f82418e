"""Hugging Face data sets: folders of `save_to_disk`, and data sets by name; what is damaged names itself."""

import builtins
import io
import json
import re
import shutil
import time

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pydantic import ValidationError
from refusals import refused

from daguerre.data.images.headers import Undecodable
from daguerre.data.sources import huggingface
from daguerre.errors import Absent, UserError, install


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def png(i):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (20, 30, 3), np.uint8)).save(file, "png")
    return file.getvalue()


def dataset(n=6, **more):
    columns = {
        "image": [{"bytes": png(i), "path": None} for i in range(n)],
        "text": [f"image {i}" for i in range(n)],
        "label": [i % 2 for i in range(n)],
        "score": [i / 2 for i in range(n)],
        **more,
    }
    kinds = {
        "image": datasets.Image(),
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "score": datasets.Value("float32"),
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def saved(folder, made=None, **given):
    (dataset() if made is None else made).save_to_disk(folder, **given)
    return folder


def opened(path=None, **given):
    place = {} if path is None else {"path": str(path)}
    return huggingface.open_source(huggingface.Settings(**place, **{"resolution": 16, **given}), "train")


def texts(source):
    return [source.record(i).texts["text"] for i in range(source.index.count)]


def test_a_dataset_in_several_files(tmp_path):
    source = opened(saved(tmp_path / "set", num_shards=3))
    assert texts(source) == [f"image {i}" for i in range(6)]
    assert [source.record(i).image for i in range(6)] == [png(i) for i in range(6)]
    assert source.record(3).metadata == {"label": 1, "score": 1.5}
    assert source.index.numbers["score"].to_pylist() == [i / 2 for i in range(6)]
    assert source.index.shard_starts.tolist() == [0, 2, 4, 6]
    assert source.index.heights_px.tolist() == [20] * 6
    assert source.name(2).endswith("set/data-00001-of-00003.arrow row 0")


def test_what_the_library_reads_is_what_is_read(tmp_path):
    folder = saved(tmp_path / "set")
    source, theirs = opened(folder), datasets.load_from_disk(folder)
    for i, row in enumerate(theirs):
        ours = source.record(i)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(ours.image))), np.asarray(row["image"]))
        assert (ours.texts["text"], ours.metadata["label"]) == (row["text"], row["label"])


def test_images_that_were_files_are_in_the_folder(tmp_path):
    Image.fromarray(np.full((20, 30, 3), 9, np.uint8)).save(tmp_path / "a.png")
    made = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")], "text": ["x"]})
    folder = saved(tmp_path / "set", made.cast_column("image", datasets.Image()))
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").unlink()
    assert opened(folder).record(0).image == whole


def test_class_labels(tmp_path):
    made = dataset(4, label=[0, 1, -1, 1]).remove_columns("text")
    source = opened(saved(tmp_path / "set", made))
    assert texts(source) == ["cat", "dog", "dog"]
    assert source.report()["class label without a name (column 'label')"]["count"] == 1
    named = opened(tmp_path / "set", idx_to_prompt=["a kitten", "a puppy"])
    assert texts(named) == ["a kitten", "a puppy", "a puppy"]
    chosen = opened(saved(tmp_path / "both"), caption_column="label")
    assert texts(chosen)[:2] == ["cat", "dog"]
    assert chosen.record(0).metadata["text"] == "image 0"


def test_splits(tmp_path):
    both = datasets.DatasetDict({"test": dataset(2), "train": dataset(4)})
    folder = saved(tmp_path / "set", both)
    assert opened(folder).index.count == 4
    assert opened(folder, split="test").index.count == 2
    with pytest.raises(UserError, match=r"data\.split: .* has no split 'validation'; it has test, train"):
        opened(folder, split="validation")
    only = saved(tmp_path / "only", datasets.DatasetDict({"test": dataset(2)}))
    assert opened(only).index.count == 2
    others = saved(tmp_path / "others", datasets.DatasetDict({"a": dataset(2), "b": dataset(2)}))
    with refused("unknown", "data.split", "'train'", "it has a, b"):
        opened(others)
    with pytest.raises(UserError, match=r"data\.split: .* is a single data set without splits: remove"):
        opened(folder / "train", split="train")


def test_ids_hang_on_the_contents_alone(tmp_path):
    first = opened(saved(tmp_path / "set"))
    moved = opened(shutil.copytree(tmp_path / "set", tmp_path / "moved"))
    assert first.index.ids.tolist() == moved.index.ids.tolist()


def test_a_selection_is_saved_flat_and_read_as_such(tmp_path):
    folder = saved(tmp_path / "set", dataset().select([4, 1]))
    assert texts(opened(folder)) == ["image 4", "image 1"]


def edited(folder, name, change):
    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: shutil.rmtree(f), r"data\.path: .*set' does not exist"),
        (lambda f: (f / "state.json").unlink(), r"has no state\.json.*Give the folder that was given to save_to_disk"),
        (lambda f: (f / "state.json").write_text("{"), r"state\.json' is damaged: it holds no JSON object"),
        (lambda f: (f / "state.json").write_text("[]"), r"state\.json' is damaged"),
        (lambda f: (f / "state.json").write_text("{}"), r"lists no files: the folder is damaged"),
        (lambda f: edited(f, "state.json", lambda d: d.update(_data_files=[5])), r"lists no files"),
        (lambda f: edited(f, "state.json", lambda d: d.update(_data_files=[{"filename": "../x"}])), r"lists no files"),
        (lambda f: edited(f, "state.json", lambda d: d.update(_indices_files=[{"filename": "x"}])), r"flatten_indices"),
        (lambda f: (f / "data-00001-of-00002.arrow").unlink(), r"lacks 1 of its 2 files: data-00001-of-00002"),
        (lambda f: (f / "data-00001-of-00002.arrow").write_bytes(b"<html>"), r"00001-of-00002\.arrow cannot be read"),
        (lambda f: (f / "data-00001-of-00002.arrow").write_bytes(b""), r"00001-of-00002\.arrow cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path, damage, said):
    folder = saved(tmp_path / "set", num_shards=2)
    damage(folder)
    with pytest.raises(UserError, match=said):
        opened(folder)


def test_a_folder_of_something_else(tmp_path):
    dataset().to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"holds \.parquet files: read them with data\.source=parquet"):
        opened(tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        opened(tmp_path / "a.parquet")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../x"]}')
    with pytest.raises(UserError, match="lists no splits"):
        opened(tmp_path)


def test_files_cut_anywhere(tmp_path):
    """Nothing is lost uncounted: the rows are all there, or the file names itself."""
    folder = saved(tmp_path / "set")
    file = folder / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for size in range(0, len(whole), len(whole) // 40):
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"00000-of-00001\.arrow cannot be read as a table"):
            opened(folder)


def test_a_file_cut_between_two_batches(tmp_path):
    """What a reader of streams takes for the end."""
    folder = saved(tmp_path / "set")
    file = folder / "data-00000-of-00001.arrow"
    table = pa.table({"image": [png(0), png(1)], "text": ["a", "b"]})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.slice(0, 1))
        end = sink.tell()
        writer.write_table(table.slice(1, 1))
    assert texts(opened(folder)) == ["a", "b"]
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(UserError, match=r"cannot be read as a table: it ends too early"):
        opened(folder)


def test_bits_flipped_anywhere(tmp_path):
    """In a map, an offset that is wrong leads anywhere: each row is what it was, or is counted, and nothing dies."""
    folder = saved(tmp_path / "set", dataset(20))
    file = folder / "data-00000-of-00001.arrow"
    whole, draws = file.read_bytes(), np.random.default_rng(0)
    good = {(r.texts["text"], r.image) for r in map(opened(folder).record, range(20))}
    start = whole.index(b"image 0")  # offsets of the columns stand before and behind their values
    for trial in range(60):
        body = bytearray(whole)
        first, last = (start - 400, min(start + 1200, len(body))) if trial % 2 else (0, len(body))
        place = int(draws.integers(first, last))
        body[place] ^= 1 << int(draws.integers(8))
        file.write_bytes(body)
        try:
            source = opened(folder)
        except UserError as error:
            assert "data-00000-of-00001.arrow" in str(error)  # noqa: PT017 - either outcome is right
            continue
        found = [source.record(i) for i in range(source.index.count)]
        left_out = sum(entry["count"] for entry in source.report().values() if not entry["kept"])
        assert len(found) + left_out == 20
        assert len([r for r in found if (r.texts["text"], r.image) not in good]) <= 2


def test_bytes_that_change_under_a_run(tmp_path):
    folder = saved(tmp_path / "set")
    file = folder / "data-00000-of-00001.arrow"
    source = opened(folder)
    body = bytearray(file.read_bytes())
    place = body.index(png(3))
    body[place + 100] ^= 1
    file.write_bytes(body)
    assert source.record(2).image == png(2)
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(3)
    file.write_bytes(b"<html>")
    with pytest.raises(Undecodable, match="bytes differ from the index"):
        source.record(0)


def test_the_file_format_of_arrow(tmp_path):
    folder = saved(tmp_path / "set")
    table = pa.table({"image": [png(0), png(1)], "text": ["a", "b"]})
    with pa.ipc.new_file(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    assert texts(opened(folder)) == ["a", "b"]


def test_columns_are_chosen_as_in_every_table(tmp_path):
    folder = saved(tmp_path / "set", dataset().rename_column("text", "words").remove_columns("label"))
    with pytest.raises(UserError, match=r"data\.caption_column: no column looks like .*words \(text\)"):
        opened(folder)
    assert texts(opened(folder, caption_column="words"))[0] == "image 0"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give either path .* or name"),
        ({"path": "x", "name": "y"}, "give either path .* or name .*data.name=null drops a recipe's, .*source=folder"),
        ({"path": "x", "config": "y"}, "config: no effect on a folder"),
        ({"path": "x", "revision": "y"}, "revision: no effect on a folder"),
        ({"name": "x", "split": "train[:10]"}, "split"),
    ],
)
def test_settings_that_do_not_fit(given, said):
    with pytest.raises(ValidationError, match=said):
        huggingface.Settings(**given)


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A data set that the library loads by name: a folder of parquet files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "named").mkdir()
    dataset(5).to_parquet(tmp_path / "named" / "train.parquet")
    dataset(2).to_parquet(tmp_path / "named" / "test.parquet")
    return str(tmp_path / "named")


def test_a_data_set_by_name(named):
    source = opened(name=named)
    assert texts(source) == [f"image {i}" for i in range(5)]
    assert source.record(4).image == png(4)
    assert opened(name=named, split="test").index.count == 2
    with pytest.raises(UserError, match=r"data\.split: the data set .* has no split 'dev'; it has train, test"):
        opened(name=named, split="dev")


def test_a_name_that_nobody_has(named):
    with pytest.raises(UserError, match=r"(?s)data\.name: .* 'nobody/nothing' cannot be loaded: .*Check its name"):
        opened(name="nobody/nothing")


def test_a_hub_that_cannot_be_reached_is_said_at_once(named, monkeypatch):
    """Nothing listens at the address: the library alone would try for half a minute."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    told = (
        r"the data set 'nobody/nothing' is not on this machine, and the hub cannot be reached \(http://127.*refused\)"
        r"\. Without a network: `hf download --repo-type dataset nobody/nothing --revision v2 --local-dir DIR` on a "
        r"machine that has one, then data\.name=DIR here"
    )
    with pytest.raises(Absent, match=told):
        opened(name="nobody/nothing", revision="v2")
    assert time.monotonic() - began < 10
    assert datasets.config.HF_HUB_OFFLINE is False
    assert opened(name=named).index.count == 5, "what is here needs no hub"


def test_what_is_in_no_cache_is_not_fetched_where_it_is_only_looked_for(named, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with (
        huggingface.from_cache_alone(),
        pytest.raises(Absent, match=r"'nobody/nothing' is not on this machine yet: `daguerre train` fetches it"),
    ):
        opened(name="nobody/nothing")
    assert datasets.config.HF_HUB_OFFLINE is False
    with huggingface.from_cache_alone():
        assert opened(name=named).index.count == 5


def test_without_the_library(named, monkeypatch):
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(install("datasets"))):
        opened(name=named)


def test_a_folder_is_read_without_the_library(tmp_path, monkeypatch):
    folder = saved(tmp_path / "set")
    real = builtins.__import__

    def refused(name, *arguments):
        assert name.split(".")[0] != "datasets"
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refused)
    assert len(texts(opened(folder))) == 6
