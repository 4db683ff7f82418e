"""What is counted, when a run stops for it, and what a restart makes of it."""

import json

import numpy as np
import pytest

from daguerre.data.skipped import Failure, Skips
from daguerre.errors import UserError

DAMAGE = "truncated image"


def look(skips, position, number, failing=(), epoch=0, size=None, reason=DAMAGE, kept=False):
    """Slots in the order of the ids, `size` of them a pass; those of the ids `failing` are left empty."""
    ids = np.arange(position, position + number) % (size or 10**12)
    keys = np.stack([ids, np.full(number, epoch), np.zeros(number, int)], axis=1)
    failures = [Failure(row, f"s{i}", reason, kept) for row, i in enumerate(ids.tolist()) if i in failing]
    skips.take(skips.seen(position, keys, failures), size)


def counts(skips):
    return {reason: entry["count"] for reason, entry in skips.reasons.items()}


def lines(file):
    return [json.loads(line) for line in file.read_bytes().splitlines()]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "skipped.jsonl"


def test_damage_that_comes_later_is_counted_said_and_listed(file):
    said = []
    skips = Skips(0.5, file, said.append)
    look(skips, 0, 100, size=100)
    look(skips, 100, 100, {7}, epoch=1, size=100)
    look(skips, 200, 100, {7, 9}, epoch=2, size=100)
    look(skips, 300, 100, {7, 9}, epoch=3, size=100, reason="another")
    assert counts(skips) == {DAMAGE: 2, "another": 2}
    assert skips.examined == 100
    assert [(line["name"], line["sample_id"], line["reason"]) for line in lines(file)] == [
        ("s7", 7, DAMAGE),
        ("s9", 9, DAMAGE),
        ("s7", 7, "another"),
        ("s9", 9, "another"),
    ]
    assert len(said) == 4


def test_notes_are_counted_once_in_whatever_epoch_and_stop_nothing():
    skips = Skips(0.0)
    for epoch in range(3):
        look(skips, 100 * epoch, 100, range(50 * (epoch > 0)), epoch, 100, "caption cut", kept=True)
    assert counts(skips) == {"caption cut": 50}
    assert not skips.recent


def test_a_breakdown_after_many_good_passes_stops_the_run():
    skips = Skips(0.01)
    for epoch in range(5):
        look(skips, 1000 * epoch, 1000, epoch=epoch, size=1000)
    breakdown = (look(skips, position, 10, range(1000), 5, 1000) for position in range(5000, 6000, 10))
    with pytest.raises(UserError, match=r"of 1,000 samples cannot be used, more than data\.max_skipped=0\.01 allows"):
        list(breakdown)
    assert 10 <= counts(skips)[DAMAGE] <= 40


def test_samples_that_were_counted_long_ago_still_stop_a_run_that_meets_only_them():
    """Of a large set 1 % are damaged, as the limit allows; then only they come."""
    skips, size = Skips(0.01), 100_000
    broken = set(range(0, size, 100))
    for position in range(0, size, 1000):
        look(skips, position, 1000, broken, size=size)
    before = counts(skips)
    only = (
        skips.take(skips.seen(size + n, np.array([[i, 1, 0]]), [Failure(0, "s", DAMAGE)]), size)
        for n, i in enumerate(sorted(broken) * 4)
    )
    with pytest.raises(UserError, match=r"\d+ of the last 10,000 samples cannot be used"):
        list(only)
    assert counts(skips) == before


def test_one_bad_shard_among_sixteen_lanes_stops_no_run():
    skips, size = Skips(0.01), 1_000_000
    bad = {600_000 + 16 * i for i in range(5_000)}
    for position in range(0, size, 10_000):
        look(skips, position, 10_000, bad, size=size)
    assert counts(skips) == {DAMAGE: 5_000}


def test_a_few_damaged_samples_stop_no_run_however_often_they_come():
    skips = Skips(0.001)
    for epoch in range(50):
        look(skips, 100 * epoch, 100, range(9), epoch, 100)
    assert counts(skips) == {DAMAGE: 9}


@pytest.mark.parametrize(("damaged", "stops"), [(10, False), (11, True)])
def test_the_plain_rate_counts_after_a_whole_pass(damaged, stops):
    skips = Skips(0.01)
    look(skips, 0, 900, range(damaged), size=1000)
    if stops:
        with pytest.raises(UserError, match="11 of 1,000 samples"):
            look(skips, 900, 100, size=1000)
    else:
        look(skips, 900, 100, size=1000)


def test_a_rate_below_the_limit_stops_no_run_and_one_well_above_it_does():
    rng = np.random.default_rng(0)

    def stops(rate, number=200_000):
        skips = Skips(0.01)
        broken = set(np.flatnonzero(rng.random(number) < rate).tolist())
        try:
            for position in range(0, number, 1000):
                look(skips, position, 1000, broken & set(range(position, position + 1000)))
        except UserError:
            return True
        return False

    assert not any(stops(0.008) for _ in range(10))
    assert all(stops(0.02, 50_000) for _ in range(10))


def test_no_limit_stops_nothing():
    skips = Skips(1.0)
    for epoch in range(3):
        look(skips, 1000 * epoch, 1000, range(1000), epoch, 1000)
    assert counts(skips) == {DAMAGE: 1000}


def batches(skips, start, stop, failing=lambda epoch: {3 + epoch, 40, 41, 42}):
    for position in range(start, stop, 10):
        look(skips, position, 10, failing(position // 100), position // 100, 100)


@pytest.mark.parametrize("saved", [0, 10, 50, 110, 250])
def test_a_run_that_goes_on_from_an_older_checkpoint_ends_the_same(file, tmp_path, saved):
    whole = Skips(1.0, tmp_path / "whole.jsonl")
    batches(whole, 0, 500)

    killed = Skips(1.0, file)
    batches(killed, 0, saved)
    document = json.loads(json.dumps(killed.document()))
    batches(killed, saved, 330)
    again = Skips(1.0, file)
    again.restore(document)
    batches(again, max(0, saved - 20), 500)  # a checkpoint is behind what was handed out
    assert again.document() == whole.document()
    assert lines(file) == lines(tmp_path / "whole.jsonl")
    assert not list(tmp_path.glob(".*"))


def test_the_cuts_of_batches_change_no_count():
    fine, coarse = Skips(), Skips()
    batches(fine, 0, 500)
    for epoch in range(5):
        look(coarse, 100 * epoch, 100, {3 + epoch, 40, 41, 42}, epoch, 100)
    assert fine.document() == coarse.document()


def test_few_failures_make_a_small_document_and_ids_come_back_whole():
    skips = Skips()
    ids = [-(2**63), 2**63 - 1, 5]
    skips.take(skips.seen(0, np.array([[i, 0, 0] for i in ids]), [Failure(row, "x", DAMAGE) for row in range(3)]))
    again = Skips()
    again.restore(json.loads(json.dumps(skips.document())))
    assert again.found == {DAMAGE: set(ids)}
    assert len(json.dumps(skips.document())) < 300


def test_a_start_without_a_checkpoint_begins_the_list_anew(file):
    for _ in range(2):
        skips = Skips(0.5, file)
        skips.begin()
        look(skips, 0, 64, {3})
    assert len(lines(file)) == 1


def test_a_line_that_a_power_cut_left_half_written_goes(file):
    skips = Skips(1.0, file)
    look(skips, 0, 64, {3, 4})
    document = skips.document()
    file.write_bytes(file.read_bytes()[:-5])
    Skips(1.0, file).restore(document)
    assert [line["name"] for line in lines(file)] == ["s3"]


def test_a_name_that_is_no_utf_8_is_listed(file):
    name = b"\xff.jpg".decode("utf-8", "surrogateescape")
    skips = Skips(1.0, file)
    skips.take(skips.seen(0, np.zeros((1, 3), int), [Failure(0, name, DAMAGE)]))
    assert lines(file)[0]["name"] == name


def test_what_is_trained_on_all_the_same_is_said_once_and_not_listed(file):
    said = []
    skips = Skips(0.5, file, said.append)
    look(skips, 0, 100, {1, 2, 3, 4, 5}, reason="caption cut", kept=True)
    look(skips, 100, 100, set(range(100, 200)), reason="caption cut", kept=True)
    look(skips, 200, 100, {201})
    assert said == [
        "noted: caption cut: s1, s2, s3, ... (the others are counted but not listed)",
        f"left out: s201: {DAMAGE}",
    ]
    assert [line["name"] for line in lines(file)] == ["s201"]
    assert counts(skips) == {"caption cut": 105, DAMAGE: 1}
    assert skips.reasons["caption cut"]["examples"] == ["s1", "s2", "s3", "s4", "s5"]

    again = Skips(0.5, file)
    file.write_bytes(b'{"name": "s1", "reason": "caption cut", "kept": true, "sample_id": 1}\n' + file.read_bytes())
    again.restore(skips.document())
    assert [line["name"] for line in lines(file)] == ["s201"]
