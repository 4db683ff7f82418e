"""Further images of samples in a cache: pairs and reference images, in rows by their contents, with their captions."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import picture_readers
import pytest
import torch
from adapter_runs import Place, assert_equal
from PIL import Image

from daguerre import errors
from daguerre.cli import main
from daguerre.data.cached.rows import MENDED, Rows
from daguerre.models import components
from daguerre.objectives import eps
from daguerre.objectives.objective import Needs
from daguerre.objectives.wrapper import DiffusionWrapper

RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: eps}
data: {source: folder, resolution: 16, caption_dropout: 0.3, random_flip: true, held_out_fraction: 0.2}
training: {duration: 3 steps, global_batch_size: 4, per_device_batch_size: 1}
lr_scheduler: {warmup: 0 steps}
optimizer: {learning_rate: 1e-3}
checkpoint: {every: 3 steps, export: false}
validation: {every: 3 steps, num_samples: 2, num_levels: 2}
sampling: {num_images: 0}
logging: {every: 1 steps, tensorboard: false}
"""


@dataclass(frozen=True, eq=False)
class Both(DiffusionWrapper):
    """The inner loss of the image, and half of that of the rejected one."""

    needs = Needs(images=("rejected",))

    def loss(self, nets, example):
        terms = self.inner.loss(nets, example)
        error = self.inner.error(nets.student, example.clean["rejected"], example.cond["rejected"], example.draws)
        return replace(terms, loss_B=terms.loss_B + 0.5 * error.square().mean((1, 2, 3)))


@pytest.fixture
def pairs(tmp_path, monkeypatch) -> Place:
    """Images with rejected ones of another shape."""
    place = Place(tmp_path, "sd", RECIPE)
    for number, path in enumerate(sorted((tmp_path / "images").glob("??.png"))):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path.with_suffix(".rejected.png"))
    build = eps.build
    monkeypatch.setattr(eps, "build", lambda settings: Both(build(settings)))
    return place


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.long), True], ids=["pictures", "in captions"])
def edits(tmp_path, monkeypatch, request) -> Place:
    """Images with reference images, which captions may be read with."""
    place = Place(tmp_path, "sd", RECIPE)
    picture_readers.add_references(tmp_path / "images")
    picture_readers.installed(monkeypatch, in_text=request.param)
    return place


def cached(place: Place, name: str = "cache") -> list[str]:
    return [f"cache.path={place.folder / name}", "cache.dtype=float32"]


def verb(place: Place, name: str) -> int:
    words = ["cache", *([name] if name else []), str(place.recipe), f"output_dir={place.folder}"]
    return main.run([*words, *place.given(*cached(place))])


TRAINED, VALIDATED = 11, 2
"""Samples of 14 that a run reads: a third one that is held out is not."""
ROWS_OF_PAIRS = 2 * (2 * TRAINED + VALIDATED)
"""Both images of each pair, those that are trained on flipped and not."""


def keys(place: Place) -> dict[str, int]:
    folders = sorted(path.parent for path in (place.folder / "cache").glob("*/encoder.json"))
    return {folder.name.partition("-")[0]: len(Rows.found(str(folder)).keys) for folder in folders}


def assert_same(place: Place, name: str) -> None:
    for numbers in ("learning/loss", "validation/loss"):
        assert place.numbers(name, numbers) == place.numbers("plain", numbers)
        assert place.numbers(name, numbers)
    assert_equal(place.tensors(name, "model", 3), place.tensors("plain", "model", 3))


def damage(cache: Path) -> None:
    """A bit of each row."""
    for folder in (path.parent for path in cache.glob("*/encoder.json")):
        for shard, head in Rows.found(str(folder)).heads.items():
            data = bytearray((folder / shard).read_bytes())
            for row in range(len(head.keys)):
                data[head.start + row * head.dtype.itemsize] ^= 4
            (folder / shard).write_bytes(data)


HALVES = {"both": [], "images": ["cache.texts=false"], "texts": ["cache.images=false"]}


@pytest.mark.long  # of the quick tests, every verb knows them, and test_cached_runs.py learns the same
@pytest.mark.parametrize("halves", ["both", "images", "texts"])
def test_pairs_learn_the_same_on_a_cache_of_both_halves_or_one(pairs, halves):
    assert pairs.train("plain") == 0
    assert pairs.train("cached", *cached(pairs), *HALVES[halves]) == 0
    assert_same(pairs, "cached")


@pytest.mark.long
def test_every_verb_knows_the_images_of_pairs(pairs, capsys):
    assert verb(pairs, "") == 0
    assert keys(pairs)["images"] == ROWS_OF_PAIRS
    assert verb(pairs, "") == 0
    assert "nothing was missing" in capsys.readouterr().out
    assert verb(pairs, "verify") == 0
    assert verb(pairs, "purge") == 0
    assert keys(pairs)["images"] == ROWS_OF_PAIRS
    changed = pairs.folder / "images" / "03.rejected.png"
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(changed)
    capsys.readouterr()
    assert verb(pairs, "") == 0
    assert "cached images: 1 in 2 rows (" in capsys.readouterr().out
    assert verb(pairs, "purge") == 0
    assert keys(pairs)["images"] == ROWS_OF_PAIRS


@pytest.mark.long
def test_damaged_rows_of_pairs_are_encoded_again(pairs, capsys):
    assert pairs.train("plain", *cached(pairs)) == 0
    damage(pairs.folder / "cache")
    assert pairs.train("hurt", *cached(pairs)) == 0
    assert MENDED in capsys.readouterr().out
    assert_same(pairs, "hurt")


@pytest.mark.long
def test_a_cache_of_pairs_is_a_source_by_itself(pairs):
    assert pairs.train("plain", *cached(pairs)) == 0
    shutil.rmtree(pairs.folder / "images")
    given = [*pairs.base, f"data.path={pairs.folder / 'cache'}", "data.source=cache", "data.caption_dropout=0.3"]
    command = ["train", str(pairs.recipe), f"output_dir={pairs.folder}", "run_name=alone", *given]
    assert main.run([*command, *cached(pairs)]) == errors.DONE
    assert_same(pairs, "alone")


@pytest.mark.long  # of the quick tests, pairs learn the same, and every verb knows reference images
def test_reference_images_learn_the_same_on_a_cache(edits, monkeypatch):
    assert edits.train("plain") == 0
    assert edits.train("filling", *cached(edits)) == 0
    assert_same(edits, "filling")
    load = components.load.load

    def only_the_unet(kind, folder, *rest):
        assert folder.name == "unet" or torch.get_default_device().type == "meta", folder
        return load(kind, folder, *rest)

    monkeypatch.setattr(components.load, "load", only_the_unet)
    assert edits.train("cached", *cached(edits)) == 0
    assert_same(edits, "cached")


def test_every_verb_knows_reference_images(edits, capsys):
    assert verb(edits, "") == 0
    before = keys(edits)
    assert before["images"] > 2 * TRAINED + VALIDATED
    assert verb(edits, "") == 0
    assert "nothing was missing" in capsys.readouterr().out
    assert verb(edits, "verify") == 0
    assert verb(edits, "purge") == 0
    assert keys(edits) == before
    damage(edits.folder / "cache")
    assert verb(edits, "verify") == errors.FAILED
    assert verb(edits, "") == 0
    assert verb(edits, "verify") == 0


@pytest.mark.long
def test_damaged_rows_of_reference_images_are_encoded_again(edits, capsys):
    assert edits.train("plain", *cached(edits)) == 0
    damage(edits.folder / "cache")
    assert edits.train("hurt", *cached(edits)) == 0
    assert MENDED in capsys.readouterr().out
    assert_same(edits, "hurt")


@pytest.mark.long
def test_captions_that_are_read_with_pictures_have_a_row_for_each_and_so_has_the_empty_one(tmp_path, monkeypatch):
    place = Place(tmp_path, "sd", RECIPE)
    picture_readers.add_references(tmp_path / "images")
    found = []
    for in_text in (False, True):
        with monkeypatch.context() as patch:
            picture_readers.installed(patch, in_text=in_text)
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            assert verb(place, "") == 0
            found.append(keys(place)["texts"])
    assert found[0] == TRAINED + VALIDATED + 1  # a caption each, and the empty one
    with_pictures = (found[1] - found[0]) / 2
    assert with_pictures in (8, 9)  # of the samples that are read; one is not
