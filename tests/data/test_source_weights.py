"""Loss weights of the sources of a mix: from the setting to the batch, on every way that a batch can come."""

from itertools import islice

import pytest
import torch

from daguerre import errors
from daguerre.cli import main
from daguerre.config import config
from daguerre.config.errors import ConfigError
from daguerre.data.dataset import open_dataset
from daguerre.data.loading.loader import Loading, fixed_batches
from daguerre.data.settings import DataSettings, LoaderSettings
from daguerre.data.sources import folder


@pytest.fixture
def mixed(build_images, tmp_path):
    """Opens a mix of two folders; `weights` are their loss weights."""
    places = {name: build_images(tmp_path / name, count) for name, count in (("own", 4), ("others", 9))}

    def opened(split="train", **weights):
        sources = {
            name: {"source": "folder", "path": str(path), "held_out_fraction": 0.5 if split == "held_out" else 0}
            | ({"loss_weight": weights[name]} if name in weights else {})
            for name, path in places.items()
        }
        return open_dataset(DataSettings(resolution=16, sources=sources, cache_dir=str(tmp_path / "cache")), split)

    return opened


def loading(dataset, workers=0):
    settings = LoaderSettings(num_workers=workers)
    return Loading(dataset, settings, 3, 6, 4, lambda batch: {}, lambda texts: {})


def batches(dataset, workers=0, number=5):
    with loading(dataset, workers).updates(0) as updates:
        return [batch for update in islice(updates, number) for batch in update]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_each_sample_weighs_what_its_source_says(mixed, workers):
    dataset = mixed(others=0.25)
    found = batches(dataset, workers)
    members = [slot for planned in islice(dataset.plan(3, 6).batches(0), 5) for slot in planned.slots.members.tolist()]
    assert torch.cat([batch.weights_B for batch in found]).tolist() == [[1.0, 0.25][member] for member in members]
    assert all(batch.weights_B.dtype == torch.float32 and len(batch.weights_B) == len(batch.names) for batch in found)
    assert torch.equal(loading(dataset).first(6).weights_B, found[2].weights_B)


@pytest.mark.long
def test_where_every_source_weighs_1_there_are_no_weights(mixed, image_folder):
    assert all(batch.weights_B is None for batch in [*batches(mixed()), *batches(mixed(own=1))])
    alone = open_dataset(folder.Settings(path=str(image_folder), resolution=16, held_out_fraction=0), "train")
    assert batches(alone)[0].weights_B is None


@pytest.mark.long
def test_where_every_source_weighs_1_workers_send_no_weights(mixed):
    assert all(batch.weights_B is None for batch in batches(mixed(own=1), workers=1))


def test_an_empty_slot_keeps_its_weight_and_is_worth_nothing(mixed, tmp_path):
    dataset = mixed(own=2, others=3)
    for path in (tmp_path / "own").glob("*.jpg"):
        path.write_bytes(path.read_bytes()[:100])
    broken = [(v, w) for b in batches(dataset) for v, w in zip(b.valid_B.tolist(), b.weights_B.tolist(), strict=True)]
    assert set(broken) == {(0.0, 2.0), (1.0, 2.0), (1.0, 3.0)}


def test_validation_sees_the_images_of_all_sources_alike(mixed):
    """Its loss does not use the weights; a batch of it may carry them."""
    found = list(fixed_batches(mixed("held_out", others=0.25), 20, lambda bucket: 4))
    assert found
    assert all(batch.valid_B.all() for batch in found)


MIX = ["data.source=mix", "data.resolution=64", "data.sources.a.source=shapes", "data.sources.b.source=folder"]
MIX += ["data.sources.b.path=DIR"]


def test_weights_are_written_where_they_are_not_1_and_read_back(tmp_path):
    made = config.load("quickstart", [*MIX, "data.sources.b.loss_weight=0.5", "data.sources.a.loss_weight=1"]).config
    assert [source.loss_weight for source in made.data.sources.values()] == [1, 0.5]
    (tmp_path / "again.yaml").write_text(config.dump(made))
    again = config.load(str(tmp_path / "again.yaml")).config
    assert [source.loss_weight for source in again.data.sources.values()] == [1, 0.5]
    assert config.dump(made).count("loss_weight") == 1
    other = config.load("quickstart", [*MIX, "data.sources.b.loss_weight=0.25"]).config
    (change,) = config.diff(made, other)
    assert (change.path, change.old, change.new, change.resume) == (
        "data.sources.b.loss_weight",
        0.5,
        0.25,
        "identity",
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ["data.loss_weight=1"],
            r"against other sources \(data\.sources\.NAME\.loss_weight\)",
        ),
        (["data.source=folder", "data.path=DIR", "data.loss_weight=2"], "but this is the only source: remove it"),
        ([*MIX, "data.loss_weight=2"], r"Did you mean data\.sources\.a\.loss_weight or data\.sources\.b\.loss_weight"),
        ([*MIX, "data.sources.a.loss_weight=0"], "a number above 0"),
        ([*MIX, "data.sources.a.loss_weight=inf"], "a number above 0"),
    ],
)
def test_weights_that_mean_nothing_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        config.load("quickstart", given)


def test_a_loss_that_couples_samples_refuses_weights(tmp_path, capsys):
    given = ["data.source=mix", "data.sources.a.source=shapes", "data.sources.b.source=shapes", "data.resolution=64"]
    given += ["data.sources.b.loss_weight=2", f"output_dir={tmp_path}"]
    assert main.run(["train", "quickstart_text", *given]) == errors.REFUSED
    told = "data.sources.b.loss_weight: the objective contrastive compares the samples of a batch with each other"
    assert told in capsys.readouterr().err
