"""Reference images, as many as a sample has and each in its own size: through every source, and into micro-batches."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from daguerre.data.images import references
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import Collator, Task, unpadded
from daguerre.data.loading.loader import Loading, fixed_batches
from daguerre.data.settings import LoaderSettings
from daguerre.errors import UserError
from daguerre.types import REFERENCES, References

RULE = References(most=3, max_px=32 * 32, step_px=8, interpolation="nearest")
COUNTS = (0, 1, 2, 3, 1, 0, 2)
"""Reference images of seven samples."""


def wanted(rule: References = RULE) -> dict:
    return dict.fromkeys(rule.names, rule)


def picture(number: int, place: int) -> np.ndarray:
    size = (16 + 8 * ((number + place) % 3), 24 + 8 * (number % 2))
    return np.random.default_rng(100 * number + place).integers(0, 256, (*size, 3), dtype=np.uint8)


def files(place: Path, path: str = "{}.{}.png") -> Path:
    place.mkdir(parents=True)
    for number, count in enumerate(COUNTS):
        pixels = np.full((40, 40, 3), 10 * number, np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text(f"image {number}")
        for i, name in enumerate(REFERENCES[:count]):
            where = place / path.format(number, name)
            where.parent.mkdir(exist_ok=True)
            Image.fromarray(picture(number, i)).save(where)
    return place


def together(place: Path) -> dict:
    return {"source": "folder", "path": str(files(place / "files"))}


def short(place: Path) -> dict:
    """As the first of two names: `0.ref1.png`."""
    folder = files(place / "files")
    for number, name in enumerate(REFERENCES, 1):
        for path in folder.glob(f"*.{name}.png"):
            path.rename(path.with_name(path.name.replace(name, f"ref{number}")))
    assert list(folder.glob("*.ref1.png"))
    return {"source": "folder", "path": str(folder)}


def short_members(place: Path) -> dict:
    folder = Path(short(place)["path"])
    tars.write(place / "0.tar", [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())])
    return {"source": "webdataset", "path": str(place)}


def apart(place: Path) -> dict:
    folder = files(place / "files", "{1}/{0}.png")
    return {
        "source": "folder", "path": str(folder), "reference_dir": {name: str(folder / name) for name in RULE.names}
    }  # fmt: skip


def webdataset(place: Path) -> dict:
    folder = files(place / "files")
    tars.write(place / "0.tar", [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())])
    return {"source": "webdataset", "path": str(place)}


def packed(place: Path) -> dict:
    folder = files(place / "files")
    assert main.run(["data", "pack", str(folder), "-o", str(place / "shards"), "processes=1"]) == 0
    return {"source": "webdataset", "path": str(place / "shards")}


def rows(place: Path) -> list[dict]:
    folder = files(place / "files")
    found = []
    for number, count in enumerate(COUNTS):
        paths = [f"files/{number}.{name}.png" for name in REFERENCES[:count]]
        found.append({"image": f"files/{number}.png", "edit_image": paths, "text": f"image {number}"})
    assert all((folder.parent / path).exists() for row in found for path in row["edit_image"])
    return found


def lists(place: Path) -> dict:
    """A column of lists of files' bytes."""
    found = rows(place)
    columns = {
        "image": [(place / row["image"]).read_bytes() for row in found],
        "edit_image": [[(place / path).read_bytes() for path in row["edit_image"]] for row in found],
        "text": [row["text"] for row in found],
    }
    pq.write_table(pa.table(columns), place / "t.parquet")
    return {"source": "parquet", "path": str(place / "t.parquet"), "reference_column": "edit_image"}


def columns(place: Path) -> dict:
    """A column for each."""
    found = rows(place)
    own = {"image": [(place / row["image"]).read_bytes() for row in found], "text": [row["text"] for row in found]}
    for i, name in enumerate(RULE.names):
        held = [row["edit_image"][i : i + 1] for row in found]
        own[f"of_{name}"] = [(place / paths[0]).read_bytes() if paths else None for paths in held]
    pq.write_table(pa.table(own), place / "t.parquet")
    given = {name: f"of_{name}" for name in RULE.names}
    return {"source": "parquet", "path": str(place / "t.parquet"), "image_column": "image", "reference_column": given}


def json_lines(place: Path) -> dict:
    """A path or a list of paths a line, as DiffSynth has them."""
    lines = []
    for row in rows(place):
        paths = row["edit_image"]
        lines.append({**row, "edit_image": paths[0] if len(paths) == 1 else paths})
    (place / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return {
        "source": "jsonl", "path": str(place / "t.jsonl"), "image_column": "image", "reference_column": "edit_image"
    }  # fmt: skip


MAKE = {
    make.__name__: make
    for make in (together, short, apart, webdataset, short_members, packed, lists, columns, json_lines)
}


def opened(given: dict, rule: References = RULE, split="train", **more):
    own = {"resolution": 32, "held_out_fraction": 0, "caption_dropout": 0, **given, **more}
    return open_dataset(plugins.find("sources", own["source"]).Settings(**own), split, wanted(rule))


def loading(dataset, size: int, rule: References = RULE, rank=0, ranks=1, micro=4, workers=0, **more) -> Loading:
    return Loading(
        dataset, LoaderSettings(num_workers=workers), 3, size, micro, lambda _: {}, lambda _: {}, rank=rank,
        ranks=ranks, images=wanted(rule), **more,
    )  # fmt: skip


def update(run: Loading) -> list:
    with run.updates(0) as updates:
        return next(updates)


@pytest.mark.parametrize("make", MAKE)
def test_a_sample_has_as_many_as_it_has_each_in_its_own_size_through_every_source(tmp_path, make):
    dataset = opened(MAKE[make](tmp_path))
    assert dataset.count == len(COUNTS)
    seen = {}
    for batch in update(loading(dataset, len(COUNTS))):
        assert batch.valid_B.all()
        for row, text in enumerate(batch.texts):
            number = int(text.removeprefix("image "))
            seen[number] = len(batch.references)
            for i, own in enumerate(batch.references):
                pixels = picture(number, i)
                height, width = (side // 8 * 8 for side in pixels.shape[:2])
                frame = references.frame(pixels.shape[:2], RULE)
                assert (frame.height_px, frame.width_px) == own.shape[2:]
                if pixels.shape[0] * pixels.shape[1] <= RULE.max_px:
                    assert own.shape[2:] == (height, width)
                    assert np.array_equal(own[row].permute(1, 2, 0).numpy(), pixels[:height, :width])
    assert [seen[number] for number in range(len(COUNTS))] == [*COUNTS]


def test_samples_of_one_layout_are_computed_together_and_no_more_than_a_micro_batch_of_them(tmp_path):
    dataset = opened(together(tmp_path), shuffle=False)
    found = update(loading(dataset, len(COUNTS), micro=1))
    assert [len(batch.names) for batch in found] == [1] * len(COUNTS)
    found = update(loading(dataset, len(COUNTS)))
    layouts = [tuple(own.shape[2:] for own in batch.references) for batch in found]
    assert len({*layouts}) == len(layouts)
    assert sum(len(batch.names) for batch in found) == len(COUNTS)
    assert sorted(len(batch.names) for batch in found)[-1] == 2  # the two without any
    tight = Loading(
        dataset, LoaderSettings(max_pixels=32 * 32), 3, len(COUNTS), 4, lambda _: {}, lambda _: {}, images=wanted()
    )
    assert [len(batch.names) for batch in update(tight)] == [1] * len(COUNTS)


@pytest.mark.long
def test_workers_make_the_same_micro_batches(tmp_path):
    dataset = opened(webdataset(tmp_path))
    for here, there in zip(*(update(loading(dataset, 7, workers=workers)) for workers in (0, 1)), strict=True):
        assert here.names == there.names
        assert here.images.keys() == there.images.keys()
        assert all(torch.equal(here.images[name], there.images[name]) for name in here.images)


def test_a_list_is_never_shorter_than_it_was_written(tmp_path):
    folder = files(tmp_path / "a")
    (folder / "2.reference.png").unlink()  # now there is a second one without a first
    Image.fromarray(picture(4, 1)).save(folder / "4.reference_4.png")
    (folder / "1.reference.png").write_bytes(b"no image")
    dataset = opened({"source": "folder", "path": str(folder), "max_skipped": 1})
    left_out = {reason: entry["count"] for reason, entry in dataset.report().items()}
    assert left_out == {"reference: not an image (JPEG, PNG and WebP can be read)": 1}
    run = loading(dataset, 6)
    found = update(run)
    reasons = {reason: entry["count"] for reason, entry in run.skips.reasons.items()}
    assert reasons == {
        "no reference image (reference) with the image": 1,
        "no reference image (reference_2) with the image": 1,
    }
    assert sum(int(batch.valid_B.sum()) for batch in found) == 4
    (short,) = (References(most=1, max_px=1024, step_px=8),)
    run = loading(opened(together(tmp_path / "b"), short), 7, short)
    update(run)
    assert {reason: entry["count"] for reason, entry in run.skips.reasons.items()} == {
        "2 reference images, more than the 1 that the family reads": 2,
        "3 reference images, more than the 1 that the family reads": 1,
    }


def test_a_family_that_needs_one_leaves_out_samples_without_and_refuses_data_without_any(tmp_path, build_images):
    needs = References(most=3, least=1, max_px=1024, step_px=8)
    dataset = opened(together(tmp_path / "a"), needs)
    assert dataset.count == 5
    assert dataset.report()["no reference image (reference) with the image"]["count"] == 2
    plain = {"source": "folder", "path": str(build_images(tmp_path / "b", 4))}
    with pytest.raises(UserError, match=r"no sample has a reference image.*cat\.reference\.png.*data\.reference_dir"):
        opened(plain, needs)
    words = r"no sample has a reference image, so model\.references has no effect: set it to 0.*cat\.reference\.png"
    with pytest.raises(UserError, match=words):
        update(loading(opened(plain), 4))


def test_second_references_without_a_first_are_named(tmp_path, build_images):
    folder = build_images(tmp_path, 4)
    Image.fromarray(picture(4, 1)).save(next(folder.glob("*.jpg")).with_suffix(".ref2.png"))
    with pytest.raises(UserError, match=r"samples have a reference_2 \(.*cat\.ref2\.png\).*cat\.ref1\.png"):
        update(loading(opened({"source": "folder", "path": str(folder)}), 4))


def test_what_no_sample_of_a_batch_says_is_made_up_so_that_every_batch_can_be_computed(tmp_path):
    needs = References(most=2, least=1, max_px=1024, step_px=8)
    folder = files(tmp_path / "a")
    for path in folder.glob("*.reference.png"):
        path.write_bytes(path.read_bytes()[:100])  # whole headers
    dataset = opened({"source": "folder", "path": str(folder), "max_skipped": 1}, needs)
    batch, failures = Collator(dataset.members, 0, wanted(needs)).collate(
        Task(dataset.first(2)[0][1].part(0, 2), dataset.buckets[0])
    )
    assert len(failures) == 2
    assert not batch.valid_B.any()
    assert [own.shape for own in batch.references] == [(2, 3, 32, 32)]


def test_validation_takes_samples_one_by_one(tmp_path):
    held_out = opened(together(tmp_path), split="held_out", held_out_fraction=0.5)
    found = list(fixed_batches(held_out, 8, lambda bucket: 4, images=wanted()))
    assert found
    assert [len(batch.names) for batch in found] == [1] * held_out.count


def test_pages_and_tools_know_them(tmp_path, capsys):
    folder = files(tmp_path / "a")
    sheet = tmp_path / "sheet.png"
    assert main.run(["data", "show", str(folder), "-o", str(sheet), "count=7", "data.resolution=32"]) == 0
    assert main.run(["data", "stats", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert "With a reference_3" in (tmp_path / "page.html").read_text()
    whole = (folder / "3.reference_2.png").read_bytes()
    (folder / "3.reference_2.png").write_bytes(whole[: len(whole) // 2])
    capsys.readouterr()
    assert main.run(["data", "verify", str(folder), "share=1"]) != 0
    assert "reference_2: truncated image" in capsys.readouterr().out


# ---- sizes


@pytest.mark.parametrize(
    ("size", "rule", "resized", "cropped"),
    [
        ((150, 90), References(1), (150, 90), (144, 80)),  # FLUX.2 klein: kept, and cropped to multiples of 16
        ((2000, 3000), References(1), (836, 1254), (832, 1248)),  # 1024 * sqrt(2 / 3) = 836.1
        ((150, 90), References(1, max_px=1024**2, step_px=32, enlarges=True, stretches=True), (1312, 800), (1312, 800)),
        ((40, 4), References(1, step_px=8), (80, 8), (80, 8)),  # a side is one step at least
    ],
)  # fmt: skip
def test_a_size_follows_from_the_rule_and_the_picture_alone(size, rule, resized, cropped):
    frame = references.frame(size, rule)
    assert frame.resized == resized
    assert (frame.height_px, frame.width_px) == cropped
    assert (frame.top, frame.left) == tuple((a - b) // 2 for a, b in zip(resized, cropped, strict=True))
    assert not frame.mirror


def test_a_picture_that_is_too_narrow_for_any_size_is_refused():
    with pytest.raises(Undecodable, match="too narrow"):
        references.frame((4, 4000), References(1, max_px=4096, step_px=16))


# ---- 200 layouts


SHAPES = 200
BATCH = 8
WIDE = References(most=1, max_px=1 << 20, step_px=1)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Pairs of an image and a reference image, 200 of 200 shapes."""
    place = tmp_path_factory.mktemp("many")
    for number in range(SHAPES):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(place / f"{number:03}.png")
        Image.new("RGB", (3 + number % 20, 3 + number // 20), (0, number, 0)).save(place / f"{number:03}.reference.png")
        (place / f"{number:03}.txt").write_text(f"{number}")
    return opened({"source": "folder", "path": str(place)}, WIDE, resolution=16)


def epoch(dataset, ranks: int) -> list[list[list]]:
    """The updates of an epoch of each rank, which agree on the number of their micro-batches."""
    meeting, counts = threading.Barrier(ranks), [0] * ranks

    def run(rank: int) -> list[list]:
        def agreed(count: int) -> int:
            counts[rank] = count
            meeting.wait(60)
            most = max(counts)
            meeting.wait(60)
            return most

        whole = loading(dataset, BATCH, WIDE, rank, ranks, micro=2, agreed=agreed)
        with whole.updates(0) as updates:
            return [next(updates) for _ in range(SHAPES // BATCH)]

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))


def samples(of: list[list]) -> list[list[tuple]]:
    """By update: the key, the red of the image and the shape of the reference of each sample, of all ranks."""
    found = []
    for at_once in zip(*of, strict=True):
        rows = []
        for batch in (batch for micro_batches in at_once for batch in micro_batches):
            for row in range(len(batch.names)):
                red = int(batch.pixels_BCHW[row, 0, 0, 0])
                assert int(batch.texts[row]) == red
                assert batch.references[0].shape[2:] == (3 + red // 20, 3 + red % 20)
                assert int(batch.references[0][row, 1, 0, 0]) == red
                rows.append((*batch.keys[row].tolist(), red))
        found.append(sorted(rows))
    return found


def test_200_layouts_fill_updates_with_different_pictures_equally_on_1_2_and_4_ranks(many):
    assert len(many.buckets) == 1
    alone = epoch(many, 1)
    expected = samples(alone)
    assert [len({row[-1] for row in rows}) for rows in expected] == [BATCH] * (SHAPES // BATCH)
    assert Counter(row[-1] for rows in expected for row in rows) == dict.fromkeys(range(SHAPES), 1)
    plain = Loading(many, LoaderSettings(), 3, BATCH, BATCH, lambda _: {}, lambda _: {})
    planned = (task.reads.keys.tolist() for (task, _) in plain.tasks(0))
    assert [[row[:3] for row in rows] for rows in expected] == [
        sorted(map(tuple, next(planned))) for _ in expected
    ]  # the plan draws an update as it does without references
    for ranks in (2, 4):
        of = epoch(many, ranks)
        assert samples(of) == expected
        for at_once in zip(*of, strict=True):
            assert len({len(micro_batches) for micro_batches in at_once}) == 1
            assert {sum(len(b.names) for b in micro_batches) for micro_batches in at_once} == {BATCH // ranks}
            assert all(batch.valid_B.all() for micro_batches in at_once for batch in micro_batches)


def test_ranks_run_equally_many_where_some_have_fewer_layouts(tmp_path):
    """Half of the samples have no reference image, so that ranks differ in what they could compute together."""
    for number in range(32):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{number:02}.png")
        if number % 2:
            Image.new("RGB", (4 + number, 5), (0, number, 0)).save(tmp_path / f"{number:02}.reference.png")
        (tmp_path / f"{number:02}.txt").write_text(f"{number}")
    dataset = opened({"source": "folder", "path": str(tmp_path)}, WIDE, resolution=16)
    runs = []
    for rank in range(4):
        own = loading(dataset, 16, WIDE, rank, 4, micro=4, agreed=lambda count: 4)
        runs.append(update(own))
    assert {len(micro_batches) for micro_batches in runs} == {4}
    assert {sum(len(batch.names) for batch in micro_batches) for micro_batches in runs} == {4}
    alone = update(loading(dataset, 16, WIDE, micro=16))
    assert len(alone) < 16
    assert sum(len(batch.names) for batch in alone) == 16


# ---- what a family knows of rows


def test_rows_are_computed_together_by_what_the_family_says_of_them(tmp_path, build_images):
    """As the length of captions, where padding would change the result."""
    own = {"source": "folder", "path": str(build_images(tmp_path / "a", 12))}
    settings = plugins.find("sources", "folder").Settings(resolution=16, held_out_fraction=0, caption_dropout=0, **own)
    dataset = open_dataset(settings, "train")

    def drawn(batch):
        return {"length": torch.tensor([len(text) for text in batch.texts])}

    run = Loading(
        dataset, LoaderSettings(), 3, 12, 12, drawn, lambda _: {}, layout=lambda b: b.draws["length"].tolist()
    )
    found = update(run)
    assert sorted(len(batch.names) for batch in found) == [2, 10]
    assert all(len({*map(len, batch.texts)}) == 1 for batch in found)
    for batch in found:
        assert batch.draws["length"].tolist() == [len(text) for text in batch.texts]
        assert batch.images["image"].shape[0] == len(batch.keys) == len(batch.valid_B) == len(batch.sizes)
    assert sorted(text for batch in found for text in batch.texts) == sorted(f"image {i}" for i in range(12))
    assert math.isclose(run.skips.slots, 12)


def test_rows_of_one_length_have_no_padding_that_others_needed():
    """Its mask would be waited for on a device."""
    mask = torch.arange(5) < torch.tensor([[3], [3], [5]])
    rows = {"texts.text": torch.ones(3, 5, 2) * mask[..., None], "texts.text_mask": mask, "pixels.mean": torch.ones(3)}
    assert {name: value.shape for name, value in unpadded(rows).items()} == {n: v.shape for n, v in rows.items()}
    first = unpadded({name: value[:2] for name, value in rows.items()})
    assert first.keys() == {"texts.text", "pixels.mean"}
    assert torch.equal(first["texts.text"], torch.ones(2, 3, 2))


def test_draws_of_parts_are_made_of_their_rows(tmp_path, build_images):
    own = {"source": "folder", "path": str(build_images(tmp_path / "a", 12))}
    settings = plugins.find("sources", "folder").Settings(resolution=16, held_out_fraction=0, caption_dropout=0, **own)

    def drawn(batch):
        longest = max(map(len, batch.texts))
        return {"ids": torch.tensor([[ord(c) for c in text.ljust(longest)] for text in batch.texts])}

    def length(batch):
        return [len(text) for text in batch.texts]

    dataset = open_dataset(settings, "train")
    found = update(Loading(dataset, LoaderSettings(), 3, 12, 12, drawn, lambda _: {}, layout=length))
    assert sorted(batch.draws["ids"].shape[1] for batch in found) == sorted(len(batch.texts[0]) for batch in found)
