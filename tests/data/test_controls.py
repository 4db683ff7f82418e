"""Stored control images through every source: cut exactly as their images, with what is unknown, and nothing silent."""

from __future__ import annotations

import csv
import json
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tars
import torch
from PIL import Image

from daguerre import plugins
from daguerre.cli import main
from daguerre.data.dataset import open_dataset
from daguerre.data.images import decode
from daguerre.data.loading.collate import Collator, Task
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SourceSettings
from daguerre.errors import UserError

SIZES = ((40, 48), (64, 32), (33, 57), (90, 60), (32, 32), (47, 96))
WANTED = {"control": None}
TWO = {"control": None, "control_2": None}


def image(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*SIZES[number % len(SIZES)], 3), dtype=np.uint8)


def folder(place: Path, names: dict[str, str], count: int = 8) -> Path:
    """Images with their opposites under these paths; those of `control_2` are upside down, too."""
    place.mkdir(parents=True)
    for i in range(count):
        Image.fromarray(image(i)).save(place / f"{i:02}.png")
        (place / f"{i:02}.txt").write_text(f"image {i}")
        for name, path in names.items():
            where = place / path.format(f"{i:02}")
            where.parent.mkdir(exist_ok=True)
            Image.fromarray(255 - (image(i)[::-1] if name == "control_2" else image(i))).save(where)
    return place


BESIDE = {"control": "{}.control.png", "control_2": "{}.control_2.png"}


def beside(place: Path) -> dict:
    return {"source": "folder", "path": str(folder(place / "files", BESIDE))}


def apart(place: Path) -> dict:
    files = folder(place / "files", {"control": "one/{}.png", "control_2": "two/{}.png"})
    return {
        "source": "folder",
        "path": str(files),
        "control_dir": {n: str(files / d) for n, d in zip(TWO, ("one", "two"), strict=True)},
    }


def webdataset(place: Path) -> dict:
    files = folder(place / "files", BESIDE)
    tars.write(place / "0.tar", [(path.name, path.read_bytes()) for path in sorted(files.iterdir())])
    return {"source": "webdataset", "path": str(place)}


def packed(place: Path) -> dict:
    files = folder(place / "files", BESIDE)
    assert main.run(["data", "pack", str(files), "-o", str(place / "shards"), "processes=1"]) == 0
    return {"source": "webdataset", "path": str(place / "shards")}


def columns(place: Path) -> dict[str, list]:
    files = sorted(folder(place / "files", BESIDE).glob("??.png"))
    beside = {name: [path.with_suffix(f".{name}.png") for path in files] for name in TWO}
    return {"image": files, **beside, "text": [path.with_suffix(".txt").read_text() for path in files]}


def parquet(place: Path) -> dict:
    found = columns(place)
    table = {n: [p.read_bytes() for p in found[n]] if n != "text" else found[n] for n in found}
    pq.write_table(pa.table(table), place / "t.parquet")
    return {"source": "parquet", "path": str(place / "t.parquet"), "control_column": {n: n for n in TWO}}


def text(place: Path) -> dict:
    found = columns(place)
    with (place / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*found], *zip(*found.values(), strict=True)])
    return {"source": "csv", "path": str(place / "t.csv"), "control_column": {n: n for n in TWO}}


def json_lines(place: Path) -> dict:
    """As ControlNet's own data set, whose prompt.json has the keys source, target and prompt."""
    found = columns(place)
    names = {"image": "target", "control": "source", "control_2": "control_2", "text": "prompt"}
    rows = (
        {names[n]: str(value) for n, value in zip(found, row, strict=True)} for row in zip(*found.values(), strict=True)
    )
    (place / "prompt.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = {"image_column": "target", "caption_column": "prompt"}
    controls = {"control": "source", "control_2": "control_2"}
    return {"source": "jsonl", "path": str(place), **keys, "control_column": controls}


MAKE = {make.__name__: make for make in (beside, apart, webdataset, packed, parquet, text, json_lines)}


def opened(given: dict, wanted=WANTED, **more):
    own = {"resolution": 48, "held_out_fraction": 0, "interpolation": "nearest", **given, **more}
    return open_dataset(plugins.find("sources", own["source"]).Settings(**own), "train", wanted)


def batches(dataset, wanted) -> list:
    """One of each bucket, of all its samples."""
    collator = Collator(dataset.members, 3, wanted)
    made = [collator.collate(Task(reads, dataset.buckets[bucket])) for bucket, reads in dataset.first(100)]
    assert not [failure for _, failures in made for failure in failures]
    return [batch for batch, _ in made]


@pytest.mark.parametrize("make", MAKE)
def test_control_images_are_cut_as_their_images_through_every_source(tmp_path, make):
    own = {"random_flip": True, "crop": "random", "buckets": {"aspects": ["1/1", "1/2"], "step": 16}}
    found = batches(opened(MAKE[make](tmp_path), TWO, **own), TWO)
    assert sum(len(batch.names) for batch in found) == 8
    for batch in found:
        assert batch.images["control"].shape == (len(batch.names), 4, *batch.pixels_BCHW.shape[2:])
        assert (batch.images["control"][:, 3] == 255).all()
        assert torch.equal(batch.images["control"][:, :3], 255 - batch.pixels_BCHW)
        assert not torch.equal(batch.images["control_2"][:, :3], 255 - batch.pixels_BCHW)


def test_the_column_of_diffusers_is_found(tmp_path):
    found = columns(tmp_path)
    kinds = {"image": datasets.Image(), "conditioning_image": datasets.Image(), "text": datasets.Value("string")}
    rows = {"image": found["image"], "conditioning_image": found["control"]}
    rows = {n: [{"bytes": path.read_bytes(), "path": None} for path in paths] for n, paths in rows.items()}
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({**rows, "text": found["text"]}, features=datasets.Features(kinds))
    made.save_to_disk(tmp_path / "set")
    dataset = opened({"source": "huggingface", "path": str(tmp_path / "set")})
    assert any("control images from 'conditioning_image'" in reason for reason in dataset.report())
    for batch in batches(dataset, WANTED):
        assert torch.equal(batch.images["control"][:, :3], 255 - batch.pixels_BCHW)


def test_samples_without_one_are_left_out_before_training_and_damaged_ones_with_their_reason(tmp_path):
    files = folder(tmp_path / "a", {"control": "{}.control.png"})
    for name in ("01", "02"):
        (files / f"{name}.control.png").unlink()
    Image.fromarray(image(0)[:10]).save(files / "03.control.png")
    dataset = opened({"source": "folder", "path": str(files)})
    assert dataset.count == 5
    found = {reason: entry["count"] for reason, entry in dataset.report().items()}
    assert found["no control image (control) with the image"] == 2
    assert found["control: another aspect ratio than its image's"] == 1
    assert opened({"source": "folder", "path": str(files)}, {}).count == 7  # where nothing reads them
    with pytest.raises(UserError, match=r"no sample has a control image \(control_2\).*adapter.condition"):
        opened({"source": "folder", "path": str(files)}, TWO)


def test_a_folder_of_control_images_says_what_it_does_not_use(tmp_path):
    files = folder(tmp_path / "a", {"control": "{}.control.png"}, 3)
    (tmp_path / "c").mkdir()
    for name in ("00", "77"):
        Image.fromarray(image(0)).save(tmp_path / "c" / f"{name}.png")
    dataset = opened({"source": "folder", "path": str(files), "control_dir": str(tmp_path / "c")})
    found = {reason: (entry["count"], entry["examples"]) for reason, entry in dataset.report().items()}
    assert found["control image without an image of its name"] == (1, [str(tmp_path / "c" / "77.png")])
    assert found["duplicate: second control image of one image"][0] == 1
    with pytest.raises(UserError, match=r"data.control_dir: 'no' is not a folder"):
        opened({"source": "folder", "path": str(files), "control_dir": "no"})
    with pytest.raises(ValueError, match="control_9"):
        opened({"source": "folder", "path": str(files), "control_dir": {"control_9": "no"}})


def test_columns_that_cannot_be_control_images_are_refused(tmp_path):
    pq.write_table(pa.table({"image": [b"x"], "n": [1], "text": ["a"]}), tmp_path / "t.parquet")
    for column, said in (("n", "data.control_column.*whole numbers"), ({"control": "no"}, "control_column.*no column")):
        with pytest.raises(UserError, match=said):
            opened({"source": "parquet", "path": str(tmp_path / "t.parquet"), "control_column": column})
    with pytest.raises(ValueError, match="control_column: 'image' holds images"):
        opened({"source": "parquet", "path": "t", "image_column": "image", "control_column": {"control_2": "image"}})


# ---- what is unknown


def cut(control: np.ndarray | bytes, **more) -> torch.Tensor:
    """[4, 32, 32] of a control image of a scene of 64 x 64."""
    own = SourceSettings(source="test", resolution=32, alpha_colour="#00ff00", **more)
    images = {"image": np.zeros((64, 64, 3), np.uint8), "control": control}
    return decode.cut(images, own, Bucket(32, 32), 0, np.array([3, 1, 0]), WANTED)[1]["control"]


@pytest.mark.parametrize("filter_", ["nearest", "area", "bilinear", "bicubic", "lanczos"])
def test_transparent_parts_stay_unknown_and_lend_no_colour(filter_):
    control = np.full((64, 64, 4), (200, 100, 50, 255), np.uint8)
    control[20:, :30] = (0, 255, 0, 0)  # another colour under the transparent part
    found = cut(control, interpolation=filter_)
    unknown = torch.from_numpy(control[1::2, 1::2, 3] == 0)
    assert torch.equal(found[3], torch.where(unknown, 0, 255).to(torch.uint8))
    assert not found[:, unknown].any()
    assert (found[:3, ~unknown].T.int() - torch.tensor([200, 100, 50])).abs().max() <= 4  # lent green would be tens


@pytest.mark.parametrize("filter_", ["nearest", "area", "bilinear", "bicubic", "lanczos"])
def test_an_opaque_one_is_resized_as_an_image(filter_):
    scene = image(3)
    own = SourceSettings(source="test", resolution=32, interpolation=filter_, crop="random", random_flip=True)
    key = np.array([3, 1, 0])
    for control in (scene, np.dstack([scene, np.full(scene.shape[:2], 255, np.uint8)])):
        _, found = decode.cut({"image": scene, "control": control}, own, Bucket(32, 32), 0, key, WANTED)
        assert torch.equal(found["control"][:3], found["image"])
        assert (found["control"][3] == 255).all()
    with pytest.raises(decode.Undecodable, match=r"no control image \(control\)"):
        decode.cut({"image": scene}, own, Bucket(32, 32), 0, key, WANTED)


def test_files_with_alpha_palettes_and_none_come_as_rgba(tmp_path):
    def saved(picture: Image.Image, kind: str) -> bytes:
        picture.save(buffer := BytesIO(), kind)
        return buffer.getvalue()

    red = Image.new("RGBA", (64, 64), (255, 0, 0, 255))
    red.paste((0, 0, 0, 0), (0, 0, 64, 32))
    for encoded in (saved(red, "PNG"), saved(red.convert("P"), "PNG"), saved(red, "WEBP")):
        found = cut(encoded)
        assert not found[:, :15].any()
        assert (found[3, 17:] == 255).all()
        assert (found[0, 17:] > 250).all()
    assert (cut(saved(red.convert("RGB"), "JPEG"))[3] == 255).all()
