"""Every global batch is the same for any ranks and workers, and after a stop at any step: ids, pixels and captions.

With damaged samples, a filter, buckets, repeats and two sources present.
"""

from itertools import islice, pairwise, product

import pytest
import shards

from daguerre.data.dataset import open_dataset
from daguerre.data.loading.collate import Collator
from daguerre.data.loading.loader import Loading
from daguerre.data.loading.workers import made_by, workers
from daguerre.data.settings import DataSettings, LoaderSettings

BATCH, STEPS = 12, 14
RANKS, WORKERS = (1, 2, 3, 4), (0, 1, 3)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    shards.build(folder / "photos", 4, 25, damaged_every=17)
    shards.build(folder / "art", 2, 20)
    settings = DataSettings(
        resolution=32,
        buckets={"aspects": ["1/1", "1/2"], "step": 8},
        crop="random",
        random_flip=True,
        max_skipped=1,
        cache_dir=str(folder / "cache"),
        sources={
            "photos": {
                "source": "webdataset",
                "path": str(folder / "photos" / "part-{00..03}.tar"),
                "filters": "score >= 2 and lang == 'en'",
                "lanes": 3,
                "lane_samples": 7,
                "captions": {"shuffle_tags": True, "keep_tags": 1},
            },
            "art": {"source": "webdataset", "path": str(folder / "art"), "repeats": 2, "caption_dropout": 0.5},
        },
        weights={"photos": 2},
    )
    return open_dataset(settings, "train")


def loading(dataset, rank, ranks, workers=0):
    settings = LoaderSettings(num_workers=workers)
    return Loading(dataset, settings, 7, BATCH, 4, lambda batch: {}, lambda texts: {}, rank=rank, ranks=ranks)


def content(batches):
    """What a rank's share of one update holds, sample by sample."""
    return [
        (*key, bucket, text, valid, size, pixels.numpy().tobytes())
        for batch in batches
        for key, text, valid, size, pixels, bucket in zip(
            batch.keys.tolist(),
            batch.texts,
            batch.valid_B.tolist(),
            batch.sizes.tolist(),
            batch.pixels_BCHW,
            [tuple(batch.pixels_BCHW.shape[2:])] * len(batch.names),
            strict=True,
        )
    ]


def updates(dataset, ranks, workers, step, number):
    """Global batches `step` to `step + number`, put together from the updates of all ranks."""
    shares = []
    for rank in range(ranks):
        with loading(dataset, rank, ranks, workers).updates(step * BATCH) as made:
            shares.append([content(update) for update in islice(made, number)])
    return [[row for share in step for row in share] for step in zip(*shares, strict=True)]


def share(dataset, rank, ranks, number):
    """The tasks of a rank's first updates, and whether each is the last of its update."""
    found, last = [], 0
    for task, place in loading(dataset, rank, ranks).tasks(0):
        found.append((task, place.last))
        last += place.last
        if last == number:
            return found
    raise AssertionError


@pytest.fixture(scope="module")
def whole(dataset):
    return updates(dataset, 1, 0, 0, STEPS)


def test_what_is_compared_holds_what_can_go_wrong(dataset, whole):
    rows = [row for batch in whole for row in batch]
    assert {row[2] for row in rows} == {0, 1}, "repeats"
    assert len({row[1] for row in rows}) > 1, "epochs"
    assert {row[5] for row in rows} == {0.0, 1.0}, "damaged samples"
    assert {row[4] for row in rows} >= {""}, "dropped captions"
    assert len({batch[0][3] for batch in whole}) == 3, "buckets"
    assert all(len({row[3] for row in batch}) == 1 for batch in whole), "one bucket a batch"
    assert len(rows) == STEPS * BATCH
    assert len({row[:3] for row in rows}) == len(rows), "no sample twice with the same epoch and repeat"


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_change_nothing(dataset, whole, ranks):
    assert updates(dataset, ranks, 0, 0, STEPS) == whole


@pytest.mark.long
def test_workers_change_nothing_on_any_number_of_ranks(dataset, whole):
    """One crew after the other makes the shares of all ranks of all world sizes, as it is the start that takes long."""
    jobs = [(ranks, *job) for ranks in RANKS for rank in range(ranks) for job in share(dataset, rank, ranks, STEPS)]
    with workers(Collator(dataset.members, 7), sum(WORKERS)) as crew:
        for part in (crew[: WORKERS[1]], crew[WORKERS[1] :]):
            tasks = [task for _, task, _ in jobs] + [jobs[0][1]] * (2 * len(part))
            batches = [batch for ((_, (batch, _)),) in islice(made_by(part, iter(tasks), 2), len(jobs))]
            for ranks in RANKS:
                mine = [(b, last) for b, (r, _, last) in zip(batches, jobs, strict=True) if r == ranks]
                ends = [i + 1 for i, (_, last) in enumerate(mine) if last]
                cuts = [content([b for b, _ in mine[a:z]]) for a, z in pairwise([0, *ends])]
                for step, expected in enumerate(whole):
                    assert [row for rank in range(ranks) for row in cuts[rank * STEPS + step]] == expected


def test_another_topology_goes_on_at_any_step(dataset, whole):
    for step, ranks in zip(range(1, STEPS), (4, 3, 2, 1) * STEPS, strict=False):
        assert updates(dataset, ranks, 0, step, 1) == whole[step : step + 1]


@pytest.mark.long
def test_the_loader_itself_with_processes(dataset, whole):
    assert updates(dataset, 2, 1, 5, 4) == whole[5:9]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "num_workers"), list(product(RANKS, WORKERS)))
def test_all_pairs_through_the_loader_with_a_stop_at_every_step(dataset, ranks, num_workers):
    steps = 40
    expected = updates(dataset, 1, 0, 0, steps)
    assert updates(dataset, ranks, num_workers, 0, steps) == expected
    for step in range(1, steps - 2, 7 if num_workers else 1):
        assert updates(dataset, ranks, num_workers, step, 2) == expected[step : step + 2]


def test_ranks_take_equal_cuts_of_each_batch(dataset):
    with loading(dataset, 1, 4).updates(0) as made:
        assert [sum(len(batch.names) for batch in update) for update in islice(made, 5)] == [BATCH // 4] * 5
