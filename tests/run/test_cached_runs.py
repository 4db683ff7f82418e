"""Runs on a cache from end to end: what they learn is what uncached runs learn, and no frozen encoder is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_runs import Place, assert_equal

from daguerre import errors
from daguerre.models import components

RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: eps}
data: {source: folder, resolution: 16, caption_dropout: 0.3, random_flip: true, held_out_fraction: 0.2}
training: {duration: 4 steps, global_batch_size: 2, per_device_batch_size: 1}
lr_scheduler: {warmup: 0 steps}
optimizer: {learning_rate: 1e-3}
ema: {enabled: true}
checkpoint: {every: 2 steps, export: false}
validation: {every: 2 steps, num_samples: 3, num_levels: 2}
sampling: {num_images: 1, num_inference_steps: 1}
logging: {every: 1 steps, tensorboard: false}
"""


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def place(request, tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp(request.param), request.param, RECIPE)


def losses(place: Place, name: str) -> list[float]:
    return place.numbers(name, "learning/loss") + place.numbers(name, "validation/loss")


def _of_autoencoder(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "PSNR" in line]


def cache(folder: Path, *more: str) -> list[str]:
    return [f"cache.path={folder}", "cache.dtype=float32", *more]


def test_a_cached_run_equals_an_uncached_one_to_the_bit(place, monkeypatch, capsys):
    assert place.train("plain") == 0
    poor = _of_autoencoder(capsys)
    assert place.train("filling", *cache(place.folder / "cache")) == 0
    assert _of_autoencoder(capsys) == poor
    assert len(poor) == 1, "its weights are random"
    monkeypatch.setattr(components.load, "load", forbidden(components.load.load))
    assert place.train("cached", "sampling.num_images=0", *cache(place.folder / "cache")) == 0
    for name in ("filling", "cached"):
        assert losses(place, name) == losses(place, "plain")
        assert len(losses(place, name)) == 6
        for group in ("model", "ema"):
            assert_equal(place.tensors(name, group), place.tensors("plain", group))


def forbidden(load):
    def only_the_unet(kind, folder, *rest):
        if torch.get_default_device().type != "meta":
            assert folder.name == "unet", folder
        return load(kind, folder, *rest)

    return only_the_unet


@pytest.mark.long
def test_a_run_goes_on_with_a_cache_or_without(place):
    """Two updates on a cache, then two without, equal four without: `plain` of the test above."""
    given = ["training.duration=2 steps", "allow_change=[training]"]
    assert place.train("switched", *given, *cache(place.folder / "cache")) == 0
    assert place.train("switched", "allow_change=[training]") == 0
    assert_equal(place.tensors("switched"), place.tensors("plain"))


@pytest.mark.long
def test_twenty_updates_are_equal_also_where_a_run_goes_to_a_cache_and_back(place):
    parts = {"plain20": [(20, [])], "cached20": [(20, cache(place.folder / "cache"))]}
    parts["switched20"] = [(6, cache(place.folder / "cache")), (13, []), (20, cache(place.folder / "cache"))]
    for name, durations in parts.items():
        for updates, given in durations:
            duration = [f"training.duration={updates} steps", "allow_change=[training]"]
            assert place.train(name, *duration, *given) == 0
        assert place.numbers(name, "learning/loss") == place.numbers("plain20", "learning/loss")
        for group in ("model", "ema"):
            assert_equal(place.tensors(name, group, 20), place.tensors("plain20", group, 20))
    assert len(place.numbers("switched20", "learning/loss")) == 20
    assert losses(place, "cached20") == losses(place, "plain20")


@pytest.mark.long
def test_a_cache_alone_is_a_source(place, capsys):
    """The images are not there, and what is learnt is the same."""
    (place.folder / "images").rename(place.folder / "elsewhere")
    try:
        alone = ["data.source=cache", f"data.path={place.folder / 'cache'}"]
        capsys.readouterr()
        assert place.train("alone", *cache(place.folder / "cache"), *alone) == 0
        assert "PSNR" not in capsys.readouterr().out, "there are no images to measure the autoencoder on"
        assert losses(place, "alone") == losses(place, "plain")
        assert_equal(place.tensors("alone"), place.tensors("plain"))
        assert place.train("other", *cache(place.folder / "cache"), *alone, "data.resolution=32") == errors.REFUSED
        assert "another resolution" in capsys.readouterr().err
    finally:
        (place.folder / "elsewhere").rename(place.folder / "images")
