"""Shards that we write: bytes that never change, read by others, and read by us as what was written."""

import io
import json
import random
import tarfile
from datetime import date
from decimal import Decimal

import numpy as np
import pytest
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from daguerre.data.images.headers import USUAL, Undecodable
from daguerre.data.tar import samples as tar_samples
from daguerre.data.tar import writer
from daguerre.errors import UserError
from daguerre.types import Record


def encoded(form: str, seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def record(**changes) -> Record:
    values = {"key": "x", "image": encoded("JPEG"), "texts": {"text": "a cat"}, "metadata": {"width": 7}}
    values |= changes
    return Record(images={"image": values.pop("image")}, **values)


def files(one: Record, formats=USUAL) -> dict[str, bytes]:
    return dict(writer.members(one, 5, formats))


def written(samples) -> bytes:
    buffer = io.BytesIO()
    assert list(writer.write_tar(buffer, samples)) == [key for key, _ in samples]
    return buffer.getvalue()


@pytest.mark.parametrize(("form", "extension"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_images_are_copied_and_named_by_what_they_are(form, extension):
    image = encoded(form)
    found = writer.members(record(image=image), 5, USUAL)
    assert found[0] == (extension, image)
    assert [name for name, _ in found] == [extension, "txt", "json"]


def test_drawn_images_become_png_to_the_bit():
    pixels = np.random.default_rng(3).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    image = files(record(image=pixels))["png"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(image))), pixels)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": b"<html>"}, "not an image"),
        ({"image": b""}, "empty file"),
        ({"image": encoded("GIF")}, "GIF"),
        ({"texts": {}}, "without a caption"),
        ({"texts": {"text": "  "}}, "without a caption"),
    ],
)
def test_what_cannot_be_trained_on_is_not_packed(changes, reason):
    with pytest.raises(Undecodable, match=reason):
        files(record(**changes))


def test_formats_that_are_allowed_are_packed():
    assert "gif" in files(record(image=encoded("GIF")), (*USUAL, "gif"))


def test_metadata_keeps_its_values_and_the_id_is_in_it():
    metadata = {"b": True, "i": 2**60, "f": 0.1, "s": "schön", "none": None, "list": [1, {"x": 2.5}]}
    assert json.loads(files(record(metadata=metadata))["json"]) == {**metadata, "daguerre_id": 5}


def test_values_that_json_lacks_become_what_it_has():
    given = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "np": np.int64(3),
        "array": np.array([1.5, 2]),
        "money": Decimal("1.25"),
        "day": date(2024, 2, 29),
    }
    read = json.loads(files(record(metadata=given))["json"])
    wanted = {"nan": None, "inf": None, "np": 3, "array": [1.5, 2.0], "money": 1.25, "day": "2024-02-29"}
    assert read == {**wanted, "daguerre_id": 5}
    with pytest.raises(UserError, match="metadata 'raw' is a bytes"):
        files(record(metadata={"raw": b"x"}))


@pytest.mark.parametrize(
    "texts",
    [
        {"text": "a cat"},
        {"text": "a cat", "txt": "a cat"},
        {"text": "a photo of a cat", "cls": "cat"},
        {"text": "a cat", "alt": "cat!", "blip": "there is a cat"},
        {"text": "a cat", "Alt Text": "cat!", "json": "odd", "jpg": "odder"},
        {"alt": "no usual caption"},
        {"text": "short", "caption": "the caption of the JSON"},
        {"text": "üñí 猫"},
    ],
)
def test_texts_are_read_back_as_they_were(texts):
    metadata = {"caption": texts["caption"]} if "caption" in texts else {}
    parts = files(record(texts=texts, metadata=metadata))
    words = tar_samples.words({name: data for name, data in parts.items() if name != "jpg"})
    read = {name: text for name, text in words.texts.items() if name != "txt" or "txt" in texts}
    assert read == texts
    again = record(texts=words.texts, metadata=words.metadata)
    once_more = tar_samples.words({name: data for name, data in files(again).items() if name != "jpg"})
    assert (once_more.texts, once_more.metadata) == (words.texts, words.metadata)


def test_the_same_samples_give_the_same_bytes_without_time_or_owner():
    samples = [(f"{i:09d}", writer.members(record(image=encoded("JPEG", i)), i, USUAL)) for i in range(4)]
    data = written(samples)
    assert data == written(samples)
    assert len(data) % 10240 == 0
    assert data[-1024:] == bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            assert (member.mtime, member.uid, member.gid, member.uname, member.mode) == (0, 0, 0, "", 0o644)


def test_webdataset_reads_what_we_write():
    lengths = random.Random(0)
    samples = []
    for i in range(20):
        one = record(image=encoded("PNG", i), texts={"text": "word " * lengths.randrange(1, 300)})
        samples.append((f"{i:09d}", writer.members(one, i, USUAL)))
    stream = {"url": "shard.tar", "stream": io.BytesIO(written(samples))}
    read = list(group_by_keys(tar_file_expander([stream])))
    assert len(read) == 20
    for (key, parts), found in zip(samples, read, strict=True):
        assert found["__key__"] == key
        assert {name: found[name] for name, _ in parts} == dict(parts)
