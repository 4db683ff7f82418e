"""Sources opened together: mixes and their settings, the splits, and data sets that cannot be trained on."""

from itertools import islice

import numpy as np
import pytest
import shards
from pydantic import ValidationError

from daguerre.cli import main
from daguerre.config import config
from daguerre.config.errors import ConfigError
from daguerre.data.dataset import open_dataset, open_datasets
from daguerre.data.loading.loader import fixed_batches
from daguerre.data.settings import DataSettings
from daguerre.data.sources import folder, webdataset
from daguerre.errors import UserError
from daguerre.settings import Duration


@pytest.fixture
def settings(image_folder, tmp_path):
    shards.build(tmp_path / "shards", 2, 20)

    def made(**given):
        photos = {"source": "folder", "path": str(image_folder), "repeats": 2}
        art = {"source": "webdataset", "path": str(tmp_path / "shards"), "filters": "score < 8"}
        usual = {"resolution": 16, "cache_dir": str(tmp_path / "cache"), "sources": {"photos": photos, "art": art}}
        return DataSettings(**{**usual, **given})

    return made


def test_a_source_of_several_that_cannot_be_read_is_named(settings):
    sources = {**settings().sources, "art": {"source": "folder", "path": "nowhere"}}
    with pytest.raises(UserError, match=r"^data\.sources\.art\.path: 'nowhere' does not exist") as raised:
        open_dataset(settings(sources=sources), "train")
    assert raised.value.setting == "data.sources.art.path"


def test_a_mix_draws_by_weight_and_each_source_keeps_its_own_rules(settings):
    dataset = open_dataset(settings(weights={"art": 3}), "train")
    assert (dataset.count, dataset.size, dataset.measured) == (None, 11 + 31, None)
    slots = [batch.slots for batch in islice(dataset.plan(1, 8).batches(0), 128)]
    members = np.concatenate([s.members for s in slots])
    assert np.bincount(members).tolist() == [256, 768]
    assert set(np.concatenate([s.repeats for s in slots])[members == 0].tolist()) == {0, 1}
    assert set(np.concatenate([s.repeats for s in slots])[members == 1].tolist()) == {0}
    assert dataset.report()["filter: score < 8"]["count"] == 8


def test_both_splits_of_a_mix_come_from_one_opening_and_share_no_sample(settings):
    train, held_out = open_datasets(settings(), ["train", "held_out"])
    ids = [{i for s in d.selections for i in s.ids.tolist()} for d in (train, held_out)]
    assert not ids[0] & ids[1]
    assert len(ids[0]) + len(ids[1]) == 12 + 32
    assert sum(len(b.names) for b in fixed_batches(held_out, 100, lambda bucket: 4)) == len(ids[1])


def test_an_endless_source_can_be_part_of_a_mix(image_folder, tmp_path):
    sources = {"real": {"source": "folder", "path": str(image_folder)}, "drawn": {"source": "shapes"}}
    made = DataSettings(resolution=64, crop="random", sources=sources, cache_dir=str(tmp_path))
    train, held_out = open_datasets(made, ["train", "held_out"])
    assert (train.size, train.count) == (None, None)
    assert train.measured is train.members[1], "the one source that a metric can read"
    both = made.model_copy(update={"sources": {"first": made.sources["drawn"], "second": made.sources["drawn"]}})
    assert open_dataset(both, "train").measured is None
    members = np.concatenate([b.slots.members for b in islice(train.plan(0, 8).batches(0), 4)])
    assert set(members.tolist()) == {0, 1}
    assert {name.partition("/")[0] for b in fixed_batches(held_out, 6, lambda bucket: 6) for name in b.names} >= {
        "shapes"
    }


def test_an_endless_source_does_not_go_into_several_buckets(image_folder, tmp_path):
    sources = {"real": {"source": "folder", "path": str(image_folder)}, "drawn": {"source": "shapes"}}
    for buckets, count in (({"aspects": "auto", "step": 8}, r"\d+"), ({"resolutions": [64, 32]}, "2")):
        made = DataSettings(resolution=64, sources=sources, cache_dir=str(tmp_path), buckets=buckets)
        with pytest.raises(UserError, match=rf"data\.sources\.drawn: shapes is endless.* the {count} buckets"):
            open_dataset(made, "train")


def test_a_mix_has_no_epochs(settings):
    dataset = open_dataset(settings(), "train")
    with pytest.raises(ValueError, match="'2 epochs': an endless source and a mix of sources have no epochs"):
        Duration("2 epochs").steps(4, dataset.count)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"repeats": 2}, "Extra inputs are not permitted"),
        ({"weights": {"art": 1, "paintings": 1}}, "there is no source paintings; there are photos, art"),
        ({"weights": {"art": 0}}, "greater than 0"),
        ({"weights": {"art": 1e-7}}, "art would be sampled less than once in 1,000,000 samples"),
        ({"weights": {"art": float("inf")}}, "finite number"),
        (
            {"sources": {"a": {"source": "shapes"}}, "resolution": 128},
            "drawn and checked at 64 px, and have no other size",
        ),
        ({"sources": {"a": {"source": "shapes", "resolution": 64}}}, "a: resolution is the same for all sources"),
        (
            {"sources": {"a": {"source": "mix", "sources": {"b": {"source": "folder", "path": "x"}}}}},
            "there is no 'mix' in sources",
        ),
        ({"sources": {}}, "at least 1 item"),
    ],
)
def test_settings_of_a_mix_that_mean_nothing_are_refused(settings, given, told):
    with pytest.raises(ValidationError, match=told):
        settings(**given)


def test_a_mix_is_written_by_overrides_and_read_back(tmp_path):
    given = ["data.source=mix", "data.resolution=64", "data.sources.a.source=shapes", "data.sources.b.source=folder"]
    given += ["data.sources.b.path=DIR", "data.sources.b.filters=score > 1", "data.weights.a=2.5"]
    made = config.load("quickstart", given).config
    (tmp_path / "again.yaml").write_text(config.dump(made))
    assert config.load(str(tmp_path / "again.yaml")).config == made
    with pytest.raises(ConfigError, match=r"data\.sources\.b\.pth"):
        config.load("quickstart", [*given, "data.sources.b.pth=x"])


def test_a_data_set_smaller_than_a_batch_is_refused_unless_it_is_repeated(image_folder):
    def dataset(**given):
        return open_dataset(
            folder.Settings(path=str(image_folder), resolution=16, held_out_fraction=0, **given), "train"
        )

    with pytest.raises(UserError, match=r"a batch of 20 samples is larger than an epoch of the data set \(12 to"):
        dataset().plan(0, 20)
    assert len(next(dataset(repeats=2).plan(0, 20).batches(0)).slots.indexes) == 20


def test_the_first_batch_after_a_million_samples_is_planned_at_once(settings):
    dataset = open_dataset(settings(), "train")
    planned = next(dataset.plan(0, 8).batches(1_000_000 // 8))
    assert len(planned.slots.indexes) == 8


def test_a_set_of_which_too_much_cannot_be_used_is_refused_before_training(image_folder):
    for i in range(10):
        (image_folder / f"x{i}.png").write_bytes(b"not an image")
        (image_folder / f"x{i}.txt").write_text("a caption")
    usual = {"path": str(image_folder), "resolution": 16}
    with pytest.raises(UserError, match=r"(?s)10 of 22 samples cannot be used.*data\.max_skipped=0\.01.*not an image"):
        open_dataset(folder.Settings(**usual), "train")
    assert open_dataset(folder.Settings(**usual, max_skipped=0.5), "train").size == 11
    sources = {"photos": {"source": "folder", "path": str(image_folder)}}
    with pytest.raises(UserError, match=r"^data\.sources\.photos: 10 of 22 samples cannot be used"):
        open_dataset(DataSettings(resolution=16, sources=sources), "train")


def test_shards_that_are_cut_are_refused_unless_asked_for(tmp_path):
    folder = shards.build(tmp_path / "shards", 3, 20)
    path = folder / "part-01.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    usual = {"path": str(folder), "resolution": 16, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=r"(?s)1 damaged places? in 3 shards.*part-01.*data\.max_skipped=1"):
        open_dataset(webdataset.Settings(**usual), "train")
    assert 40 < open_dataset(webdataset.Settings(**usual, max_skipped=1, held_out_fraction=0), "train").size < 60


def test_auto_buckets_that_are_the_square_alone_are_refused(image_folder, tmp_path):
    usual = {"path": str(image_folder), "resolution": 64, "cache_dir": str(tmp_path)}
    with pytest.raises(UserError, match=r"gives only the shape 64x64: lower data\.buckets\.step \(64 px\)"):
        open_dataset(folder.Settings(**usual, buckets={"aspects": "auto"}), "train")
    assert len(open_dataset(folder.Settings(**usual, buckets={"aspects": "auto", "step": 16}), "train").buckets) > 1


def test_sources_of_equal_size_go_in_orders_of_their_own(image_folder, tmp_path):
    sources = {
        name: {"source": "folder", "path": str(image_folder), "held_out_fraction": 0} for name in ("one", "other")
    }
    dataset = open_dataset(DataSettings(resolution=16, sources=sources, cache_dir=str(tmp_path)), "train")
    slots = dataset.plan(0, 8).slots(0, 2048)
    first, second = (slots.indexes[slots.members == member][:240] for member in (0, 1))
    assert np.mean(first == second) < 0.3, "1 in 12 by chance"


def test_the_same_samples_in_other_shards_are_another_order(image_folder, tmp_path):
    def fingerprint(samples):
        out = str(tmp_path / f"of-{samples}")
        assert main.run(["data", "pack", str(image_folder), "-o", out, f"shard_samples={samples}"]) == 0
        settings = webdataset.Settings(path=out, resolution=16, held_out_fraction=0, cache_dir=str(tmp_path))
        return open_dataset(settings, "train").fingerprint, open_dataset(settings, "train").selections[0].ids.tolist()

    (few, ids), (many, same_ids) = fingerprint(4), fingerprint(6)
    assert ids == same_ids
    assert few != many


def test_equal_files_of_two_sources_share_no_noise(image_folder, tmp_path):
    """0.jpg of one folder and 0.jpg of another have the same id there, and are two samples of the mix."""
    sources = {
        name: {"source": "folder", "path": str(image_folder), "held_out_fraction": 0} for name in ("one", "other")
    }
    dataset = open_dataset(DataSettings(resolution=16, sources=sources, cache_dir=str(tmp_path)), "train")
    assert np.array_equal(dataset.selections[0].ids, dataset.selections[1].ids)
    reads = dataset.reads(dataset.plan(0, 8).slots(0, 256))
    first, second = (set(map(tuple, reads.keys[reads.members == member].tolist())) for member in (0, 1))
    assert not first & second
    assert len({key[0] for key in first | second}) == 24
    assert reads.keys.min() >= 0
    alone = open_dataset(folder.Settings(path=str(image_folder), resolution=16, held_out_fraction=0), "train")
    assert {key[0] for key in first} == set(alone.reads(alone.plan(0, 4).slots(0, 12)).keys[:, 0].tolist())
