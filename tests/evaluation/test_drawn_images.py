"""Images of a metric's own prompts: two lists that differ in anything share no folder, and pictures are read as those
of files are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daguerre.config import config as configs
from daguerre.evaluation import images
from daguerre.generation import images as input_images
from daguerre.generation.images import InputImage
from daguerre.types import References

GREY, BLACK = (np.full((40, 60, 3), level, np.uint8) for level in (128, 0))


@pytest.fixture(scope="module")
def config() -> configs.Config:
    return configs.load("quickstart", []).config


def test_requests_that_differ_in_anything_have_a_digest_of_their_own(config):
    (one,) = asked = images.of_metric(config, ["a"], [GREY])
    assert images.digest_of_requests(asked) == images.digest_of_requests(images.of_metric(config, ["a"], [GREY]))
    others = [
        [],
        images.of_metric(config, ["a"]),
        images.of_metric(config, ["a"], [BLACK]),
        images.of_metric(config, ["a", "b"], [GREY, GREY]),
        images.of_metric(config, ["a\nb"]),
        *[[replace(one, **{name: value})] for name, value in (("seed", 1), ("size_px", (8, 8)), ("guidance_scale", 9))],
    ]
    digests = [images.digest_of_requests(each) for each in (asked, *others)]
    assert len({*digests}) == len(digests)


def test_a_picture_that_was_made_is_read_as_its_file_is(tmp_path):
    made = input_images.made("reference", GREY)
    (tmp_path / "a.png").write_bytes(made.content())
    of_file = InputImage("reference", tmp_path / "a.png")
    assert (made.sha256, made.size_px) == (of_file.sha256, of_file.size_px) == (made.sha256, (40, 60))
    rule = References(most=1, enlarges=True, max_px=128 * 128, seen=References(most=1, enlarges=True, max_px=32 * 32))
    found = [input_images.pixels({"reference": image}, (8, 8), (8, 8), rule) for image in (made, of_file)]
    assert {name: pixels.shape for name, pixels in found[0].items()} == {
        "reference": (96, 144, 3),
        "seen_reference": (16, 32, 3),
    }
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
