"""Targets, the further images of a sample that become clean samples: through every source, each by its own frame."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor

import datasets
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
    dataset = opened(pairs.MAKE[make](tmp_path), **SHAPES, caption_dropout=0)  # captions tell the samples apart
    settings, found = dataset.members[0].settings, 0
    for bucket, batch in collated(dataset):
        assert batch.images["rejected"].shape == batch.pixels_BCHW.shape
        for row, text in enumerate(batch.texts):
            number = int(text.removeprefix("image "))
            found += 1
            sizes_of = {"image": batch.sizes, **batch.sizes_of}
            for name, own in (("image", pairs.chosen), ("rejected", pairs.rejected)):
                alone, cut = decode.cut({"image": own(number)}, settings, bucket, 3, batch.keys[row])
                assert torch.equal(batch.images[name][row], cut["image"])
                assert sizes_of[name][row].tolist() == alone["image"].sizes.tolist()
                assert sizes_of[name][row, :2].tolist() == [*own(number).shape[:2]]
    assert found == 8


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


def loaded(dataset, workers=0) -> list:
    run = Loading(dataset, LoaderSettings(num_workers=workers), 3, 4, 2, lambda _: {}, lambda _: {}, images=WANTED)
    with run.updates(0) as updates:
        return [batch for _ in range(2) for batch in next(updates)]


@pytest.mark.long
def test_workers_give_the_same_targets(tmp_path):
    dataset = opened(pairs.webdataset(tmp_path), **SHAPES)
    for here, there in zip(loaded(dataset), loaded(dataset, workers=1), strict=True):
        assert torch.equal(here.images["rejected"], there.images["rejected"])
        assert np.array_equal(here.sizes_of["rejected"], there.sizes_of["rejected"])


def test_a_target_takes_the_place_of_the_image(tmp_path):
    for here in loaded(opened(pairs.webdataset(tmp_path), **SHAPES)):
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
    assert left_out["no rejected image (rejected) with the image"] == 1
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


# ---- a column that says which image is preferred

LABELS = (1.0, 0.0, 0.5, None, 1.0, 0.0, 0.0, 0.7)
"""Of eight pairs: three are preferred as they stand or the other way round, one is a tie, two say nothing of use."""


def encoded(pixels: np.ndarray) -> bytes:
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def pick_a_pic(place, names=("jpg_0", "jpg_1", "label_0")) -> dict[str, list]:
    """Columns as Pick-a-Pic has them: where label_0 is 0, the second image is the preferred one."""
    place.mkdir(exist_ok=True)
    both = [(encoded(pairs.chosen(number)), encoded(pairs.rejected(number))) for number in range(len(LABELS))]
    turned = [pair[::-1] if label == 0 else pair for pair, label in zip(both, LABELS, strict=True)]
    columns = {name: [pair[i] for pair in turned] for i, name in enumerate(names[:2])}
    captions = [f"image {number}" for number in range(len(LABELS))]
    return {**columns, names[2]: [*LABELS], "caption": captions, "has_label": [True] * len(LABELS)}


def in_parquet(place) -> dict:
    pq.write_table(pa.table(pick_a_pic(place)), place / "t.parquet")
    return {"source": "parquet", "path": str(place / "t.parquet")}


def in_arrow(place) -> dict:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(pick_a_pic(place)).save_to_disk(place / "set")
    return {"source": "huggingface", "path": str(place / "set")}


def in_lines(place) -> dict:
    """Paths, under other names."""
    columns = pick_a_pic(place, ("one", "two", "better"))
    for name in ("one", "two"):
        for number, data in enumerate(columns[name]):
            (place / f"{number}.{name}.png").write_bytes(data)
        columns[name] = [f"{number}.{name}.png" for number in range(len(LABELS))]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (place / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    named = {"image_column": "one", "rejected_column": "two", "preference_column": "better"}
    return {"source": "jsonl", "path": str(place / "t.jsonl"), **named}


@pytest.mark.parametrize("make", [in_parquet, in_arrow, in_lines])
def test_the_preferred_image_of_a_pair_is_trained_on_and_ties_are_counted(tmp_path, make):
    dataset = opened(make(tmp_path / "a"), caption_dropout=0, shuffle=False)
    left_out = {reason: entry["count"] for reason, entry in dataset.report().items() if not entry.get("kept")}
    assert left_out.pop("tie: people prefer neither image of the pair") == 1
    assert [*left_out.values()] == [2]
    assert "no preference" in next(iter(left_out))
    source = dataset.members[0].source
    for number, text in enumerate([0, 1, 4, 5, 6]):
        record = source.record(number)
        assert record.texts["text"] == f"image {text}"
        assert record.images["image"] == encoded(pairs.chosen(text))
        assert record.images["rejected"] == encoded(pairs.rejected(text))
        height, width = pairs.chosen(text).shape[:2]
        assert (source.index.heights_px[number], source.index.widths_px[number]) == (height, width)


def test_columns_of_pick_a_pic_are_not_taken_where_a_column_is_named(tmp_path):
    given = in_parquet(tmp_path)
    found = opened({**given, "image_column": "jpg_1"}, {})
    assert found.count == len(LABELS)
    assert found.members[0].source.record(0).images.keys() == {"image"}
    said = "set image_column and rejected_column"
    with pytest.raises(ValueError, match=said):
        opened({**given, "preference_column": "label_0"})
    three = {"image_column": "jpg_0", "rejected_column": "jpg_1"}
    with pytest.raises(UserError, match=r"preference_column.*no column 'no'"):
        opened({**given, **three, "preference_column": "no"})


def test_many_pairs_are_read_by_eight_threads_as_by_one(tmp_path):
    count = 1200
    first, second = ([encoded(np.full((4, 4, 3), value, np.uint8)) for value in (10, 200)] for _ in range(2))
    labels = [float(number % 3 == 0) for number in range(count)]
    columns = {"jpg_0": [first[number % 2] for number in range(count)]}
    columns["jpg_1"] = [second[(number + 1) % 2] for number in range(count)]
    columns |= {"label_0": labels, "caption": [f"image {number}" for number in range(count)]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=150)
    source = opened({"source": "parquet", "path": str(tmp_path / "t.parquet")}).members[0].source

    def right(number: int) -> bool:
        record = source.record(number)
        pair = record.images["image"], record.images["rejected"]
        stored = columns["jpg_0"][number], columns["jpg_1"][number]
        return pair == (stored if labels[number] else stored[::-1]) and record.texts["text"] == f"image {number}"

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(right, range(count)))
