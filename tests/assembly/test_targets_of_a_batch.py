"""Targets of a batch: clean samples and conditioning of each image, with noise of its own for the autoencoder alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import write_sdxl

from daguerre.assembly import parts
from daguerre.assembly.parts import Components
from daguerre.config import config as configs
from daguerre.objectives.objective import Draws, Needs, Objective
from daguerre.types import Batch


@dataclass(frozen=True, kw_only=True)
class Number(Draws):
    """A number of each sample."""

    noise: torch.Tensor


class Pairs(Objective):
    """Reads a pair, and draws a number of each sample."""

    needs = Needs(images=("rejected",))
    drawn = Number

    def draws(self, seed, keys, shape, *, quantile=None):
        return Number(noise=torch.from_numpy(keys[:, :1]).float())

    def loss(self, nets, example):
        raise AssertionError("not called")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Components:
    folder: Path = tmp_path_factory.mktemp("base")
    own = ["data.source=folder", f"data.path={folder}", "data.resolution=16", "training.device=cpu"]
    own.append(f"pretrained_model_name_or_path={write_sdxl(folder / 'sdxl')}")
    found = parts.build(configs.load("sdxl_lora", own).config)
    return replace(found, objective=Pairs())


def batch() -> Batch:
    pixels = np.random.default_rng(3).integers(0, 256, (2, 2, 3, 16, 16), dtype=np.uint8)
    images = {name: torch.from_numpy(own) for name, own in zip(("image", "rejected"), pixels, strict=True)}
    sizes = np.array([[20, 30, 1, 2, 16, 16], [16, 16, 0, 0, 16, 16]], dtype=np.int32)
    keys = np.array([[5, 0, 0], [6, 0, 0]])
    return Batch(keys, images, ["a", "b"], torch.ones(2), ["a", "b"], sizes, sizes_of={"rejected": 10 * sizes})


def test_a_target_has_its_own_sizes_and_noise_and_all_else_of_its_sample(built):
    assert built.images == {"rejected": None}
    pair = batch()
    with_draws = replace(pair, draws=built.draws(pair))
    example = built.example(with_draws)
    assert [*example.clean] == [*example.cond] == ["image", "rejected"]
    assert torch.equal(example.draws.noise, with_draws.draws["noise"])
    (x0, other), (cond, of_other) = example.clean.values(), example.cond.values()
    assert cond.keys() == of_other.keys()
    told = {name for name in cond if not torch.equal(cond[name], of_other[name])}
    assert [of_other[name].tolist() for name in told] == [(10 * cond[name]).tolist() for name in told]
    assert len(told) == 1  # the sizes: its captions are the same
    noise, of_rejected = with_draws.draws["posterior"], with_draws.draws["rejected.posterior"]
    assert not torch.equal(noise, of_rejected)
    moments = built.family.images.encode(pair.images["rejected"])
    assert torch.equal(other, built.family.images.latents(moments, {"posterior": of_rejected}))
    assert not torch.equal(x0, other)


def test_the_image_that_is_trained_on_is_encoded_as_without_a_target(built):
    alone = replace(batch(), images={"image": batch().pixels_BCHW}, sizes_of={})
    alone = replace(alone, draws=replace(built, objective=PlainPairs()).draws(alone))
    pair = replace(batch(), draws=built.draws(batch()))
    assert all(torch.equal(alone.draws[name], pair.draws[name]) for name in alone.draws)
    x0, cond = built.family.encode(alone)
    of_pair, cond_of_pair = built.family.encode_each(pair, built.targets)["image"]
    assert torch.equal(x0, of_pair)
    assert all(torch.equal(cond[name], cond_of_pair[name]) for name in cond)


class PlainPairs(Pairs):
    """The same without a target."""

    needs = Needs()
