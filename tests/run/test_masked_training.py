"""Masks from a folder to the weights: what a run learns with them, on one process and on several; what is refused."""

from __future__ import annotations

from pathlib import Path

import forked_runs
import numpy as np
import pytest
import torch
from PIL import Image
from several_devices import MESHES, RECIPE, Runs, zeros
from tiny_models import write_sd
from tiny_runs import train

from daguerre import errors
from daguerre.cli import main

MASKED = ["objective.mask.outside_weight=0.2", "data.crop=random", "data.random_flip=true"]
MASKED += ["data.buckets.aspects=[1/1, 1/2]", "data.buckets.step=8"]


def mask_all(folder: Path, masks, names=None) -> None:
    """Writes `masks(number, image)` beside every image of a folder."""
    for number, path in enumerate(sorted(folder.glob("[0-9]*.png"))):
        with Image.open(path) as image:
            levels = masks(number, image)
        Image.fromarray(levels).save(path.with_name(f"{path.stem}.mask.png"))


def noise(number, image):
    return np.random.default_rng(number).integers(0, 2, (image.height, image.width), dtype=np.uint8) * 255


def black(number, image):
    return np.zeros((image.height, image.width), np.uint8)


def white(number, image):
    return 255 - black(number, image)


@pytest.fixture
def masked(tmp_path: Path) -> Runs:
    """Runs on 24 images, half of them wide, of which 20 have masks."""
    runs = Runs(tmp_path, "sd", steps=4)
    folder = tmp_path / "images"
    for number, path in enumerate(sorted(folder.glob("*.png"))):
        if number % 2:
            Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 34, 3), dtype=np.uint8)).save(path)
    mask_all(folder, noise)
    for number in range(4):
        (folder / f"{number:02}.mask.png").unlink()
    return runs


@pytest.mark.long
@pytest.mark.parametrize("meshes", [(), ("two", "data2-fsdp2", "data4", "fsdp2-tensor2")])
def test_any_cut_of_the_batch_learns_the_same_of_masked_images_and_goes_on(masked: Runs, tmp_path, meshes):
    plan = [masked.on(name, MESHES[name], *MASKED, "checkpoint.every=2 steps") for name in ("one", *meshes)]
    plan.append(masked.on("cut", (1, 1, 1, 1), *MASKED, "training.per_device_batch_size=2", "loader.num_workers=1"))
    plan.append(masked.on("unmasked", (1, 1, 1, 1), *MASKED[1:]))
    copies = [[str(tmp_path / (*meshes, "one")[0]), str(tmp_path / "on")]]
    drops = [str(tmp_path / "on/checkpoints/step-00000004")]
    later = masked.on("on", (1, 1, 1, 1), *MASKED, "checkpoint.every=2 steps")
    plan.append(later | {"copies": copies, "drops": drops})
    assert zeros(forked_runs.together(tmp_path, plan) if meshes else forked_runs.here(plan))
    assert "continuing from step-00000002" in masked.log("on")
    assert "kept without a mask: all of it counts" in masked.log("one")
    for name in (*meshes, "cut", "on"):
        masked.assert_equal(name, "one")
    assert masked.numbers("unmasked") != masked.numbers("one")


def single(folder: Path, name: str, masks, *overrides: str) -> Runs:
    """A run of one process on 24 images with these masks, without adaptive weights."""
    place = folder / name
    place.mkdir()
    runs = Runs(place, "sd", steps=2)
    runs.recipe.write_text(RECIPE.replace("weighting: {name: adaptive, adaptive_buckets: 12}", ""))
    mask_all(place / "images", masks)
    assert main.run(runs.on("run", (1, 1, 1, 1), *overrides)["arguments"]) == errors.DONE
    return runs


@pytest.mark.long  # of the quick tests, objectives/test_masked_loss.py has the loss
def test_white_masks_teach_the_same_weights_to_the_bit_and_black_ones_a_share_of_the_loss(tmp_path):
    plain, all_white = single(tmp_path, "plain", white), single(tmp_path, "white", white, "objective.mask={}")
    dark = single(tmp_path, "black", black, "objective.mask.outside_weight=0.25", "validation.every=1 steps")
    even = single(
        tmp_path, "even", black, "objective.mask={outside_weight: 0.25, normalise: true}", "validation.every=1 steps"
    )
    assert plain.numbers("run") == all_white.numbers("run")
    one, other = plain.tensors("run", "model"), all_white.tensors("run", "model")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert dark.numbers("run")[0] == pytest.approx(0.25 * plain.numbers("run")[0], rel=1e-5)
    assert even.numbers("run")[0] == pytest.approx(plain.numbers("run")[0], rel=1e-5)
    losses = [runs.numbers("run", "validation/loss")[0] for runs in (dark, even)]
    assert losses[0] == pytest.approx(0.25 * losses[1], rel=2e-2)  # validation counts by the masks, too


@pytest.mark.long  # of the quick tests, data/test_masks.py reads the same masks of both
def test_an_alpha_channel_teaches_what_a_mask_does_also_from_a_cache(tmp_path):
    runs = Runs(tmp_path, "sd", steps=2)
    runs.recipe.write_text(RECIPE.replace("weighting: {name: adaptive, adaptive_buckets: 12}", ""))
    mask_all(tmp_path / "images", noise)
    for path in (tmp_path / "images").glob("*.mask.png"):
        place = path.with_name(path.name.replace(".mask", ""))
        with Image.open(path) as mask, Image.open(place) as image:
            image.putalpha(mask)
            image.save(place)
    alpha, cached = ("data.alpha_mask=true",), ("cache.path=auto", "cache.texts=false")
    for name, own in {"mask": (), "alpha": alpha, "cached": (*alpha, *cached)}.items():
        frozen = "model.train_text_encoder=false"
        words = runs.on(name, (1, 1, 1, 1), MASKED[0], "data.random_flip=true", frozen, *own)["arguments"]
        assert main.run(words) == errors.DONE
        for path in (tmp_path / "images").glob("*.mask.png"):
            path.unlink()
    expected = runs.tensors("mask", "model")
    for name in ("alpha", "cached"):
        found = runs.tensors(name, "model")
        assert found.keys() == expected.keys()
        apart = max(float((found[key] - expected[key]).abs().max()) for key in found)
        assert apart <= (1e-5 if name == "cached" else 0)  # a cache encodes in other batches; an update is 1e-4


def refused(capsys, folder: Path, *overrides: str) -> str:
    assert train(folder, *overrides) == errors.REFUSED
    return capsys.readouterr().err


def test_what_has_no_effect_is_refused(tmp_path, capsys):
    assert "no sample has a mask" in refused(capsys, tmp_path, "objective.mask={}")
    assert "data.mask_dir" in refused(
        capsys, tmp_path, "data.source=folder", "data.path=x", f"data.mask_dir={tmp_path}"
    )
    mixed = ["data.source=mix", "data.sources={a: {source: parquet, path: x, mask_column: m}}", "data.resolution=64"]
    assert "data.sources.a.mask_column" in refused(capsys, tmp_path, *mixed)


@pytest.mark.parametrize(
    "verb",
    [*(pytest.param(verb, marks=pytest.mark.long) for verb in ("bench", "bench loader", "plan")), "train --dry-run"],
)
def test_time_and_memory_are_measured_with_masks(tmp_path, verb, capsys):
    base, folder = write_sd(tmp_path / "base") or tmp_path / "base", tmp_path / "images"
    folder.mkdir()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / "0.png")
    (folder / "0.txt").write_text("x")
    mask_all(folder, white)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)
    own = [f"model.pretrained_model_name_or_path={base}", f"data.path={folder}", "training.duration=2 steps"]
    verb, _, more = verb.partition(" ")
    quick = ["rounds=1", "turn_seconds=0.01", "soak_seconds=0", f"out={tmp_path / 'b.json'}"]
    quick = [*quick, f"inputs={more or 'latents'}"] if verb == "bench" else [more] * bool(more)
    words = [verb, str(recipe), *own, "training.global_batch_size=1", "objective.mask={}", *quick]
    assert main.run(words) == errors.DONE, capsys.readouterr().err
