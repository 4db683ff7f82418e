"""Targets, the further images of a sample that become clean samples: through every source, each by its own frame."""

from __future__ import annotations

import numpy as np
import pairs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from daguerre import plugins
from daguerre.cli import main
from daguerre.data.dataset import open_dataset
from daguerre.data.images import decode
from daguerre.data.loading.collate import Collator, Task
from daguerre.data.loading.loader import Loading, fixed_batches
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import LoaderSettings, SourceSettings
from daguerre.errors import UserError

WANTED = {"rejected": None}
SHAPES = {"random_flip": True, "crop": "random", "buckets": {"aspects": ["1/1", "1/2"], "step": 16}}


def opened(given: dict, wanted=WANTED, split="train", **more):
    own = {"resolution": 48, "held_out_fraction": 0, "interpolation": "nearest", **given, **more}
    return open_dataset(plugins.find("sources", own["source"]).Settings(**own), split, wanted)


def collated(dataset, wanted=WANTED):
    """A batch of each bucket, of all its samples, each with its bucket."""
    collator = Collator(dataset.members, 3, wanted)
    made = [(dataset.buckets[i], *collator.collate(Task(reads, dataset.buckets[i]))) for i, reads in dataset.first(100)]
    assert not [failure for _, _, failures in made for failure in failures]
    return [(bucket, batch) for bucket, batch, _ in made]


@pytest.mark.parametrize("make", pairs.MAKE)
def test_a_target_is_cut_to_the_bucket_of_its_sample_as_if_it_were_trained_on(tmp_path, make):
    dataset = opened(pairs.MAKE[make](tmp_path), **SHAPES)
    settings, found = dataset.members[0].settings, 0
    for bucket, batch in collated(dataset):
        assert batch.images["rejected"].shape == batch.pixels_BCHW.shape
        for row, text in enumerate(batch.texts):
            number = int(text.removeprefix("image ")) if text else None
            if number is None:
                continue  # its caption was dropped
            found += 1
            sizes_of = {"image": batch.sizes, **batch.sizes_of}
            for name, own in (("image", pairs.chosen), ("rejected", pairs.rejected)):
                alone, cut = decode.cut({"image": own(number)}, settings, bucket, 3, batch.keys[row])
                assert torch.equal(batch.images[name][row], cut["image"])
                assert sizes_of[name][row].tolist() == alone["image"].sizes.tolist()
                assert sizes_of[name][row, :2].tolist() == [*own(number).shape[:2]]
    assert found >= 6


def test_a_pair_is_flipped_together_and_the_first_image_is_as_without_the_other(tmp_path):
    dataset = opened(pairs.together(tmp_path), **SHAPES)
    for (_, pair), (_, alone) in zip(collated(dataset), collated(dataset, {}), strict=True):
        assert [*alone.images] == ["image"]
        assert not alone.sizes_of
        assert torch.equal(pair.pixels_BCHW, alone.pixels_BCHW)
        assert np.array_equal(pair.sizes, alone.sizes)
    own, key = SourceSettings(source="test", random_flip=True), np.array([5, 0, 0])
    ramp = np.broadcast_to(np.arange(64, dtype=np.uint8)[None, :, None], (64, 64, 3))
    images, turned = {"image": ramp, "rejected": ramp[:48] + 100}, set()
    for epoch in range(8):
        key = np.array([5, epoch, 0])
        frames, cut = decode.cut(images, own, Bucket(32, 32), 0, key, WANTED)
        assert len({bool(each[0, 0, 0] > each[0, 0, -1]) for each in cut.values()}) == 1
        turned.add(frames["rejected"].mirror)
    assert turned == {True, False}


def test_a_target_travels_with_its_batch(tmp_path):
    dataset = opened(pairs.webdataset(tmp_path), **SHAPES)
    seen = []
    for workers in (0, 1):
        run = Loading(dataset, LoaderSettings(num_workers=workers), 3, 4, 2, lambda _: {}, lambda _: {}, images=WANTED)
        with run.updates(0) as updates:
            seen.append([batch for _ in range(2) for batch in next(updates)])
    for here, there in zip(*seen, strict=True):
        assert torch.equal(here.images["rejected"], there.images["rejected"])
        assert np.array_equal(here.sizes_of["rejected"], there.sizes_of["rejected"])
        half = here.rows(1, 2)
        assert torch.equal(half.images["rejected"], here.images["rejected"][1:])
        assert half.sizes_of["rejected"].tolist() == here.sizes_of["rejected"][1:].tolist()
        target = here.of("rejected")
        assert torch.equal(target.pixels_BCHW, here.images["rejected"])
        assert np.array_equal(target.sizes, here.sizes_of["rejected"])
        assert target.texts == here.texts


def test_samples_without_one_or_with_a_damaged_one_are_left_out_where_it_is_asked_for(tmp_path):
    folder = pairs.files(tmp_path / "a")
    (folder / "01.rejected.png").unlink()
    (folder / "02.rejected.png").write_bytes(b"no image")
    whole = (folder / "03.rejected.png").read_bytes()
    (folder / "03.rejected.png").write_bytes(whole[: len(whole) // 2])  # its header is whole: found when it is decoded
    given = {"source": "folder", "path": str(folder), "max_skipped": 1}
    dataset = opened(given)
    left_out = {reason: entry["count"] for reason, entry in dataset.report().items()}
    assert left_out["no rejected image (rejected) beside the image"] == 1
    assert left_out["rejected: not an image (JPEG, PNG and WebP can be read)"] == 1
    assert dataset.count == 6
    assert opened(given, {}).count == 7  # where nothing reads them, none is needed
    reads = dataset.first(100)[0][1]
    batch, failures = Collator(dataset.members, 3, WANTED).collate(Task(reads, dataset.buckets[0]))
    assert [failure.reason for failure in failures] == ["rejected: truncated image"]
    assert batch.sizes_of["rejected"][failures[0].row].tolist() == [0, 0, 0, 0, 48, 48]


def test_a_data_set_without_any_is_refused(tmp_path, build_images):
    with pytest.raises(UserError, match=r"no sample has a rejected image.*cat\.rejected\.png.*data\.rejected_column"):
        opened({"source": "folder", "path": str(build_images(tmp_path / "a", 4))})


def test_columns_that_cannot_be_targets_are_refused(tmp_path):
    pq.write_table(pa.table({"image": [b"x"], "n": [1], "text": ["a"]}), tmp_path / "t.parquet")
    for column, said in (("n", "data.rejected_column.*whole numbers"), ("no", "rejected_column.*no column")):
        with pytest.raises(UserError, match=said):
            opened({"source": "parquet", "path": str(tmp_path / "t.parquet"), "rejected_column": column})
    with pytest.raises(ValueError, match="rejected_column: 'image' holds images"):
        opened({"source": "parquet", "path": "t", "image_column": "image", "rejected_column": "image"})


def test_validation_sees_them_by_centre_crops(tmp_path):
    held_out = opened(pairs.together(tmp_path), split="held_out", held_out_fraction=0.5, **SHAPES)
    found = list(fixed_batches(held_out, 8, lambda bucket: 3, images=WANTED))
    assert found
    for batch in found:
        height, width, top, left, tall, wide = batch.sizes_of["rejected"].T
        scale = np.maximum(tall / height, wide / width)
        assert (np.abs(top - (height * scale - tall) / 2) <= 1).all()
        assert (np.abs(left - (width * scale - wide) / 2) <= 1).all()


def test_pages_and_tools_know_them(tmp_path, capsys):
    folder = pairs.files(tmp_path / "a")
    sheet, page = tmp_path / "sheet.png", tmp_path / "page.html"
    assert main.run(["data", "show", str(folder), "-o", str(sheet), "count=4", "data.resolution=48"]) == 0
    with Image.open(sheet) as image:
        assert image.width == 1600
    assert main.run(["data", "stats", str(folder), "-o", str(page)]) == 0
    assert "With a rejected" in capsys.readouterr().out
    assert "With a rejected" in page.read_text()
    whole = (folder / "03.rejected.png").read_bytes()
    (folder / "03.rejected.png").write_bytes(whole[: len(whole) // 2])
    assert main.run(["data", "verify", str(folder), "share=1"]) != 0
    assert "rejected: truncated image" in capsys.readouterr().out
