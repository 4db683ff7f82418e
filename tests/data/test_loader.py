"""Batches ahead of the loop: the same for any number of workers and any start; every empty slot counted once."""

import json
import shutil
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused

from daguerre.data.dataset import Dataset, Member, open_dataset
from daguerre.data.images import decode
from daguerre.data.loading import collate, loader
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import LoaderSettings, SourceSettings
from daguerre.data.skipped import Skips
from daguerre.data.sources import folder
from daguerre.errors import UserError
from daguerre.types import Record

CHANCE = {"resolution": 16, "crop": "random", "random_flip": True, "caption_dropout": 0.3}


def drawn(batch):
    return {"ids": torch.tensor(batch.keys[:, 0] % 1000)}


def cut(texts):
    """Stands for a family that reads 20 bytes."""
    return {i: "cut to 20 bytes" for i, text in enumerate(texts) if len(text) > 20}


def loading(path, workers=0, size=5, **given):
    data = folder.Settings(path=str(path), **{**CHANCE, "held_out_fraction": 0, **given})
    return loaded(open_dataset(data, "train"), size, workers)


def loaded(dataset, size, workers=0, draw=drawn, **given):
    return loader.Loading(dataset, LoaderSettings(num_workers=workers), 11, size, size, draw, cut, **given)


def take(loading, position, number):
    with loading.updates(position) as updates:
        return [batch for update in islice(updates, number) for batch in update]


def content(batches):
    return [
        (b.keys.tolist(), b.pixels_BCHW.tolist(), b.texts, b.names, b.valid_B.tolist(), b.draws["ids"].tolist())
        for b in batches
    ]


def texts(batches):
    return [text for batch in batches for text in batch.texts]


@pytest.fixture
def damaged(image_folder):
    """Twelve images; two of them are cut, which no header shows."""
    for name in ("001.png", "004.png"):
        path = image_folder / name
        path.write_bytes(path.read_bytes()[:3000])
    return image_folder


def test_batches_follow_the_plan(image_folder):
    run = loading(image_folder)
    names = [name for batch in take(run, 0, 6) for name in batch.names]
    source = run.dataset.members[0].source
    planned = [run.dataset.reads(batch.slots).numbers for batch in islice(run.plan.batches(0), 6)]
    assert names == [source.name(int(number)) for numbers in planned for number in numbers]
    epochs = [epoch for batch in take(run, 0, 6) for epoch in batch.keys[:, 1].tolist()]
    for epoch in (0, 1):
        seen = [name for name, of in zip(names, epochs, strict=True) if of == epoch]
        assert sorted(seen) == sorted(p.name for p in image_folder.glob("*.[!t]*"))


def test_every_tensor_of_a_batch_is_pinned_and_drawn_in_the_loaders_thread(image_folder, monkeypatch):
    pinned, threads = [], set()

    def draw(batch):
        threads.add(threading.current_thread().name)
        return drawn(batch)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    (batch,) = take(loaded(loading(image_folder).dataset, 5, draw=draw, pinned=True), 0, 1)
    tensors = [*batch.images.values(), *batch.draws.values(), batch.valid_B]
    assert all(any(each is one for one in pinned) for each in tensors)
    assert threads == {"loader_0"}


@pytest.mark.parametrize(("micro", "max_pixels"), [(2, None), (5, 600), (5, 16 * 16)])
def test_micro_batches_are_cuts_of_the_same_update(image_folder, micro, max_pixels):
    whole = take(loading(image_folder), 0, 3)
    run = loader.Loading(
        loading(image_folder).dataset, LoaderSettings(max_pixels=max_pixels), 11, 5, micro, drawn, cut
    )  # fmt: skip
    with run.updates(0) as updates:
        cuts = list(islice(updates, 3))
    assert {len(batch.names) for update in cuts for batch in update[:-1]} == {min(micro, (max_pixels or 10**9) // 256)}
    for update, batch in zip(cuts, whole, strict=True):
        assert torch.equal(torch.cat([part.pixels_BCHW for part in update]), batch.pixels_BCHW)
        assert np.array_equal(np.concatenate([part.keys for part in update]), batch.keys)
        assert np.array_equal(np.concatenate([part.sizes for part in update]), batch.sizes)


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.long)])
def test_workers_change_nothing(damaged, workers):
    alone, many = loading(damaged), loading(damaged, workers)
    assert content(take(many, 3, 8)) == content(take(alone, 3, 8))
    assert many.document() == alone.document()
    assert many.report() == alone.report()


def test_any_start_gives_the_same_batches(damaged):
    whole = content(take(loading(damaged), 0, 9))
    for start in (1, 4, 7):
        assert content(take(loading(damaged), 5 * start, 9 - start)) == whole[start:]


def test_the_size_of_batches_changes_no_sample(damaged):
    large, small = take(loading(damaged, size=6), 0, 4), take(loading(damaged, size=4), 0, 6)

    def samples(batches):
        rows = [
            (*key, text, valid, pixels.numpy().tobytes())
            for b in batches
            for key, text, valid, pixels in zip(
                b.keys.tolist(), b.texts, b.valid_B.tolist(), b.pixels_BCHW, strict=True
            )
        ]
        return sorted(rows)

    assert samples(large) == samples(small)


def test_files_are_prefetched_from_the_update_that_a_run_goes_on_with(image_folder, monkeypatch):
    seen = []

    def prefetching(dataset, plan, number, rank, ranks):
        seen.append(number)
        return nullcontext(lambda number: None)

    monkeypatch.setattr(loader, "prefetching", prefetching)
    take(loading(image_folder), 15, 1)
    assert seen == [3], "updates of five samples"


def test_epochs_crop_and_caption_anew(image_folder):
    first, second = (take(loading(image_folder, size=12, shuffle=False), 12 * epoch, 1)[0] for epoch in (0, 1))
    assert first.names == second.names
    assert not torch.equal(first.pixels_BCHW, second.pixels_BCHW)


def test_an_undecodable_sample_leaves_its_slot_empty(damaged):
    batch = take(loading(damaged, size=12), 0, 1)[0]
    bad = [row for row, name in enumerate(batch.names) if name in ("001.png", "004.png")]
    assert batch.valid_B.tolist() == [float(row not in bad) for row in range(12)]
    assert batch.valid_B.dtype == torch.float32
    assert not batch.pixels_BCHW[bad].any()
    assert all(batch.pixels_BCHW[row].any() for row in range(12) if row not in bad)


def test_a_skip_is_counted_once_whatever_happens(damaged):
    once = loading(damaged)
    take(once, 0, 9)
    (entry,) = once.skips.reasons.values()
    assert (entry["count"], once.skips.examined) == (2, 12)
    assert sorted(entry["examples"]) == ["001.png", "004.png"]

    killed = loading(damaged)
    take(killed, 0, 2)  # saved here, but the loop had been handed two batches more than it had trained on
    again = loading(damaged)
    again.restore(killed.document())
    take(again, 0, 9)
    assert again.document() == once.document()


def test_the_report_holds_what_both_found(damaged):
    (damaged / "lonely.png").write_bytes((damaged / "007.png").read_bytes())
    run = loading(damaged)
    take(run, 0, 3)
    report = run.report()
    assert (report["source"], report["count"]) == ("folder", 12)
    assert {reason: entry["count"] for reason, entry in report["skipped"].items()} == {
        "image without a caption": 1,
        "truncated image": 2,
    }


def test_a_run_does_not_go_on_with_other_samples(image_folder, tmp_path):
    document = loading(image_folder).document()
    moved = shutil.copytree(image_folder, tmp_path / "moved")
    loading(moved).restore(document)
    (moved / "000.txt").unlink()
    with pytest.raises(
        UserError, match=r"(?s)the data set has changed since this run was started.*now 11 samples.*init_from"
    ):
        loading(moved).restore(document)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_source_without_one_good_sample_stops(damaged, workers):
    for path in damaged.glob("*.[!t]*"):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"(?s)none of the last \d+ samples could be decoded:.*000\.jpg"):
        take(loading(damaged, workers, shuffle=False), 0, 9)


def test_the_first_batch_is_made_at_once_and_not_counted(damaged):
    run = loading(damaged, size=12)
    assert content([run.first(0)]) == content(take(loading(damaged, size=12), 0, 1))
    assert run.skips.reasons == {}


def test_fixed_batches_leave_nothing_to_chance(image_folder):
    data = folder.Settings(path=str(image_folder), **CHANCE)
    dataset = open_dataset(data, "train")
    batches = list(loader.fixed_batches(dataset, 7, lambda bucket: 3))
    assert [len(b.names) for b in batches] == [3, 3, 1]
    source, numbers = dataset.members[0].source, dataset.selections[0].numbers[:7].tolist()
    assert texts(batches) == [source.record(i).texts["text"] for i in numbers]
    plain = data.model_copy(update={"crop": "center", "random_flip": False})
    key = np.zeros(3, np.int64)
    want = [decode.cut(source.record(i).images, plain, Bucket(16, 16), 0, key)[1]["image"] for i in numbers]
    assert torch.equal(torch.cat([b.pixels_BCHW for b in batches]), torch.stack(want))
    assert sum(len(b.names) for b in loader.fixed_batches(dataset, 10_000, lambda bucket: 64)) == dataset.count


def test_skipped_samples_are_listed_and_said_once(damaged, tmp_path):
    said, file = [], tmp_path / "skipped.jsonl"

    def skips():
        return Skips(1.0, file, said.append)

    run = loaded(loading(damaged).dataset, 5, skips=skips())
    take(run, 0, 1)
    saved = run.document()
    take(run, 5, 8)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(line["name"] for line in lines) == ["001.png", "004.png"]
    assert {line["reason"] for line in lines} == {"truncated image"}
    assert sorted(said) == [f"left out: {name}: truncated image" for name in ("001.png", "004.png")]

    again = loaded(loading(damaged).dataset, 5, skips=skips())
    again.restore(saved)
    take(again, 5, 8)
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines


def test_a_rate_of_damaged_samples_above_the_limit_stops_the_run(build_images, tmp_path):
    image_folder = build_images(tmp_path / "many", 40)
    for path in sorted(image_folder.glob("*.png"))[:11]:
        path.write_bytes(path.read_bytes()[:3000])
    run = loaded(loading(image_folder).dataset, 5, skips=Skips(0.2))
    with pytest.raises(UserError, match=r"(?s)11 of 40 samples cannot be used.*truncated image.*max_skipped"):
        take(run, 0, 8)
    take(loaded(loading(image_folder).dataset, 5, skips=Skips(0.3)), 0, 8)


@dataclass
class Flaky:
    """A source whose disk fails a few times at each record."""

    faults: int
    index: None = None
    metric: str | None = None
    calls: dict[int, int] = field(default_factory=dict)
    error: Exception = field(default_factory=lambda: OSError("the disk is away"))

    def sample_id(self, number):
        return number

    def name(self, number):
        return f"sample {number}"

    def record(self, number):
        self.calls[number] = self.calls.get(number, 0) + 1
        if self.calls[number] <= self.faults:
            raise self.error
        return Record(self.name(number), {"image": np.full((16, 16, 3), 50, np.uint8)}, {"text": "x"})

    def report(self):
        return {}


def flaky(source, draw=drawn):
    settings = SourceSettings(source="flaky", resolution=16)
    dataset = Dataset(settings, (Member(settings, source),), (None,), (Fraction(1),), (Bucket(16, 16),))
    return loaded(dataset, 4, draw=draw)


def test_a_passing_fault_is_tried_again_and_never_a_skip(monkeypatch):
    monkeypatch.setattr(collate, "FIRST_PAUSE_SECONDS", 0.001)
    run = flaky(Flaky(faults=collate.ATTEMPTS - 1))
    assert take(run, 0, 1)[0].valid_B.tolist() == [1] * 4
    assert run.report()["skipped"] == {}


def test_a_lasting_fault_stops_the_run(monkeypatch):
    monkeypatch.setattr(collate, "FIRST_PAUSE_SECONDS", 0.001)
    with refused("unreachable", None, "after 4 attempts: the disk is away"):
        take(flaky(Flaky(faults=10**6)), 0, 1)


def test_a_fault_while_a_sample_is_named_is_one_as_any_other(monkeypatch):
    monkeypatch.setattr(collate, "FIRST_PAUSE_SECONDS", 0.001)
    source, calls = Flaky(0), []

    def name(number):
        calls.append(number)
        if len(calls) < 3:
            raise OSError("the disk is away")
        return f"sample {number}"

    source.name = name
    assert take(flaky(source), 0, 1)[0].valid_B.tolist() == [1] * 4


def test_a_micro_batch_without_room_for_one_image_is_refused(image_folder):
    run = loader.Loading(loading(image_folder).dataset, LoaderSettings(max_pixels=255), 11, 5, 5, drawn, cut)
    with refused("invalid", "loader.max_pixels", "loader.max_pixels=255", "16x16", "256"):
        run.first(0)
    bounded = loader.Loading(run.dataset, LoaderSettings(max_pixels=600), 11, 5, 5, drawn, cut)
    assert [len(b.names) for b in loader.fixed_batches(run.dataset, 5, bounded.micro_size)] == [2, 2, 1]


def test_a_batch_that_ranks_cannot_share_alike_is_refused(image_folder):
    with refused("invalid", "training.global_batch_size", "5 samples", "2 ranks"):
        loaded(loading(image_folder).dataset, 5, ranks=2).first(0)


def test_captions_of_fixed_samples_are_those_of_their_batches(damaged):
    dataset = loading(damaged).dataset
    batches = loader.fixed_batches(dataset, 12, lambda bucket: 5)
    assert loader.fixed_captions(dataset, 4) == [f"image {i}" for i in range(4)]
    assert texts(batches) == loader.fixed_captions(dataset, 12)


def test_tags_are_counted_by_source_as_sd_scripts_counts_them(damaged, tmp_path, monkeypatch):
    whole = folder.Settings(path=str(damaged), resolution=16, held_out_fraction=0, cache_dir=str(tmp_path / "cache"))
    (damaged / "a.txt").write_text("Red hat, dog , ,red HAT")
    shutil.copy(next(damaged.glob("*.png")), damaged / "a.png")
    dataset = open_dataset(whole, "train")
    found = loader.tags(dataset)
    assert found == {"images": {"red hat": 2, "dog": 1, **{f"image {i}": 1 for i in range(12)}}}
    assert next(iter(found["images"])) == "red hat", "the most frequent first"
    monkeypatch.setattr(loader, "_COUNTED", dataset.size - 1)
    assert loader.tags(dataset) == {}, "a large data set is not read for it"


def test_an_unexpected_error_names_its_sample():
    with pytest.raises(ZeroDivisionError) as caught:
        take(flaky(Flaky(faults=1, error=ZeroDivisionError("a bug"))), 0, 1)
    assert any("sample 0" in note for note in caught.value.__notes__)


def test_an_error_of_the_draws_comes_out_of_the_loop():
    def broken(batch):
        raise ValueError("no draws")

    with pytest.raises(ValueError, match="no draws"):
        take(flaky(Flaky(0), broken), 0, 1)


def test_captions_that_are_cut_are_counted_once_and_kept_over_a_restart(image_folder):
    for name in ("001.txt", "004.txt"):
        (image_folder / name).write_text("a caption of more than twenty bytes")
    run = loading(image_folder, caption_dropout=0)
    take(run, 0, 2)
    again = loading(image_folder, caption_dropout=0)
    again.restore(run.document())
    take(again, 5, 6)
    found = again.report()["skipped"]["caption cut to 20 bytes"]
    assert (found["count"], found["kept"]) == (2, True)
    assert sorted(found["examples"]) == ["001.png", "004.png"]


def test_a_sample_without_an_image_has_no_cut_caption(damaged):
    for path in damaged.glob("*.txt"):
        path.write_text("a caption of more than twenty bytes")
    run = loading(damaged, caption_dropout=0)
    take(run, 0, 9)
    assert {reason: entry["count"] for reason, entry in run.skips.reasons.items()} == {
        "truncated image": 2,
        "caption cut to 20 bytes": 10,
    }


def test_damage_after_the_first_pass_is_counted(image_folder):
    run = loading(image_folder, size=12)
    with run.updates(0) as updates:
        next(updates)
        for name in ("001.png", "004.png"):
            cut = image_folder / "cut"
            cut.write_bytes((image_folder / name).read_bytes()[:3000])
            cut.replace(image_folder / name)  # at once: the loader reads ahead
        for _ in range(5):
            next(updates)
    (entry,) = run.skips.reasons.values()
    assert (entry["count"], sorted(entry["examples"])) == (2, ["001.png", "004.png"])


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_for_a_gpu_come_in_pinned_memory(image_folder, monkeypatch, pinned):
    asked = []

    def pin_memory(tensor):
        asked.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    dataset = loading(image_folder).dataset
    (batch,) = take(loaded(dataset, 5, pinned=pinned), 0, 1)
    found = [batch.pixels_BCHW, *batch.draws.values()]
    assert len(found) > 1
    assert all(any(tensor is one for one in asked) for tensor in found) is pinned
    assert bool(asked) is pinned
