"""Adapters that read control images, stored or computed: in every way to write them, in training, and refused."""

from __future__ import annotations

from pathlib import Path

import hinted
import numpy as np
import pytest
import tiny_runs
import torch
import yaml
from PIL import Image

from daguerre import plugins
from daguerre.adapters.adapter import Attached
from daguerre.cli import main
from daguerre.conditions import grey
from daguerre.config import config as configs
from daguerre.config import schema
from daguerre.data.dataset import open_dataset
from daguerre.data.loading.loader import Loading, fixed_batches
from daguerre.data.settings import LoaderSettings
from daguerre.errors import UserError

OWN = ["adapter.name=hinted"]
SIZES = ((40, 48), (64, 32), (33, 57), (60, 90), (32, 32))


@pytest.fixture(autouse=True)
def _known():
    hinted.SEEN.clear()
    with hinted.known():
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Images with the opposite of each as control image; one has none."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for i in range(13):
        pixels = random.integers(0, 256, (*SIZES[i % len(SIZES)], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a photo")
        if i:
            Image.fromarray(255 - pixels).save(folder / f"{i}.control.png")
    return folder


@pytest.fixture(autouse=True)
def _no_checked_prompts(monkeypatch):
    """They are of the source `shapes`."""
    monkeypatch.setattr(tiny_runs, "TINY", [each for each in tiny_runs.TINY if not each.startswith("data.")])


def load(*overrides: str, recipe: str = "quickstart"):
    return configs.load(recipe, [*tiny_runs.TINY, *overrides])


def condition(*overrides: str):
    return load(*overrides).config.adapters["hinted"].condition


# ---- config


def test_every_way_to_write_a_condition(tmp_path):
    assert condition("adapter.name=hinted") is None
    for given in (
        ["adapter.condition=grey", "adapter.name=hinted"],
        ["adapter.condition.name=grey", "adapter.name=hinted"],
        ["adapters.hinted.condition.name=grey", "adapters.hinted.name=hinted", "adapters.full=null"],
        ["adapter={name: hinted, condition: {name: grey}}"],
        ["adapter={name: hinted, condition: grey}"],
        ["adapter.name=hinted", "adapter.condition={name: grey}"],
        ["condition=grey", "adapter=hinted"],
    ):
        assert condition(*given) == grey.Settings(), given
    for written in ("grey", {"name": "grey"}):
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({"extends": "quickstart", "adapter": {"name": "hinted", "condition": written}}))
        assert load(recipe=str(path)).config.adapters["hinted"].condition == grey.Settings()
        assert load("adapter.condition=null", recipe=str(path)).config.adapters["hinted"].condition is None


def test_stored_images_take_the_place_of_a_recipes_condition():
    """Also by the names of others: sd15_controlnet computes edges, and whoever has control images names them."""

    def chosen(*given: str):
        loaded = configs.load("sd15_controlnet", ["data.source=folder", "data.path=x", *given])
        return loaded.config.adapters["controlnet"].condition, "dropped out" in " ".join(
            line for line in loaded.notices if "condition" in line
        )

    for name in ("data.control_dir=y", "conditioning_data_dir=y", "data.control_dir={control: y}"):
        assert chosen(name) == (None, True), name
    for other in ([], ["data.control_dir={control_2: y}"], ["data.control_dir=null"]):
        condition, told = chosen(*other)
        assert (condition.name, told) == ("canny", False)
    assert chosen("data.control_dir=y", "adapter.condition=blur")[0].name == "blur"
    table = configs.load("sd15_controlnet", ["conditioning_image_column=edges"]).config
    assert table.adapters["controlnet"].condition is None


def test_a_condition_is_dumped_read_back_and_compared(tmp_path):
    own = ["adapter.name=hinted", "logging.tensorboard=true"]
    stored, computed = load(*own), load(*own, "adapter.condition=grey")
    for loaded in (stored, computed):
        (tmp_path / "config.yaml").write_text(configs.dump(loaded.config), encoding="utf-8")
        assert configs.load(str(tmp_path)).config == loaded.config
    (change,) = configs.diff(stored.config, computed.config)
    assert (change.path, change.old, change.new) == ("adapters.hinted.condition", None, {"name": "grey"})
    assert change.resume == "identity"
    assert configs.differing(computed.config)["adapters"]["hinted"]["condition"] == {"name": "grey"}
    assert "condition" not in configs.differing(stored.config)["adapters"]["hinted"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["adapter.condition=gray"], r"there is no 'gray' in conditions.*Did you mean 'grey'"),
        (["adapter.condition.nane=1"], r"condition is null: choose one.*grey"),
        (["adapter.condition=grey", "adapter.condition.low=1"], "there is no such setting"),
        (["adapter.condition={low: 1}"], "condition"),
    ],
)
def test_a_condition_that_cannot_be_is_refused(given, said):
    with pytest.raises(UserError, match=f"(?s){said}"):
        load("adapter.name=hinted", *given)


def test_templates_and_the_schema_know_conditions():
    choices = {"model": "sd", "objective": "eps", "adapter": "hinted", "data": "folder", "optimizer": "adamw"}
    text = schema.template(choices)
    assert "# condition: null" in text
    assert "grey" in text
    definitions = schema.json_schema()["$defs"]["ConditionSettings"]["anyOf"]
    assert "grey" in definitions[0]["enum"]
    assert len(definitions) == len(definitions[0]["enum"]) + 1


# ---- training


def opened(photos: Path, images, split="train", **more):
    own = {"path": str(photos), "resolution": 48, "random_flip": True, "crop": "random", "interpolation": "nearest"}
    own |= {"buckets": {"aspects": ["1/1", "1/2"], "step": 16}, **more}
    return open_dataset(plugins.find("sources", "folder").Settings(**own), split, images)


def batches(dataset, images, workers: int, epochs: int = 3):
    run = Loading(dataset, LoaderSettings(num_workers=workers), 3, 4, 4, lambda _: {}, lambda _: {}, images=images)
    with run.updates(0) as updates:
        return [batch for _ in range(epochs * dataset.count // 4) for batch in next(updates)], run.report()["skipped"]


STORED, COMPUTED = {"control": None}, {"control": grey.Settings()}


@pytest.mark.parametrize("images", [STORED, pytest.param(COMPUTED, marks=pytest.mark.long)], ids=["stored", "computed"])
def test_control_images_follow_their_images_whatever_makes_the_batches(photos, images):
    dataset = opened(photos, images)
    found, skipped = batches(dataset, images, 0)
    missing = [reason for reason in skipped if "with the image" in reason]
    assert missing == (["no control image (control) with the image"] if images is STORED else [])
    assert len({batch.pixels_BCHW.shape for batch in found}) > 1
    for batch in found:
        assert batch.valid_B.all()
        assert batch.images["control"].shape == (len(batch.names), 4, *batch.pixels_BCHW.shape[2:])
        assert torch.equal(batch.images["control"][:, :3], wanted(batch.pixels_BCHW, images))
    if images is STORED:  # a long test trains on these with a worker
        return
    there, _ = batches(dataset, images, 2, 1)
    assert [batch.names for batch in there] == [batch.names for batch in found][: len(there)]
    pairs = zip(found, there, strict=False)
    assert all(torch.equal(a.images[name], b.images[name]) for a, b in pairs for name in a.images)


def wanted(pixels_BCHW, images):
    if images is STORED:
        return 255 - pixels_BCHW
    grey_BCHW = [np.asarray(Image.fromarray(p.permute(1, 2, 0).numpy()).convert("L")) for p in pixels_BCHW]
    return torch.from_numpy(np.stack(grey_BCHW))[:, None].expand(-1, 3, -1, -1)


def test_validation_has_them_too(photos):
    held_out = opened(photos, STORED, "held_out", held_out_fraction=0.4)
    found = list(fixed_batches(held_out, 8, lambda bucket: 3, images=STORED))
    assert found
    assert all(torch.equal(batch.images["control"][:, :3], 255 - batch.pixels_BCHW) for batch in found)


def train(output_dir: Path, photos: Path, *overrides: str) -> list[dict]:
    data = [f"data.path={photos}", "data.source=folder", "data.resolution=48", "data.random_flip=true"]
    data += ["data.buckets.aspects=[1/1, 1/2]", "data.buckets.step=16", "data.interpolation=nearest"]
    assert tiny_runs.train(output_dir, *OWN, *data, *overrides) == 0
    return tiny_runs.lines(output_dir / "tiny")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_an_adapter_trains_on_stored_control_images(tmp_path, photos, capsys, workers):
    train(tmp_path, photos, f"loader.num_workers={workers}")
    assert "no control image (control) with the image" in capsys.readouterr().out
    assert len(hinted.SEEN) >= 8
    assert all(torch.equal(255 - each["image"], each["control"][:, :3]) for each in hinted.SEEN)


@pytest.mark.long
def test_an_adapter_trains_on_computed_control_images(tmp_path, photos):
    found = train(tmp_path / "a", photos, "adapter.condition=grey", "loader.num_workers=2")
    assert len(hinted.SEEN) >= 8
    assert all(torch.equal(each["control"][:, :3], wanted(each["image"], COMPUTED)) for each in hinted.SEEN)
    assert train(tmp_path / "b", photos, "adapter.condition=grey") == found


def test_two_adapters_may_read_several_images_and_not_one_in_two_ways():
    net = hinted.Net(torch.nn.Identity(), 3, "control")
    a, b, c = (
        hinted.Hinted(net, hinted.Settings(**own))
        for own in ({}, {"image": "control_2", "condition": {"name": "grey"}}, {"condition": {"name": "grey"}})
    )
    assert Attached(net, {"a": a, "b": b, "again": a}).images == {"control": None, "control_2": grey.Settings()}
    with pytest.raises(UserError, match="a and c read different images as control: a one that is stored, c one by"):
        _ = Attached(net, {"a": a, "c": c}).images


def test_what_cannot_be_is_refused_before_training(tmp_path, photos, capsys):
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in [*photos.glob("?.png"), *photos.glob("*.txt")]:
        (plain / path.name).write_bytes(path.read_bytes())
    data = [f"data.path={plain}", "data.source=folder", "data.resolution=32"]
    for more in ([], ["--dry-run"]):
        assert main.run([*tiny_runs.arguments(tmp_path, *OWN, *data), *more]) == 2
        assert "no sample has a control image (control)" in capsys.readouterr().err
    idle = tiny_runs.arguments(tmp_path, *data, f"data.control_dir={photos}")
    assert main.run(idle) == 2
    assert "control_dir has no effect: nothing in the recipe reads a stored control image" in capsys.readouterr().err
    computed = tiny_runs.arguments(tmp_path, *OWN, *data, f"data.control_dir={photos}", "adapter.condition=grey")
    assert main.run(computed) == 2
    assert "control_dir has no effect" in capsys.readouterr().err
