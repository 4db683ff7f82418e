"""Far shards are fetched before their need, in its order, no further ahead than the cache has room for."""

import threading
import time
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import shards
from faulty_store import s3  # noqa: F401

from daguerre.data.ahead import prefetching
from daguerre.data.buckets import Bucket
from daguerre.data.dataset import Dataset, Member, open_dataset
from daguerre.data.index import Index
from daguerre.data.loader import Loading
from daguerre.data.selection import select
from daguerre.data.settings import LoaderSettings, SourceSettings
from daguerre.data.sources import webdataset

SHARDS, EACH = 40, 25


@dataclass(eq=False)
class Far:
    """Notes what is fetched."""

    fetched: list[int] = field(default_factory=list)
    size: int = 10**9
    faults: int = 0

    def prefetch(self, shard):
        self.fetched.append(shard)
        if self.faults:
            self.faults -= 1
            raise OSError("the store is away")
        return self.size


def dataset(far, **given):
    settings = SourceSettings(source="far", resolution=16, held_out_fraction=0, lanes=2, lane_samples=50, **given)
    ids = np.arange(SHARDS * EACH, dtype=np.int64)
    sides = np.full(len(ids), 16, dtype=np.int32)
    chosen = select(Index(ids, np.arange(SHARDS + 1) * EACH, sides, sides), settings, ["train"])
    return Dataset(settings, (Member(settings, far, far),), tuple(chosen), (Fraction(1),), (Bucket(16, 16),))


def settled(far, seconds=5.0):
    """What was fetched, once nothing is any more."""
    end = time.monotonic() + seconds
    seen = -1
    while seen != len(far.fetched) and time.monotonic() < end:
        seen = len(far.fetched)
        time.sleep(0.1)
    return list(far.fetched)


def needs(data, plan, first, number):
    """The shards of a stretch of batches, in the order of their need."""
    return [shard for b in islice(plan.batches(first), number) for _, shard in data.far_shards_of(b.slots)]


def test_shards_come_in_the_order_of_need_as_far_as_the_cache_has_room():
    far = Far()
    data = dataset(far, cache_gb=20)
    plan = data.plan(0, 10)
    with prefetching(data, plan, 3, 0, 1) as reached:
        ahead = settled(far)
        assert ahead == needs(data, plan, 3, 50)[: len(ahead)]
        assert 10 <= len(ahead) <= 12, "half of 20 GB in shards of 1 GB; those of the batch in use are always fetched"
        reached(9)
        assert len(settled(far)) > len(ahead)
    stopped = len(settled(far))
    time.sleep(0.2)
    assert len(far.fetched) == stopped


def test_small_shards_are_fetched_a_segment_ahead_and_no_further():
    far = Far(size=1)
    data = dataset(far)
    plan = data.plan(0, 10)
    with prefetching(data, plan, 0, 0, 1):
        assert settled(far) == needs(data, plan, 0, 2 * 50 // 10)


def test_each_rank_fetches_its_own():
    fetched = []
    for rank in range(2):
        far = Far(size=1)
        data = dataset(far)
        with prefetching(data, data.plan(0, 10), 0, rank, 2):
            fetched.append(set(settled(far)))
    assert not fetched[0] & fetched[1], "with two lanes and two ranks each reads one lane"


def test_a_fault_is_left_for_the_read_that_needs_the_shard():
    far = Far(size=1, faults=3)
    data = dataset(far)
    with prefetching(data, data.plan(0, 10), 0, 0, 1):
        assert len(settled(far)) > 3


def test_without_far_sources_there_is_no_thread():
    data = dataset(Far())
    near = replace(data, members=(Member(data.settings, Far()),))
    before = threading.active_count()
    with prefetching(near, near.plan(0, 10), 0, 0, 1):
        assert threading.active_count() == before


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_of_a_store_whole_shards_are_fetched_once_and_few_samples_by_range(s3, tmp_path, share):  # noqa: F811
    folder = shards.build(tmp_path / "shards", 4, 20)
    stored = 0
    for path in sorted(folder.glob("*.tar")):
        s3.put(f"set/{path.name}", path.read_bytes())
        stored += path.stat().st_size
    url = f"s3://{s3.bucket}/set/"
    rule = {} if share == 1 else {"filters": "score == 3"}
    settings = webdataset.Settings(path=url, resolution=16, cache_dir=str(tmp_path / "first"), **rule)
    index = open_dataset(settings, "train").members[0].source.index
    assert index.count == 80

    for file in (tmp_path / "first").rglob("*"):  # the indexes stay, the shards have to come again
        if file.is_file() and "indexes" not in file.parts:
            file.unlink()
    seen = len(s3.proxy.seen)
    data = open_dataset(settings, "train")
    run = Loading(data, LoaderSettings(), 0, 4, 4, lambda batch: {}, lambda texts: {})
    with run.updates(0) as made:
        batches = [batch for update in islice(made, 2 * data.size // 4) for batch in update]
    assert all(batch.valid_B.all() for batch in batches)
    bodies = sum(one.sent_bytes for one in s3.proxy.seen[seen:] if one.method == "GET")
    if share == 1:
        assert stored <= bodies < 1.3 * stored, "each shard once"
    else:
        assert bodies < 0.5 * stored, "ranges only"
