"""Images found again in a parquet file by the places of their pieces: the same bytes, or not found."""

import io
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from quick_cases import quick_where

from daguerre.data.table import verbatim
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location


def jpegs(number, side):
    """Images with the same header and tables, as one encoder writes them."""
    draws, made = np.random.default_rng(side), []
    for _ in range(number):
        small = Image.fromarray(draws.integers(0, 256, (9, 9, 3), np.uint8)).resize(
            (side, side), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(small).astype(int) + draws.integers(-9, 10, (side, side, 3))
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
        made.append(file.getvalue())
    return made


def found(path, images):
    with verbatim.finder(path) as finder:
        finder.cursor = 4
        return [finder.ranges(image) for image in images]


@pytest.mark.parametrize(
    ("side", "compression"),
    quick_where(
        # the smallest images that are found in each, and where few are
        [(64, "none"), (256, "snappy"), (640, "zstd"), (256, "gzip"), (256, "lz4"), (256, "brotli")].__contains__,
        itertools.product([64, 256, 640], ["none", "snappy", "zstd", "gzip", "lz4", "brotli"]),
    ),
)
def test_what_is_found_is_the_image(tmp_path, compression, side):
    images = jpegs(20, side)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"jpg": images, "text": ["x"] * 20}), path, compression=compression, row_group_size=7)
    ranges = found(path, images)
    for image, where in zip(images, ranges, strict=True):
        assert not where or verbatim.read(Location(str(path)), where) == image
    if side >= {"none": 64, "snappy": 256, "zstd": 640}.get(compression, 9999):
        assert sum(map(bool, ranges)) >= 18


def test_bytes_that_are_not_there(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 16))
    assert found(path, [np.random.default_rng(1).bytes(10_000)]) == [b""]


def test_whatever_stands_between(tmp_path):
    """Stretches in their order with anything between them, some of them before: all are found, whatever was not."""
    draws = np.random.default_rng(3)
    for _ in range(50):
        images = [draws.bytes(int(draws.integers(100, 5000))) for _ in range(6)]
        body = b"PAR1"
        for i, image in enumerate(images):
            cuts = [0, *sorted(int(c) for c in draws.integers(40, len(image) - 40, 2)), len(image)]
            for start, stop in itertools.pairwise(cuts):
                body += draws.bytes(int(draws.integers(0, 9))) + (image[start:stop] if i != 3 else b"other")
        (tmp_path / "a").write_bytes(body)
        ranges = found(tmp_path / "a", images)
        assert [bool(where) for where in ranges][3] is False
        assert sum(map(bool, ranges)) >= 3
        for image, where in zip(images, ranges, strict=True):
            assert not where or verbatim.read(Location(str(tmp_path / "a")), where) == image


def test_a_file_that_became_shorter(tmp_path):
    images = jpegs(3, 64)
    path = tmp_path / "a"
    path.write_bytes(b"PAR1" + b"".join(images))
    ranges = found(path, images)
    assert all(ranges)
    path.write_bytes(path.read_bytes()[:-10])
    assert verbatim.read(Location(str(path)), ranges[0]) == images[0]
    with pytest.raises(storage_io.Mismatch):
        verbatim.read(Location(str(path)), ranges[2])
