"""What filters, the split and buckets choose of an index, what is left out and counted, and what is refused."""

import numpy as np
import pyarrow as pa
import pytest

from daguerre.data.index.index import Index
from daguerre.data.plan.buckets import Bucket
from daguerre.data.plan.selection import select, unfilled
from daguerre.data.settings import SourceSettings
from daguerre.errors import UserError


def index(count=100, shards=4, **given):
    starts = np.linspace(0, count, shards + 1).astype(np.int64)
    side = np.full(count, 64, dtype=np.int32)
    usual = {
        "heights_px": side,
        "widths_px": side,
        "numbers": {"score": pa.array([float(i % 10) for i in range(count)])},
        "texts": {"lang": pa.array(["en", None][i % 2] for i in range(count))},
    }
    return Index(np.arange(count, dtype=np.int64) * 7 + 1, starts, **{**usual, **given})


def settings(**given):
    return SourceSettings(source="test", resolution=64, **given)


def counts(selection):
    return {reason: entry["count"] for reason, entry in selection.left_out.items()}


def test_everything_without_a_rule():
    chosen = select(index(), settings(held_out_fraction=0), ["train"])[0]
    assert chosen.numbers.tolist() == list(range(100))
    assert chosen.shard_starts.tolist() == [0, 25, 50, 75, 100]
    assert chosen.shares.tolist() == [1, 1, 1, 1]
    assert counts(chosen) == {}


def test_filters_reject_and_count_and_shards_know_their_share():
    chosen = select(index(), settings(filters="score >= 8 and lang == 'en'", held_out_fraction=0), ["train"])[0]
    assert chosen.numbers.tolist() == [i for i in range(100) if i % 10 == 8]
    assert chosen.ids.tolist() == [i * 7 + 1 for i in chosen.numbers.tolist()]
    assert counts(chosen) == {"filter: score >= 8": 80, "filter: no lang": 10}
    assert chosen.shares.tolist() == pytest.approx([2 / 25, 3 / 25, 2 / 25, 3 / 25])


@pytest.mark.parametrize("count", [2, 3, 10, 1000])
@pytest.mark.parametrize("fraction", [1e-9, 0.05, 0.5])
def test_the_splits_part_all_samples_and_both_have_some(count, fraction):
    train, held_out = select(index(count, 1), settings(held_out_fraction=fraction), ["train", "held_out"])
    assert sorted([*train.numbers.tolist(), *held_out.numbers.tolist()]) == list(range(count))
    assert len(train.numbers) >= 1
    assert len(held_out.numbers) >= 1
    if count == 1000 and fraction >= 0.05:
        assert abs(len(held_out.numbers) / count - fraction) < 4 * np.sqrt(fraction / count)


def test_new_samples_move_no_old_one_to_the_other_split():
    few, many = (select(index(n, 1), settings(held_out_fraction=0.2), ["held_out"])[0] for n in (500, 1000))
    assert many.numbers[many.numbers < 500].tolist() == few.numbers.tolist()


def test_without_captions_in_the_fields_in_use_a_sample_is_left_out_beforehand():
    captioned = {"text": pa.array([i % 2 == 0 for i in range(100)]), "tags": pa.array([i % 3 == 0 for i in range(100)])}
    only = select(index(captioned=captioned), settings(held_out_fraction=0), ["train"])[0]
    assert only.numbers.tolist() == list(range(0, 100, 2))
    assert counts(only) == {"no caption in text (data.captions.fields)": 50}
    either = settings(held_out_fraction=0, captions={"fields": ["text", "tags"]})
    assert len(select(index(captioned=captioned), either, ["train"])[0].numbers) == 67
    never = settings(held_out_fraction=0, captions={"fields": ["text", "tags"], "weights": [1, 0]})
    assert len(select(index(captioned=captioned), never, ["train"])[0].numbers) == 50


def test_images_too_small_for_their_bucket_are_left_out_or_noted():
    sizes = np.where(np.arange(100) < 30, 32, 64).astype(np.int32)
    small = index(heights_px=sizes, widths_px=sizes)
    enlarged = select(small, settings(held_out_fraction=0), ["train"])[0]
    assert counts(enlarged) == {"kept, but enlarged: smaller than its bucket": 30}
    assert len(enlarged.numbers) == 100
    strict = select(small, settings(held_out_fraction=0, buckets={"upscale": False}), ["train"])[0]
    assert strict.numbers.tolist() == list(range(30, 100))
    assert sum(counts(strict).values()) == 30


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"filters": "score > 10"}, r"(?s)every one of the 100 samples is left out:.*100  filter: score > 10.*Loosen"),
        ({"filters": "aesthetic > 5"}, r"no sample has a field aesthetic\..*aspect, height, lang, score, width"),
    ],
)
def test_rules_that_leave_nothing_are_refused_with_the_table(given, told):
    with pytest.raises(UserError, match=told):
        select(index(), settings(**given), ["train"])[0]
    with pytest.raises(UserError, match=r"data\.sources\.photos"):
        select(index(), settings(**given), ["train"], "photos")[0]


def test_buckets_that_do_not_fill_a_batch_in_an_epoch_are_noted():
    report = unfilled(np.array([20, 3, 0, 8]), [Bucket(8, 8), Bucket(8, 16), Bucket(16, 8), Bucket(8, 24)], 8)
    assert report == {
        "kept: a bucket with fewer images than a global batch; they wait for the next epoch": {
            "count": 3,
            "examples": ["16x8 (3)"],
            "kept": True,
        }
    }


def test_a_caption_field_that_no_sample_has_lists_those_there_are():
    captioned = {"text": pa.array([True] * 100), "alt": pa.array([True] * 100), "none": pa.array([False] * 100)}
    told = r"(?s)100  no caption in title.*in data\.captions\.fields; there are: alt, text$"
    with pytest.raises(UserError, match=told):
        select(index(captioned=captioned, texts={}), settings(captions={"fields": ["title"]}), ["train"])


def test_listed_buckets_that_no_image_goes_to_are_noted():
    report = unfilled(np.array([20, 0]), [Bucket(8, 8), Bucket(8, 16)], 8, listed=True)
    assert report["bucket of data.buckets.aspects that gets no image"]["examples"] == ["16x8"]
    assert unfilled(np.array([20, 0]), [Bucket(8, 8), Bucket(8, 16)], 8) == {}
