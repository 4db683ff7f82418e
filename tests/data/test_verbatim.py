"""Pictures found again in a parquet file by the places of their pieces: the same bytes, or not found."""

import io
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from daguerre.data.table import verbatim
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location


def jpegs(number, side):
    """Pictures with the same header and tables, as one encoder writes them."""
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


def found(path, pictures):
    with verbatim.finder(path) as finder:
        finder.cursor = 4
        return [finder.places(picture) for picture in pictures]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
@pytest.mark.parametrize("side", [64, 256, 640])
def test_what_is_found_is_the_picture(tmp_path, compression, side):
    pictures = jpegs(20, side)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"jpg": pictures, "text": ["x"] * 20}), path, compression=compression, row_group_size=7)
    places = found(path, pictures)
    for picture, where in zip(pictures, places, strict=True):
        assert not where or verbatim.read(Location(str(path)), where) == picture
    if side >= {"none": 64, "snappy": 256, "zstd": 640}.get(compression, 9999):
        assert sum(map(bool, places)) >= 18


def test_bytes_that_are_not_there(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 16))
    assert found(path, [np.random.default_rng(1).bytes(10_000)]) == [b""]


def test_whatever_stands_between(tmp_path):
    """Stretches in their order with anything between them, some of them before: all are found, whatever was not."""
    draws = np.random.default_rng(3)
    for _ in range(50):
        pictures = [draws.bytes(int(draws.integers(100, 5000))) for _ in range(6)]
        body = b"PAR1"
        for i, picture in enumerate(pictures):
            cuts = [0, *sorted(int(c) for c in draws.integers(40, len(picture) - 40, 2)), len(picture)]
            for start, stop in itertools.pairwise(cuts):
                body += draws.bytes(int(draws.integers(0, 9))) + (picture[start:stop] if i != 3 else b"other")
        (tmp_path / "a").write_bytes(body)
        places = found(tmp_path / "a", pictures)
        assert [bool(where) for where in places][3] is False
        assert sum(map(bool, places)) >= 3
        for picture, where in zip(pictures, places, strict=True):
            assert not where or verbatim.read(Location(str(tmp_path / "a")), where) == picture


def test_a_file_that_became_shorter(tmp_path):
    pictures = jpegs(3, 64)
    path = tmp_path / "a"
    path.write_bytes(b"PAR1" + b"".join(pictures))
    places = found(path, pictures)
    assert all(places)
    path.write_bytes(path.read_bytes()[:-10])
    assert verbatim.read(Location(str(path)), places[0]) == pictures[0]
    with pytest.raises(storage_io.Mismatch):
        verbatim.read(Location(str(path)), places[2])
