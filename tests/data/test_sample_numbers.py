"""Numbers of the metadata in a batch, such as a reward: through every source, and refused where no sample has them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tars
from PIL import Image

from daguerre import plugins
from daguerre.data.dataset import open_dataset
from daguerre.data.loading.collate import Collator, Task
from daguerre.data.loading.loader import Loading, fixed_batches
from daguerre.data.settings import DataSettings, LoaderSettings
from daguerre.errors import UserError

REWARDS = (1.5, -2, 0, None, 1e-3, True)
"""Of six samples; one has none."""
EXPECTED = {f"image {i}": float(reward) for i, reward in enumerate(REWARDS) if reward is not None}


def images(place: Path) -> list[Path]:
    place.mkdir()
    for number in range(len(REWARDS)):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return sorted(place.glob("*.png"))


def rows(place: Path) -> list[dict]:
    found = []
    for number, path in enumerate(images(place)):
        row = {"file_name": path.name, "text": f"image {number}", "reward": REWARDS[number]}
        found.append({name: value for name, value in row.items() if value is not None})
    return found


def folder(place: Path) -> dict:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows(place / "files"))
    (place / "files" / "metadata.jsonl").write_text(lines)
    return {"source": "folder", "path": str(place / "files")}


def webdataset(place: Path) -> dict:
    members = []
    for number, row in enumerate(rows(place / "files")):
        members.append((f"{number}.png", (place / "files" / row["file_name"]).read_bytes()))
        members.append((f"{number}.json", json.dumps(row).encode()))
    tars.write(place / "0.tar", members)
    return {"source": "webdataset", "path": str(place)}


def parquet(place: Path) -> dict:
    found = rows(place / "files")
    columns = {
        "image": [(place / "files" / row["file_name"]).read_bytes() for row in found],
        "text": [row["text"] for row in found],
        "reward": [None if (reward := row.get("reward")) is None else float(reward) for row in found],
    }
    pq.write_table(pa.table(columns), place / "t.parquet")
    return {"source": "parquet", "path": str(place / "t.parquet")}


def text(place: Path) -> dict:
    found = rows(place / "files")
    with (place / "files" / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*found[0]], *([row.get(name, "") for name in found[0]] for row in found)])
    return {"source": "csv", "path": str(place / "files" / "t.csv")}


def json_lines(place: Path) -> dict:
    (place / "files.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(place / "files")))
    (place / "files.jsonl").rename(place / "files" / "t.jsonl")
    return {"source": "jsonl", "path": str(place / "files" / "t.jsonl")}


MAKE = {make.__name__: make for make in (folder, webdataset, parquet, text, json_lines)}


def settings(given: dict):
    own = {"resolution": 16, "held_out_fraction": 0, "caption_dropout": 0, **given}
    return plugins.find("sources", own["source"]).Settings(**own)


@pytest.mark.parametrize("make", MAKE)
def test_a_number_reaches_the_batch_and_a_sample_without_it_is_left_out(tmp_path, make):
    dataset = open_dataset(settings(MAKE[make](tmp_path)), "train", columns=("reward",))
    assert dataset.count == 5
    assert dataset.report()["no number 'reward' in the metadata"]["count"] == 1
    run = Loading(dataset, LoaderSettings(), 0, 5, 2, lambda _: {}, lambda _: {}, columns=("reward",))
    with run.updates(0) as updates:
        batches = next(updates)
    found = {}
    for batch in batches:
        assert batch.columns["reward"].shape == (len(batch.names),)
        found |= dict(zip(batch.texts, batch.columns["reward"].tolist(), strict=True))
    assert found == pytest.approx(EXPECTED)
    again = [*fixed_batches(dataset, 5, lambda bucket: 5, columns=("reward",))]
    assert dict(zip(again[0].texts, again[0].columns["reward"].tolist(), strict=True)) == pytest.approx(EXPECTED)


def test_a_number_that_no_sample_has_is_refused_with_those_that_there_are(tmp_path):
    own = settings(folder(tmp_path))
    with pytest.raises(UserError, match=r"no sample has a number 'file_name'.*Numbers that there are: reward\."):
        open_dataset(own, "train", columns=("file_name",))
    mix = DataSettings(resolution=16, sources={"a": {"source": "folder", "path": own.path}})
    with pytest.raises(UserError, match=r"data\.sources\.a: no sample has a number 'score'"):
        open_dataset(mix, "train", columns=("reward", "score"))
    with pytest.raises(UserError, match="no sample has a number 'reward'"):
        open_dataset(plugins.find("sources", "shapes").Settings(), "train", columns=("reward",))


def test_a_number_that_is_gone_when_it_is_read_leaves_its_slot_empty(tmp_path):
    given = settings(folder(tmp_path))
    dataset = open_dataset(given, "train", columns=("reward",))
    reads = dataset.first(5)[0][1]
    collator = Collator(dataset.members, 0, {}, ("reward", "other"))
    batch, failures = collator.collate(Task(reads, dataset.buckets[0]))
    assert {failure.reason for failure in failures} == {"no number 'other' in the metadata"}
    assert not batch.valid_B.any()
    assert not batch.columns["reward"].any()
