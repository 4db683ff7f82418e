"""Rows of a cache that lost a bit: encoded again, said and counted, while the run goes on; every verb tells of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from adapter_runs import IMAGES, Place, assert_equal

from daguerre import errors
from daguerre.cli import main
from daguerre.data.cached.rows import LOST, MENDED, Rows

RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: eps}
data: {source: folder, resolution: 16, caption_dropout: 0.3, held_out_fraction: 0.2}
training: {duration: 12 steps, global_batch_size: 2, per_device_batch_size: 1}
optimizer: {learning_rate: 1e-3}
cache: {dtype: float32}
checkpoint: {every: 6 steps, export: false}
validation: {every: 6 steps, num_samples: 3, num_levels: 2}
sampling: {num_images: 0}
logging: {every: 1 steps, tensorboard: false}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    made = Place(tmp_path_factory.mktemp("damage"), "sd", RECIPE)
    assert main.run(command(made, made.folder / "whole")) == errors.DONE
    return made


@pytest.fixture(scope="module")
def plain(place) -> None:
    """A run on the cache as it was."""
    assert place.train("plain", f"cache.path={place.folder / 'whole'}") == errors.DONE


def folders(cache: Path) -> list[Path]:
    return sorted(path.parent for path in cache.glob("*/encoder.json"))


def lose_bits(cache: Path) -> None:
    """One bit of each row of all images and captions."""
    for folder in folders(cache):
        for shard, head in Rows.found(str(folder)).heads.items():
            data = bytearray((folder / shard).read_bytes())
            for row in range(len(head.keys)):
                data[head.start + row * head.dtype.itemsize + 5 * row % head.dtype.itemsize] ^= 1 << row % 8
            (folder / shard).write_bytes(data)


@pytest.fixture
def cache(place, tmp_path) -> Path:
    shutil.copytree(place.folder / "whole", tmp_path / "cache")
    lose_bits(tmp_path / "cache")
    return tmp_path / "cache"


def command(place: Place, cache: Path, *verb: str) -> list[str]:
    return ["cache", *verb, str(place.recipe), f"output_dir={place.folder}", *place.given(f"cache.path={cache}")]


@pytest.mark.long  # of the quick tests, the verbs mend what is damaged
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_on_to_the_same_weights(place, plain, cache, capsys, workers):
    name = f"hurt{workers}"
    assert place.train(name, f"cache.path={cache}", f"loader.num_workers={workers}") == errors.DONE
    said = capsys.readouterr().out
    assert f"{LOST}; it was encoded again" in said
    assert f"noted: {MENDED}" in said
    skipped = json.loads((place.folder / name / "data.json").read_text())["skipped"]
    assert skipped[MENDED]["kept"]
    assert skipped[MENDED]["count"] > 8
    assert not any(not entry["kept"] for entry in skipped.values())
    for group in ("model", "ema"):
        assert_equal(place.tensors(name, group, 12), place.tensors("plain", group, 12))
    for numbers in ("learning/loss", "validation/loss"):
        assert place.numbers(name, numbers) == place.numbers("plain", numbers)


@pytest.mark.long
def test_every_verb_tells_the_truth(place, cache, capsys):
    total = sum(len(Rows.found(str(folder)).keys) for folder in folders(cache))
    assert total > IMAGES
    assert main.run(command(place, cache, "verify")) == errors.FAILED
    said = capsys.readouterr().out
    assert f"{IMAGES} damaged rows" in said
    assert "encoded again by: daguerre cache RECIPE ...\n" in said
    assert "again=true" not in said  # every image would be read, and none need be
    assert main.run(command(place, cache)) == errors.DONE
    said = capsys.readouterr().out
    assert f"damaged rows of images: {IMAGES}; those that this recipe reads are encoded again" in said
    assert f"complete; {total} rows were encoded" in said
    assert main.run(command(place, cache, "verify")) == errors.DONE
    assert main.run(command(place, cache)) == errors.DONE
    assert "nothing was missing" in capsys.readouterr().out
    assert main.run(command(place, cache, "purge")) == errors.DONE
    for folder in folders(cache):
        held = Rows.found(str(folder))
        assert not any(rows.any() for rows in held.damaged_rows.values())
    assert sum(len(Rows.found(str(folder)).keys) for folder in folders(cache)) == total


def test_purge_does_not_keep_what_is_damaged(place, cache, capsys):
    assert main.run(command(place, cache, "purge")) == errors.DONE
    assert "0 rows" in capsys.readouterr().out
    (cache / folders(cache)[0].name / "encoder.json").write_text("[1]")
    assert main.run(command(place, cache, "list")) == errors.DONE
    assert "encoder.json no longer says" in capsys.readouterr().out


def test_a_cache_alone_says_that_it_has_no_images(place, cache, capsys):
    alone = ("data.source=cache", f"data.path={cache}", f"cache.path={cache}")
    words = [word for word in place.given(*alone) if word != f"data.path={place.folder / 'images'}"]
    given = ["train", str(place.recipe), f"output_dir={place.folder}", "run_name=alone", *words]
    assert main.run(given) == errors.REFUSED
    assert "data.source=cache has no images to encode it from" in capsys.readouterr().err
