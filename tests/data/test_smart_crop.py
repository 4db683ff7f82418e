"""Smart crops: around what an image shows, by the rule of Stability's code; masks, flips and caches beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quick_cases import quick_where
from torch.nn import functional

from daguerre.data.images import decode, saliency
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SourceSettings
from daguerre.errors import UserError

SQUARE = Bucket(64, 64)


def settings(**given: Any) -> SourceSettings:
    return SourceSettings(source="test", resolution=64, crop="smart", **given)


def scene(left: int, top: int = 20, size: tuple[int, int] = (64, 256)) -> np.ndarray:
    """A bright disc of 24 px on faint noise."""
    height, width = size
    noise = np.random.default_rng(0).integers(100, 110, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    noise[np.hypot(y - top - 12, x - left - 12) < 12] = (250, 30, 30)
    return noise.astype(np.uint8)


def key(number: int) -> np.ndarray:
    return np.array([number, 0, 0], dtype=np.int64)


def cut(image: np.ndarray, number: int, **given: Any) -> tuple[decode.Frame, torch.Tensor]:
    frames, found = decode.cut({"image": image}, settings(**given), SQUARE, 1, key(number))
    return frames["image"], found["image"]


@pytest.mark.long
@pytest.mark.parametrize("left", quick_where((116).__eq__, [4, 116, 226]))
def test_the_crop_shows_what_the_image_shows(left):
    """In the seven of ten cases in which it is not moved; a centre crop has none of two of these."""
    frames = [cut(scene(left), number)[0] for number in range(200)]
    (usual, count) = max(((each, frames.count(each)) for each in frames), key=lambda pair: pair[1])
    assert 0.6 < count / 200 < (0.8 if left == 116 else 0.95), "at an end of the image a move may change nothing"
    assert usual.left <= left
    assert left + 24 <= usual.left + 64
    moves = np.array([frame.left - usual.left for frame in frames if frame != usual])
    assert np.abs(moves).max() <= 0.2 * 256 + 1
    assert len({*moves}) > (20 if left == 116 else 5)


def test_a_tall_image_is_cut_at_its_height():
    each = [cut(scene(20, 200, (256, 64)), number) for number in range(10)]
    assert {frame.left for frame, _ in each} == {0}
    assert max((pixels[0] > 240).sum() for _, pixels in each) > 300


def test_the_rule_of_the_network(tmp_path):
    """Temperature .03, three quarters of the largest, the centroid on a grid from 0 to 1; names of their file."""
    torch.manual_seed(0)
    network = saliency.Saliency().eval()
    torch.save(network.state_dict(), tmp_path / "saliency_model.pt")
    image = scene(150, size=(96, 192))
    x = torch.from_numpy(image).permute(2, 0, 1)[None]
    small = functional.interpolate(x, (240, 480), mode="bilinear", antialias=True).float() / 255
    with torch.no_grad():
        heat = network(small)
    assert heat.shape == (1, 1, 30, 60)
    shares = heat.flatten().div(0.03).softmax(-1)
    counted = (shares > 0.75 * shares.max()).float().view(heat.shape[2:])
    rows, columns = (torch.linspace(0, 1, side) for side in heat.shape[2:])
    wanted = [float((counted * grid).sum() / counted.sum()) for grid in (rows[:, None], columns[None])]
    found = saliency.middle(image, str(tmp_path / "saliency_model.pt"))
    assert found == pytest.approx(wanted, abs=1e-6)
    assert found != pytest.approx(saliency.middle(image, None), abs=1e-3)
    names = {name.rpartition(".")[0] for name in network.state_dict()}
    assert {"downsampler.1", "downsampler.2", "downsampler.9", "residual.0.resblock.5", "residual.1"} <= names
    assert {"segmentator.1", "segmentator.2", "segmentator.6"} <= names
    (tmp_path / "other.pt").write_bytes(b"nothing")
    with pytest.raises(UserError, match="no file of the saliency network"):
        saliency.middle(image, str(tmp_path / "other.pt"))


def test_a_flipped_crop_is_the_same_part_flipped():
    frames = {}
    for number in range(40):
        plain, mirrored = (cut(scene(226), number, random_flip=flip) for flip in (False, True))
        frames[mirrored[0].mirror] = (plain, mirrored)
    for mirror, ((_, before), (_, after)) in frames.items():
        assert torch.equal(after, before.flip(2) if mirror else before)
    assert frames.keys() == {True, False}


def test_an_even_image_is_cut_in_its_middle():
    even = np.full((64, 256, 3), 7, np.uint8)
    lefts = [cut(even, number)[0].left for number in range(50)]
    assert max(lefts, key=lefts.count) == 96


def test_weights_without_smart_crops_are_refused():
    with pytest.raises(ValueError, match="no effect without crop=smart"):
        SourceSettings(source="test", crop="random", saliency="x.pt")
