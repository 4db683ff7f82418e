"""Masks beside images, through every source: cut exactly as their images, and nothing about them silent."""

from __future__ import annotations

import io
from pathlib import Path

import masked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tars
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from quick_cases import quick_where

from daguerre import plugins
from daguerre.data.dataset import open_dataset
from daguerre.data.images import decode, kinds
from daguerre.data.loading.collate import Collator, Task
from daguerre.data.loading.loader import Loading, fixed_batches
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import LoaderSettings, SourceSettings
from daguerre.errors import UserError
from daguerre.types import MASK

MASKS = {MASK: None}
SHAPES = {
    "square": {},
    "buckets": {"buckets": {"aspects": "auto", "step": 8, "max_aspect": 2.5}},
    "listed": {"buckets": {"aspects": ["1/1", "2/3"], "step": 8, "resolutions": [24, 40]}},
}


def opened(given, split="train", **more):
    own = {"resolution": 32, "held_out_fraction": 0, "interpolation": "area", **given, **more}
    return open_dataset(plugins.find("sources", own["source"]).Settings(**own), split)


def batches(dataset, epochs=3, workers=0, images=MASKS):
    run = Loading(dataset, LoaderSettings(num_workers=workers), 3, 4, 4, lambda _: {}, lambda _: {}, images=images)
    with run.updates(0) as updates:
        made = [batch for _ in range(epochs * dataset.count // 4) for batch in next(updates)]
    return made, run.report()["skipped"]


@pytest.fixture(scope="module", params=masked.MAKE)
def source(request, tmp_path_factory):
    """The settings of a data set with masks."""
    return masked.MAKE[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("shape", quick_where("buckets".__eq__, SHAPES))
@pytest.mark.parametrize("crop", [pytest.param("center", marks=pytest.mark.long), "random"])
def test_masks_are_cut_as_their_images_through_every_source(source, shape, crop):
    found, skipped = batches(opened(source, crop=crop, random_flip=True, **SHAPES[shape]))
    assert not [reason for reason, entry in skipped.items() if not entry["kept"]]
    shown = set()
    for batch in found:
        mask = batch.images[MASK]
        assert batch.valid_B.all()
        assert mask.shape == (len(batch.names), 1, *batch.pixels_BCHW.shape[2:])
        assert torch.equal(mask[:, 0], batch.pixels_BCHW[:, 0])  # red is the mask, resized by the same filter
        shown |= {one.numpy().tobytes() for one in mask}
    assert len(shown) > 12  # flips and crops of 12 masks are not all the same


def test_an_image_that_is_resized_by_another_filter_lies_under_its_mask_all_the_same(source):
    found, _ = batches(opened(source, interpolation="bicubic", random_flip=True, crop="random", **SHAPES["buckets"]))
    for batch in found:
        mask, red = batch.images[MASK][:, 0].float(), batch.pixels_BCHW[:, 0].float()
        apart = ((mask - red).abs() > 127).float().mean((1, 2))
        aside = ((mask.roll(2, 2) - red).abs() > 127).float().mean((1, 2))
        assert (apart < 0.08).all()
        assert (aside > apart + 0.05).all()  # two pixels to the side would show


def of_alpha(place, masks):
    """A folder of images with transparent parts, and the settings that read them as masks."""
    for number in range(4):
        size = masked.SIZES[number]
        alpha = Image.fromarray(masks(number, *size))
        image = Image.fromarray(masked.image(number, *size))
        image.putalpha(alpha)
        image.save(place / f"{number:02}.png")
        (place / f"{number:02}.txt").write_text(f"image {number}")
    return {"source": "folder", "path": str(place), "alpha_mask": True, "alpha_colour": "#000000"}


@pytest.mark.parametrize("shape", ["square", "buckets"])
def test_the_alpha_channel_is_the_mask_and_is_cut_as_its_image(tmp_path, shape):
    own = of_alpha(tmp_path, masked.mask)
    Image.fromarray(masked.image(9, 32, 32)).save(tmp_path / "99.png")
    (tmp_path / "99.txt").write_text("opaque")
    dataset = opened(own, crop="random", random_flip=True, **SHAPES[shape])
    dataset.check_present(MASKS)
    for batch in batches(dataset)[0]:
        for name, mask, pixels in zip(batch.names, batch.images[MASK][:, 0], batch.pixels_BCHW, strict=True):
            if "99" in name:
                assert mask.min() == 255  # it counts as a whole
            else:
                assert torch.equal(mask, pixels[0])  # over black, red is the mask


def test_a_mask_of_its_own_goes_before_the_alpha_channel(tmp_path):
    own = of_alpha(tmp_path, lambda number, height, width: np.full((height, width), 128, np.uint8))
    Image.fromarray(np.zeros(masked.SIZES[0], np.uint8)).save(tmp_path / "00.mask.png")
    found = {
        name: mask.unique().tolist()
        for batch in batches(opened(own))[0]
        for name, mask in zip(batch.names, batch.images[MASK], strict=True)
    }
    assert [levels for name, levels in sorted(found.items())] == [[0], [128], [128], [128]]


def test_pictures_without_transparency_are_refused_as_masks(tmp_path):
    own = {"source": "folder", "path": str(masked.folder(tmp_path / "a", count=2)), "alpha_mask": True}
    for path in (tmp_path / "a").glob("*.mask.png"):
        path.unlink()
    with pytest.raises(UserError, match="no sample has a mask"):
        opened(own).check_present(MASKS)


@pytest.mark.long
def test_workers_give_the_same_masks(tmp_path):
    dataset = opened(masked.webdataset(tmp_path), random_flip=True, crop="random")
    here, there = batches(dataset, 1)[0], batches(dataset, 1, workers=1)[0]
    assert [b.names for b in here] == [b.names for b in there]
    assert all(torch.equal(a.images[MASK], b.images[MASK]) for a, b in zip(here, there, strict=True))


def test_who_does_not_ask_for_masks_gets_the_same_images_and_none(source):
    dataset = opened(source, random_flip=True)
    plain, beside = batches(dataset, 1, images={})[0], batches(dataset, 1)[0]
    assert [list(batch.images) for batch in plain] == [["image"]] * len(plain)
    assert all(torch.equal(a.pixels_BCHW, b.pixels_BCHW) for a, b in zip(plain, beside, strict=True))


def test_validation_sees_the_masks_of_held_out_samples(source):
    held_out = opened(source, "held_out", held_out_fraction=0.4)
    found = list(fixed_batches(held_out, 8, lambda bucket: 3, images=MASKS))
    assert found
    assert all(torch.equal(batch.images[MASK][:, 0], batch.pixels_BCHW[:, 0]) for batch in found)


def test_packed_shards_train_on_the_same_batches(tmp_path):
    settings = {"random_flip": True, "crop": "random", **SHAPES["buckets"]}
    seen = []
    for make in (masked.beside, masked.packed):
        found, _ = batches(opened(make(tmp_path / make.__name__), shuffle=False, **settings), 1)
        seen.append({int(b.keys[i, 0]): b.images[MASK][i] for b in found for i in range(len(b.names))})
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(seen[0][number], seen[1][number]) for number in seen[0])


# ---- frames


SIDES = st.integers(1, 300)


@given(
    SIDES, SIDES, st.integers(1, 40), st.integers(1, 40), st.booleans(), st.sampled_from(["center", "random"]),
    st.integers(0, 2**40), st.integers(1, 4),
)  # fmt: skip
@hypothesis_settings(max_examples=150, deadline=None)
def test_a_frame_shows_the_same_place_of_images_of_every_scale(height, width, tall, wide, flip, crop, number, scale):
    own = SourceSettings(source="test", random_flip=flip, crop=crop, interpolation="nearest")
    bucket, key = Bucket(tall, wide), np.array([number, 1, 0])
    frame = decode.frame((height, width), own, bucket, 7, key)
    assert frame == decode.frame((height, width), own, bucket, 7, key)
    assert frame.resized == bucket.covering(height, width)
    assert frame.sizes.tolist() == [height, width, frame.top, frame.left, tall, wide]
    assert 0 <= frame.top <= frame.resized[0] - tall
    assert 0 <= frame.left <= frame.resized[1] - wide
    assert flip or not frame.mirror
    rows, columns = np.mgrid[:height, :width]
    places = np.dstack([rows // 256, rows % 256, columns // 256, columns % 256]).astype(np.uint8)
    larger = places.repeat(scale, axis=0).repeat(scale, axis=1)
    first, second = (torch.cat([frame.apply(one[:, :, i : i + 1]) for i in range(4)]) for one in (places, larger))
    assert first.shape == (4, tall, wide)
    where = [first[0].int() * 256 + first[1], first[2].int() * 256 + first[3]]
    other = [second[0].int() * 256 + second[1], second[2].int() * 256 + second[3]]
    for here, there in zip(where, other, strict=True):
        assert (here - there).abs().max() <= 1  # `nearest` rounds at most to the neighbour
    across = where[1][0]
    assert torch.equal(across, across.sort(descending=frame.mirror).values)  # flipped or not, as a whole


@given(SIDES, SIDES, st.floats(0.1, 4))
@hypothesis_settings(max_examples=200, deadline=None)
def test_an_image_at_another_scale_fits_and_one_of_another_shape_does_not(height, width, scale):
    scaled = max(1, round(height * scale)), max(1, round(width * scale))
    kinds.check_shape(scaled, (height, width))
    kinds.check_shape((height, width), (height, width))
    with pytest.raises(decode.Undecodable, match="aspect"):
        kinds.check_shape((height + max(height, width) // min(height, width) + 3, width), (height, width))


def test_a_mask_of_half_the_size_lies_on_the_same_place(tmp_path):
    place = masked.folder(tmp_path / "a")
    for path in place.glob("*.mask.png"):
        with Image.open(path) as image:
            half = image.resize((round(image.width / 2), round(image.height / 2)), Image.Resampling.BOX)
        half.save(path)
    found, skipped = batches(opened({"source": "folder", "path": str(place)}, crop="random", random_flip=True))
    assert not skipped
    for batch in found:
        mask, red = batch.images[MASK][:, 0].float(), batch.pixels_BCHW[:, 0].float()
        assert ((mask - red).abs() > 127).float().mean() < 0.2
        assert ((mask - red.flip(2)).abs() > 127).float().mean() > 0.3


# ---- what masks may be


def one(tmp_path: Path, saved: bytes | None, size=(32, 32), name="a.mask.png"):
    """A folder of one image with this mask and another one with none: (batch, skipped, source's report)."""
    place = tmp_path / "one"
    place.mkdir()
    for stem in ("a", "b"):
        Image.fromarray(masked.image(0, *size)).save(place / f"{stem}.png")
        (place / f"{stem}.txt").write_text("an image")
    if saved is not None:
        (place / name).write_bytes(saved)
    dataset = opened({"source": "folder", "path": str(place)}, shuffle=False, max_skipped=1)
    run = Loading(dataset, LoaderSettings(), 0, dataset.count, 2, lambda _: {}, lambda _: {}, images=MASKS)
    with run.updates(0) as updates:
        (batch,) = next(updates)
    skipped = {reason: (entry["count"], entry["kept"]) for reason, entry in run.report()["skipped"].items()}
    return {name[0]: batch.images[MASK][i, 0] for i, name in enumerate(batch.names) if batch.valid_B[i]}, skipped


def encoded(pixels, mode=None, kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, kind, **options)
    return buffer.getvalue()


LEVELS = np.arange(1024, dtype=np.uint8).reshape(32, 32)
GREY = {
    "grey": (encoded(LEVELS), LEVELS),
    "black and white": (encoded(LEVELS > 100), np.where(LEVELS > 100, 255, 0)),
    "grey with 16 bits": (encoded(LEVELS.astype(np.uint16) * 257), LEVELS),
    "RGB of grey": (encoded(np.dstack([LEVELS] * 3)), LEVELS),
    "colours, by luminance": (encoded(np.full((32, 32, 3), (0, 255, 0), np.uint8)), np.full((32, 32), 150)),
    "RGBA, opaque": (encoded(np.dstack([LEVELS] * 3 + [np.full_like(LEVELS, 255)])), LEVELS),
    "white where it is opaque": (encoded(np.dstack([np.full_like(LEVELS, 255)] * 3 + [LEVELS])), LEVELS),
    "grey with alpha": (encoded(np.dstack([np.full_like(LEVELS, 255), LEVELS]), "LA"), LEVELS),
    "all white": (encoded(np.full((32, 32), 255, np.uint8)), np.full((32, 32), 255)),
    "lossless WebP": (encoded(np.dstack([LEVELS] * 3), kind="WEBP", lossless=True), LEVELS),
    "twice the size": (encoded(LEVELS.repeat(2, 0).repeat(2, 1)), LEVELS),
}


@pytest.mark.parametrize("kind", GREY)
def test_whatever_a_mask_is_stored_as_white_counts_and_black_does_not(tmp_path, kind):
    saved, expected = GREY[kind]
    found, skipped = one(tmp_path, saved)
    assert np.array_equal(found["a"], expected)
    assert (found["b"] == 255).all()  # none: all of it counts
    assert skipped == {"kept without a mask: all of it counts": (1, True)}


def test_a_mask_is_turned_by_its_own_exif(tmp_path):
    size, turned = (32, 48), Image.new("L", (32, 48))
    turned.paste(255, (0, 0, 32, 12))  # stored: its upper quarter; upright, after orientation 6: the right one
    exif = Image.Exif()
    exif[274] = 6
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", exif=exif, quality=100)
    found, _ = one(tmp_path, buffer.getvalue(), size, "a.mask.jpg")
    assert found["a"][:, 30:].min() > 250  # the square in the middle of 48 begins at 8: 36 - 8 = 28
    assert found["a"][:, :26].max() < 5


BAD = {
    "damaged": (encoded(masked.image(0, 32, 32)[:, :, 1])[:700], "mask: truncated image"),
    "no image": (b"not an image at all", "mask: not an image (JPEG, PNG and WebP can be read)"),
    "empty": (b"", "mask: empty file"),
    "of another shape": (encoded(LEVELS[:20]), "mask: another aspect ratio than its image's"),
    "GIF": (encoded(LEVELS, kind="GIF"), "mask: a GIF file, which data.formats does not allow (jpeg, png, webp)"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_sample_whose_mask_cannot_be_used_is_left_out_and_counted(tmp_path, kind):
    saved, reason = BAD[kind]
    if kind == "damaged":  # its header is whole: found when it is decoded
        found, skipped = one(tmp_path, saved)
        assert list(found) == ["b"]
        assert skipped[reason] == (1, False)
        return
    with pytest.raises(UserError, match="no sample has a mask"):  # the other sample has none
        one(tmp_path, saved)
    report = opened({"source": "folder", "path": str(tmp_path / "one")}).members[0].source.report()
    assert (report[reason]["count"], report[reason]["kept"]) == (1, False)


@pytest.mark.parametrize("kind", BAD)
def test_tables_and_shards_leave_out_the_same(tmp_path, kind):
    saved, reason = BAD[kind]
    image = encoded(masked.image(0, 32, 32))
    table = pa.table({"image": [image] * 2, "mask": [saved, None], "text": ["a", "b"]})
    pq.write_table(table, tmp_path / "t.parquet")
    members = [("a.png", image), ("a.txt", b"a"), ("b.png", image), ("b.txt", b"b"), ("a.mask.png", saved)]
    tars.write(tmp_path / "s.tar", members)
    sources = [{"source": "webdataset", "path": str(tmp_path / "s.tar")}]
    if saved:  # an empty cell is no mask
        sources += [{"source": "parquet", "path": str(tmp_path / "t.parquet"), "mask_column": "mask"}]
    for source in sources:
        dataset = opened(source, shuffle=False, max_skipped=1)
        reads = dataset.first(2)[0][1]
        batch, failures = Collator(dataset.members, 0, MASKS).collate(Task(reads, dataset.buckets[0]))
        report = dict(dataset.members[0].source.report())
        seen = [failure.reason for failure in failures] + [r for r in report if not report[r].get("kept")]
        wanted = (
            "mask: not an image (JPEG, PNG and WebP can be read)"
            if (kind, source["source"]) == ("empty", "parquet")
            else reason
        )
        assert seen == [wanted]
        assert batch.valid_B.sum() == 1


def test_masks_without_an_image_and_a_second_one_are_counted(tmp_path):
    place = masked.folder(tmp_path / "a", count=3)
    (place / "00-masklabel.png").write_bytes((place / "00.mask.png").read_bytes())
    masks = tmp_path / "masks"
    masks.mkdir()
    for name in ("01.png", "01.webp", "77.png"):
        (masks / name).write_bytes((place / "01.mask.png").read_bytes())
    report = opened({"source": "folder", "path": str(place), "mask_dir": str(masks)}).members[0].source.report()
    found = {reason: (entry["count"], entry["examples"]) for reason, entry in report.items()}
    assert found["mask without an image of its name"] == (1, [str(masks / "77.png")])
    twice = found["duplicate: second mask of one image"][1]
    assert sorted(Path(path).name for path in twice) == ["00.mask.png", "01.mask.png", "01.webp"]


def test_an_image_called_as_a_mask_of_nothing_stays_a_image(tmp_path):
    place = tmp_path / "a"
    place.mkdir()
    for name in ("x.mask", "y-masklabel", ".mask"):
        Image.fromarray(masked.image(0, 32, 32)).save(place / f"{name}.png")
        (place / f"{name}.txt").write_text("an image")
    assert opened({"source": "folder", "path": str(place)}).count == 2


def test_a_changed_mask_is_seen_and_a_lost_one_is_no_skip(tmp_path):
    place = masked.folder(tmp_path / "a", count=4)
    dataset = opened({"source": "folder", "path": str(place)})
    (place / "00.mask.png").write_bytes(encoded(masked.mask(0, 8, 40)))
    assert opened({"source": "folder", "path": str(place)}).count == 3  # of another shape now
    (place / "01.mask.png").unlink()
    with pytest.raises(UserError, match=r"cannot be read.*01\.mask\.png"):
        batches(dataset, 1)


def test_a_source_without_masks_is_refused_where_they_are_wanted(tmp_path):
    place = masked.folder(tmp_path / "a", count=2)
    for path in place.glob("*.mask.png"):
        path.unlink()
    for own in ({"source": "folder", "path": str(place)}, {"source": "shapes"}):
        dataset = open_dataset(plugins.find("sources", own["source"]).Settings(**own), "train")
        with pytest.raises(UserError, match="no sample has a mask"):
            dataset.check_present(MASKS)


@pytest.mark.parametrize("kind", masked.MAKE)
def test_masks_that_nothing_reads_are_noted(kind, tmp_path):
    """A data set of another recipe is not trained on as if its masks, or reference images, were not there."""
    dataset = opened(masked.MAKE[kind](tmp_path))
    (reason,) = dataset.notes(1).keys() - dataset.notes(1, MASKS).keys()
    assert reason == "trained without its mask (mask), which objective.mask would read"
    noted, lacking = dataset.notes(1)[reason], dataset.notes(1, MASKS)
    assert noted["kept"]
    assert noted["count"] == dataset.count - sum(entry["count"] for entry in lacking.values())


def test_columns_that_cannot_be_masks_are_refused(tmp_path):
    image = encoded(masked.image(0, 32, 32))
    pq.write_table(pa.table({"image": [image], "n": [1], "text": ["a"]}), tmp_path / "t.parquet")
    for column, said in (("n", "data.mask_column.*whole numbers"), ("no", "data.mask_column.*no column 'no'")):
        with pytest.raises(UserError, match=said):
            opened({"source": "parquet", "path": str(tmp_path / "t.parquet"), "mask_column": column})
    with pytest.raises(ValueError, match="mask_column"):
        opened({"source": "parquet", "path": "t", "mask_column": "image", "image_column": "image"})
