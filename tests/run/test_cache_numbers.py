"""What cannot be kept in a cache is refused with the name of the image or the caption."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from daguerre.caching import encode
from daguerre.data.cached.settings import CacheSettings
from daguerre.errors import UserError

NAMES = ["a.jpg", "b.jpg", "c.jpg"]
BAD = {"not a number": float("nan"), "infinite": float("inf"), "above the limit of float16": 1e6}


def parts(bad, rows):
    def made(count, name):
        found = torch.ones(count, 2, 3)
        found[[row for row in rows if row < count], 1, 2] = bad
        return {name: found, "mean": torch.ones(count)}

    images = SimpleNamespace(encode=lambda pixels_BCHW: made(len(pixels_BCHW), "logvar"))
    text = SimpleNamespace(encoders=(), tokens=list, features=lambda texts: made(len(texts), "features"))
    return SimpleNamespace(
        device=torch.device("cpu"),
        family=SimpleNamespace(images=images, text=text),
        numerics=SimpleNamespace(frozen=nullcontext),
    )


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_an_image_whose_row_cannot_be_kept_is_named(bad):
    crops = [torch.zeros(3, 8, 8, dtype=torch.uint8)] * 3
    what = "above float16's limit: set cache.dtype=float32" if bad == 1e6 else "not finite: the encoder's weights"
    with pytest.raises(UserError, match=rf"^b\.jpg gives logvar (that is|with values) {what}"):
        encode.encode_images(parts(bad, [1]), CacheSettings(path="x"), crops, NAMES)
    with pytest.raises(UserError, match=r"^b\.jpg \(and 1 more of 3 that were encoded with it\) gives logvar"):
        encode.encode_images(parts(bad, [1, 2]), CacheSettings(path="x"), crops, NAMES)
    assert len(encode.encode_images(parts(bad, []), CacheSettings(path="x"), crops, NAMES)) == 3


def test_a_caption_whose_row_cannot_be_kept_is_named():
    texts = ["a circle", "a very long caption " * 9]
    with pytest.raises(UserError, match=r"^the caption 'a very long caption .{40}\.\.\.' gives features"):
        encode.encode_texts(parts(float("nan"), [1]), CacheSettings(path="x"), [*map(encode.Caption, texts)])
