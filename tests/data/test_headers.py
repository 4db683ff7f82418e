"""The size of an image as it is seen, told by its header: what indexes and buckets go by."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from daguerre.data.images import decode, headers
from daguerre.data.settings import SourceSettings

EVERY = ("jpeg", "png", "webp", "gif", "bmp", "tiff")
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))


def encoded(kind, orientation=None, image=IMAGE, **options):
    file, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
        options["exif"] = exif
    image.save(file, kind, **options)
    return file.getvalue()


def size_of(data, formats=EVERY):
    return headers.upright_size(io.BytesIO(data), formats)


def decoded_size(data):
    return decode.sized(data, SourceSettings(source="test", formats=EVERY), None)[0].shape[:2]


def late_note(png: bytes, kind: bytes, body: bytes) -> bytes:
    """The PNG with a chunk between its pixels and its end."""
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return png[:-12] + chunk + png[-12:]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_height_and_width_without_rotation(kind):
    assert size_of(encoded(kind)) == decoded_size(encoded(kind)) == (20, 30)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_rotation_is_counted_in(kind, orientation):
    data = encoded(kind, orientation)
    assert size_of(data) == decoded_size(data) == ((30, 20) if orientation >= 5 else (20, 30))


def exif_bytes(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def raw_profile(orientation):
    body = exif_bytes(orientation)
    return b"Raw profile type exif\0" + f"\nexif\n{len(body):8}\n{body.hex()}\n".encode()


NOTES = [
    (b"eXIf", exif_bytes(6).removeprefix(b"Exif\0\0")),
    (b"tEXt", raw_profile(8)),
    (b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="5"/>'),
]


@pytest.mark.parametrize(("kind", "body"), NOTES, ids=["eXIf", "ImageMagick's profile", "XMP"])
def test_a_png_may_say_it_after_its_pixels(kind, body):
    data = late_note(encoded("PNG"), kind, body)
    assert size_of(data) == decoded_size(data) == (30, 20)


def test_a_png_is_not_decoded_for_its_size(monkeypatch):
    def refuse(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(headers.PngImagePlugin.PngImageFile, "load", refuse)
    assert size_of(encoded("PNG")) == (20, 30)
    assert size_of(encoded("PNG", 6)) == (30, 20)
    assert size_of(late_note(encoded("PNG"), b"tIME", b"\x07\xea\x0b\x15\0\0\0")) == (20, 30)


def test_a_cut_image_still_has_the_size_that_its_header_claims():
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encoded(kind, 6)
        assert size_of(data[: len(data) * 3 // 4] if kind != "WEBP" else data) == (30, 20)


@pytest.mark.parametrize("orientation", [0, 9, 400])
def test_an_orientation_that_does_not_exist_is_none(orientation):
    assert size_of(encoded("JPEG", orientation)) == (20, 30)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_formats_that_are_not_allowed_are_refused_by_name(kind):
    with pytest.raises(headers.Undecodable, match=f"^a {kind} file, which data.formats does not allow"):
        headers.upright_size(io.BytesIO(encoded(kind)), headers.USUAL)


def test_a_fault_of_the_disk_is_no_reason_to_leave_an_image_out():
    class Failing(io.BytesIO):
        def read(self, size=-1):
            if size < 0 or self.tell() + size > 20:
                raise OSError(5, "Input/output error")
            return super().read(size)

    for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"):
        with pytest.raises(OSError, match="Input/output error"):
            headers.upright_size(Failing(encoded(kind)), EVERY)


def test_a_fault_of_the_disk_while_a_note_is_read_passes_too():
    data = late_note(encoded("PNG"), *NOTES[0])

    class Failing(io.BytesIO):
        def read(self, size=-1):
            if self.tell() >= len(data) - 40:
                raise OSError(5, "Input/output error")
            return super().read(size)

    with pytest.raises(OSError, match="Input/output error"):
        headers.upright_size(Failing(data), EVERY)


def test_too_many_pixels_are_refused_whatever_the_format():
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    body = struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(headers.Undecodable, match="too many pixels"):
        size_of(b"\x89PNG\r\n\x1a\n" + chunk + body)
    webp = bytearray(encoded("WEBP", lossless=True))
    webp[21:25] = b"\xff\xff\xff\x0f"  # 16384 x 16384: more than Pillow's plug-in itself allows
    with pytest.raises(headers.Undecodable, match="too many pixels"):
        size_of(bytes(webp))
    gif = bytearray(encoded("GIF"))
    gif[6:10] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(headers.Undecodable, match="too many pixels"):
        size_of(bytes(gif))
