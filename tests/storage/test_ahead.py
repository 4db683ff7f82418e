"""Far files are fetched before their need, in its order, each once, as far ahead as the cache has room for."""

import re
import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import shards
from faulty_store import s3  # noqa: F401

from daguerre.data.dataset import Dataset, Member, open_dataset
from daguerre.data.index.file import BadIndex
from daguerre.data.index.index import Index
from daguerre.data.loading.loader import Loading
from daguerre.data.loading.prefetch import prefetching
from daguerre.data.plan import cache_window
from daguerre.data.plan.buckets import Bucket
from daguerre.data.plan.selection import select
from daguerre.data.settings import LoaderSettings, SourceSettings
from daguerre.data.source import Files
from daguerre.data.sources import webdataset
from daguerre.errors import UserError

SHARDS, EACH = 40, 25


@dataclass(eq=False)
class Far:
    """Notes what is fetched."""

    fetched: list[int] = field(default_factory=list)
    size: int = 10**9
    faults: list[Exception] = field(default_factory=list)

    @property
    def files(self):
        return Files(np.arange(SHARDS), np.full(SHARDS, self.size))

    def prefetch(self, file):
        self.fetched.append(file)
        if self.faults:
            raise self.faults.pop()
        return self.size


def dataset(far, **given):
    usual = {"resolution": 16, "held_out_fraction": 0, "lanes": 2, "lane_samples": 50}
    settings = SourceSettings(source="far", **{**usual, **given})
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
    """The files of a stretch of batches, each once, in the order of their need."""
    found = [file for b in islice(plan.batches(first), number) for _, file in data.remote_files_of(b.slots)]
    return list(dict.fromkeys(found))


def used_at_a_time(data, plan, slots, number):
    """Most different shards in `slots` consecutive slots of the first `number`."""
    shards_of = np.searchsorted(data.selections[0].shard_starts, plan.slots(0, number).indexes, side="right")
    return max(len(np.unique(shards_of[i : i + slots])) for i in range(0, number - slots, 5))


def test_files_are_fetched_once_each_in_the_order_of_need_half_a_segment_ahead():
    far = Far()
    data = dataset(far)
    plan = data.plan(0, 10)
    with prefetching(data, plan, 3, 0, 1) as reached:
        ahead = settled(far)
        assert ahead == needs(data, plan, 3, 5)
        reached(9)
        assert settled(far) == needs(data, plan, 3, 11)
    stopped = len(settled(far))
    time.sleep(0.2)
    assert len(far.fetched) == stopped


def test_nothing_is_fetched_for_which_the_cache_has_no_room():
    far = Far()
    data = dataset(far)
    small = replace(data, settings=data.settings.model_copy(update={"cache_gb": 3}))
    plan = data.plan(0, 10)
    with prefetching(small, plan, 0, 0, 1):
        of_first = len(needs(data, plan, 0, 1))
        assert len(settled(far)) == max(3, of_first), "those of the batch in use are always fetched"


@pytest.mark.parametrize("cache_gb", [3.0, 8.0, 12.0])
def test_a_cache_without_room_is_refused_with_a_way_out_that_works(cache_gb):
    def plan():
        return dataset(Far(), cache_gb=cache_gb, lane_samples=200).plan(0, 10)

    with pytest.raises(UserError) as refused:
        plan()
    text = str(refused.value)
    wanted = re.search(r"files of (\S+) GB .* more than the (\S+) GB .* again and again. Raise data.cache_gb", text)
    assert float(wanted[2]) == cache_gb
    dataset(Far(), cache_gb=float(wanted[1]), lane_samples=200).plan(0, 10)
    with pytest.raises(UserError):
        dataset(Far(), cache_gb=float(wanted[1]) - 1, lane_samples=200).plan(0, 10)
    fits = re.findall(r"data\.(lanes|lane_samples) \((\d+) fits\)", text)
    for name, number in fits:
        dataset(Far(), **{"cache_gb": cache_gb, "lane_samples": 200, name: int(number)}).plan(0, 10)
    assert bool(fits) == (cache_gb > 3)


@pytest.mark.parametrize("given", [{}, {"lanes": 5}, {"lane_samples": 30}, {"shuffle": False}, {"lane_samples": 333}])
def test_the_room_is_enough_and_not_much_more(given):
    data = dataset(Far(), cache_gb=99, **given)
    plan = data.plan(0, 10)
    settings = data.settings
    segment = settings.lane_samples * (settings.lanes if settings.shuffle else 1)
    needed = cache_window.needed_bytes(data.remote_streams(plan.orders), 10) // 10**9
    used = used_at_a_time(data, plan, max(40, segment), 2 * SHARDS * EACH)
    assert used <= needed <= max(1.5 * used, used + 2 * settings.lanes)


@pytest.mark.parametrize("given", [{}, {"lanes": 5}, {"lane_samples": 30}, {"lane_samples": 333}, {"lanes": 1}])
def test_in_a_cache_of_that_room_no_file_goes_before_its_use(given):
    """The cache as it is kept (used longest ago goes first), with every batch of a plan read and fetched ahead."""
    data = dataset(Far(), cache_gb=99, **given)
    plan = data.plan(3, 10)
    streams = data.remote_streams(plan.orders)
    lead, capacity = cache_window.lead_batches(streams, 10), cache_window.needed_bytes(streams, 10) // 10**9
    batches = [
        [file for _, file in data.remote_files_of(b.slots)] for b in islice(plan.batches(0), 2 * SHARDS * EACH // 10)
    ]
    kept, fetched = {}, {}
    for number in range(len(batches) - lead):
        ahead = batches[number + lead - 1] if number else [file for batch in batches[:lead] for file in batch]
        for file in [*ahead, *batches[number]]:
            if kept.pop(file, None) is None:
                assert number - fetched.get(file, -1000) > lead, "fetched again before it was used"
                fetched[file] = number
            kept[file] = True
            if len(kept) > capacity:
                del kept[next(iter(kept))]
    assert capacity == SHARDS or len(fetched) > capacity


def test_files_read_by_range_or_near_need_no_room_and_shared_files_count_once():
    streams = dataset(Far(), cache_gb=99).remote_streams(dataset(Far(), cache_gb=99).plan(0, 10).orders)
    ranges = Files(np.arange(SHARDS), np.zeros(SHARDS, np.int64))
    assert cache_window.needed_bytes([streams[0]._replace(files=ranges)], 10) == 0
    shared = Files(np.arange(SHARDS) % 2, np.array([5, 7]))
    assert cache_window.needed_bytes([streams[0]._replace(files=shared)], 10) == 12


def test_sources_of_a_mix_need_room_together():
    both = [dataset(Far(), cache_gb=99, lanes=lanes) for lanes in (2, 4)]
    streams = [data.remote_streams(data.plan(0, 10).orders)[0]._replace(share=Fraction(1, 2)) for data in both]
    alone = [cache_window.needed_bytes([stream._replace(share=Fraction(1))], 10) for stream in streams]
    assert cache_window.needed_bytes(streams, 10) == sum(alone)


def test_each_rank_fetches_its_own():
    fetched = []
    for rank in range(2):
        far = Far(size=1)
        data = dataset(far)
        with prefetching(data, data.plan(0, 10), 0, rank, 2):
            fetched.append(set(settled(far)))
    assert not fetched[0] & fetched[1], "with two lanes and two ranks each reads one lane"


@pytest.mark.parametrize("fault", [OSError("the store is away"), UserError("the disk is full"), BadIndex("damaged")])
def test_a_fault_is_left_for_the_read_that_needs_the_file(fault):
    far = Far(size=1, faults=[fault] * 3)
    data = dataset(far)
    plan = data.plan(0, 10)
    with prefetching(data, plan, 0, 0, 1):
        assert settled(far) == needs(data, plan, 0, 5)


def test_without_far_sources_there_is_no_thread():
    data = dataset(Far())
    near = replace(data, members=(Member(data.settings, Far()),))
    before = threading.active_count()
    with prefetching(near, near.plan(0, 10), 0, 0, 1):
        assert threading.active_count() == before


@pytest.mark.parametrize("share", [1.0, pytest.param(0.1, marks=pytest.mark.long)])
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


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_a_store_with_a_cache_that_just_fits_each_shard_is_fetched_once(s3, tmp_path, num_workers):  # noqa: F811
    folder = shards.build(tmp_path / "shards", 20, 10)
    for path in sorted(folder.glob("*.tar")):
        s3.put(f"set/{path.name}", path.read_bytes())
    usual = {"path": f"s3://{s3.bucket}/set/", "resolution": 16, "held_out_fraction": 0, "cache_dir": str(tmp_path)}
    settings = webdataset.Settings(**usual, lanes=2, lane_samples=20)
    whole = open_dataset(settings, "train")
    needed = cache_window.needed_bytes(whole.remote_streams(whole.plan(0, 4).orders), 4)
    assert needed < 0.7 * sum(path.stat().st_size for path in folder.glob("*.tar"))

    small = open_dataset(settings.model_copy(update={"cache_gb": (needed - 1) / 1e9}), "train")
    with pytest.raises(UserError, match=r"^data\.cache_gb: .* whole files would be fetched again and again"):
        small.plan(0, 4)

    shutil.rmtree(tmp_path / "shards")
    data = open_dataset(settings.model_copy(update={"cache_gb": needed / 1e9}), "train")
    seen = len(s3.proxy.seen)
    run = Loading(data, LoaderSettings(num_workers=num_workers), 0, 4, 4, lambda batch: {}, lambda texts: {})
    with run.updates(0) as made:
        for update in islice(made, 200 // 4 - 6):  # what is ahead is of this epoch, too
            assert all(batch.valid_B.all() for batch in update)
            time.sleep(0.01)
    fetched = Counter(one.path for one in s3.proxy.seen[seen:] if one.method == "GET" and ".tar" in one.path)
    assert len(fetched) >= 18
    assert set(fetched.values()) == {1}
