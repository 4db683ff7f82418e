"""Each oddity of an image file has one defined result; what cannot be decoded has one reason."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from daguerre.data import decode, headers
from daguerre.data.decode import Undecodable
from daguerre.data.settings import SourceSettings

KEY = np.array([5, 0, 0])
IMAGES = "not an image (JPEG, PNG and WebP can be read)"
TOO_LARGE = f"too many pixels (limit {headers.PIXEL_LIMIT})"


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def noise(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height, width):
    y, x = np.mgrid[:height, :width]
    waves = [128 + 100 * np.sin(x / (19 + 7 * c)) * np.cos(y / (23 - 5 * c)) for c in range(3)]
    return np.stack(waves, axis=-1).astype(np.uint8)


def settings(**given):
    return SourceSettings(source="test", **{"resolution": 16, **given})


def chunks(png: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        found.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def png_of(parts: list[tuple[bytes, bytes]]) -> bytes:
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_pixels_come_as_they_were(kind):
    picture = noise(20, 30)
    assert np.array_equal(decode.pixels(encoded(picture, kind, lossless=True)), picture)


def test_jpeg_equals_pillows_decoder():
    data = encoded(smooth(60, 80), "JPEG", quality=92)
    assert np.abs(decode.pixels(data).astype(int) - np.asarray(Image.open(io.BytesIO(data))).astype(int)).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation_is_applied_once(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(smooth(24, 40), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as stored:
        upright = np.asarray(ImageOps.exif_transpose(stored).convert("RGB")).astype(int)
    got = decode.pixels(data).astype(int)
    assert got.shape == upright.shape == ((40, 24, 3) if orientation >= 5 else (24, 40, 3))
    assert np.abs(got - upright).max() <= 2


@pytest.mark.parametrize("value", [0, 9, 77])
def test_an_impossible_orientation_is_upright(value):
    exif = Image.Exif()
    exif[0x0112] = value
    assert decode.pixels(encoded(noise(8, 12), exif=exif)).shape == (8, 12, 3)


def test_a_broken_exif_block_leaves_the_picture():
    data = encoded(noise(8, 12), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decode.pixels(data).shape == (8, 12, 3)


def test_cmyk_jpeg_is_converted():
    inks = np.zeros((16, 16, 4), np.uint8)
    inks[..., 0] = 255  # cyan ink only
    red, green, blue = decode.pixels(encoded(Image.fromarray(inks, "CMYK"), "JPEG", quality=95)).mean((0, 1))
    assert red < 10
    assert min(green, blue) > 245


def test_16_bit_grey_is_divided_by_257():
    grey = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    got = decode.pixels(encoded(grey))
    assert np.array_equal(got[..., 0], np.round(grey / 257).astype(np.uint8))
    assert np.array_equal(got[..., 0], got[..., 2])


def test_16_bit_grey_with_a_transparent_level():
    grey = np.array([[0, 1000], [30000, 65535]], np.uint16)
    got = decode.pixels(encoded(Image.fromarray(grey), transparency=1000))
    assert got[..., 0].tolist() == [[0, 255], [117, 255]]


def test_one_bit_and_eight_bit_grey():
    assert decode.pixels(encoded(Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1"))).tolist() == [
        [[0, 0, 0], [255, 255, 255]]
    ]
    assert decode.pixels(encoded(np.full((2, 2), 77, np.uint8))).tolist() == [[[77] * 3] * 2] * 2
    assert decode.pixels(encoded(np.full((8, 8), 77, np.uint8), "JPEG"))[0, 0].tolist() == [77] * 3


def test_alpha_lies_over_white():
    rgba = np.array([[[200, 0, 0, 0], [200, 0, 0, 255], [200, 0, 100, 128]]], np.uint8)
    got = decode.pixels(encoded(rgba))
    assert got[0, :2].tolist() == [[255, 255, 255], [200, 0, 0]]
    assert np.abs(got[0, 2].astype(int) - [227, 127, 177]).max() <= 1
    webp = decode.pixels(encoded(rgba, "WEBP", lossless=True, exact=True))
    assert np.array_equal(webp, got)


def test_grey_with_alpha_lies_over_white():
    got = decode.pixels(encoded(Image.fromarray(np.array([[[40, 0], [40, 255]]], np.uint8), "LA")))
    assert got.tolist() == [[[255] * 3, [40] * 3]]


def test_palette_with_transparency():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    assert decode.pixels(encoded(image)).tolist() == [[[10, 20, 30], [40, 50, 60], [70, 80, 90]]]
    assert decode.pixels(encoded(image, transparency=1)).tolist() == [[[10, 20, 30], [255] * 3, [70, 80, 90]]]
    partly = decode.pixels(encoded(image, transparency=bytes([0, 255, 255])))
    assert partly.tolist() == [[[255] * 3, [40, 50, 60], [70, 80, 90]]]


def swapped_profile() -> bytes:
    """An sRGB profile whose red and blue primaries are exchanged, under another name."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for at in range(132, 132 + 12 * struct.unpack(">I", profile[128:132])[0], 12):
        tag = bytes(profile[at : at + 4])
        if tag in (b"rXYZ", b"bXYZ"):
            profile[at : at + 4] = b"bXYZ" if tag == b"rXYZ" else b"rXYZ"
        elif tag == b"desc":
            start, length = struct.unpack(">II", profile[at + 4 : at + 12])
            name = bytes(profile[start : start + length])
            profile[start : start + length] = name.replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))
    return bytes(profile)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_colour_profile_is_turned_into_srgb(kind):
    plain = np.zeros((16, 16, 3), np.uint8) + np.array([230, 20, 40], np.uint8)
    got = decode.pixels(encoded(plain, kind, icc_profile=swapped_profile())).mean((0, 1))
    assert got[2] > 200 > 90 > got[0]


def test_a_colour_profile_of_a_palette_too():
    image = Image.fromarray(np.zeros((2, 2), np.uint8), "P")
    image.putpalette([230, 20, 40])
    got = decode.pixels(encoded(image, icc_profile=swapped_profile())).mean((0, 1))
    assert got[2] > 200 > 90 > got[0]


@pytest.mark.parametrize("profile", [b"rubbish", ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()])
def test_srgb_and_broken_profiles_change_nothing(profile):
    assert np.array_equal(decode.pixels(encoded(noise(4, 4), icc_profile=profile)), noise(4, 4))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_gives_its_first_frame(kind):
    first, second = noise(8, 8, seed=1), noise(8, 8, seed=2)
    data = encoded(first, kind, save_all=True, append_images=[Image.fromarray(second)], lossless=True)
    assert np.array_equal(decode.pixels(data), first)


def test_a_broken_apng_is_undecodable():
    data = encoded(noise(8, 8, seed=1), save_all=True, append_images=[Image.fromarray(noise(8, 8, seed=2))])
    shuffled = [
        (kind, struct.pack(">I", 9) + body[4:]) if kind == b"fcTL" else (kind, body) for kind, body in chunks(data)
    ]
    with pytest.raises(Undecodable, match="broken image"):
        decode.pixels(png_of(shuffled))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_file_is_undecodable(kind):
    data = encoded(noise(64, 64), kind)
    for length in (len(data) // 2, 40):
        with pytest.raises(Undecodable, match=r"^(truncated|broken) image$"):
            decode.pixels(data[:length])


def test_flipped_bytes_give_a_picture_or_a_reason():
    reasons = set()
    for kind in ("PNG", "JPEG", "WEBP"):
        whole = encoded(noise(32, 32), kind)
        for seed in range(40):
            rng = np.random.default_rng(seed)
            damaged = bytearray(whole)
            for _ in range(4):
                damaged[rng.integers(len(damaged))] = rng.integers(256)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    assert decode.pixels(bytes(damaged)).dtype == np.uint8
                except Undecodable as error:
                    reasons.add(str(error))
    assert {"broken image"} <= reasons <= {"broken image", "truncated image", IMAGES, TOO_LARGE}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"<html>404</html>", "not an image"),
        (encoded(noise(4, 4), "GIF"), "not an image"),
        (encoded(noise(4, 4), "TIFF"), "not an image"),
        (b"\x89PNG\r\n\x1a\n", "broken image"),
        (b"\xff\xd8\xff", "broken image"),
    ],
)
def test_what_is_no_image_is_named(data, reason):
    with pytest.raises(Undecodable, match=reason):
        decode.pixels(data)


def test_a_huge_picture_is_refused_by_its_header():
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    bomb = png_of([(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")])
    with pytest.raises(Undecodable, match="too many pixels"):
        headers.opened(io.BytesIO(bomb))
    with pytest.raises(Undecodable, match="too many pixels"):
        decode.pixels(bomb)


def test_a_sliver_is_refused_before_it_is_enlarged():
    with pytest.raises(Undecodable, match="too narrow"):
        decode.picture(np.zeros((1, 60_000, 3), np.uint8), settings(resolution=64), 0, KEY)


@pytest.mark.parametrize("shape", [(16, 16), (20, 31), (31, 20), (64, 48), (9, 7), (1, 1)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "area", "lanczos"])
def test_every_size_becomes_the_square(shape, interpolation):
    got = decode.picture(np.full((*shape, 3), 90, np.uint8), settings(interpolation=interpolation), 0, KEY)
    assert got.shape == (3, 16, 16)
    assert got.unique().tolist() == [90]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area", "lanczos"])
def test_resize_agrees_with_pillow(interpolation):
    pillow = {"bilinear": 2, "bicubic": 3, "area": 4, "lanczos": 1}[interpolation]
    picture = noise(64, 64)
    want = np.asarray(Image.fromarray(picture).resize((24, 24), pillow)).astype(int)
    got = decode.picture(picture, settings(resolution=24, interpolation=interpolation), 0, KEY)
    assert np.abs(got.permute(1, 2, 0).numpy().astype(int) - want).max() <= 1


def test_centre_crop_takes_the_middle():
    picture = np.zeros((16, 48, 3), np.uint8)
    picture[:, 16:32] = 200
    assert decode.picture(picture, settings(), 0, KEY).unique().tolist() == [200]


def test_random_crops_follow_the_key_and_reach_both_ends():
    picture = np.repeat(np.arange(24, dtype=np.uint8)[None, :, None], 16, axis=0).repeat(3, axis=2)
    chosen = settings(crop="random")
    lefts = [int(decode.picture(picture, chosen, 0, np.array([i, 0, 0]))[0, 0, 0]) for i in range(200)]
    assert set(lefts) == set(range(9))
    assert lefts == [int(decode.picture(picture, chosen, 0, np.array([i, 0, 0]))[0, 0, 0]) for i in range(200)]
    other = [int(decode.picture(picture, chosen, 0, np.array([i, 1, 0]))[0, 0, 0]) for i in range(200)]
    assert lefts != other


def test_half_of_the_pictures_are_flipped_before_the_crop():
    picture = np.repeat(np.arange(24, dtype=np.uint8)[None, :, None], 16, axis=0).repeat(3, axis=2)
    firsts = [
        decode.picture(picture, settings(random_flip=True, crop="random"), 0, np.array([i, 0, 0]))[0, 0].tolist()
        for i in range(200)
    ]
    plain = [
        decode.picture(picture, settings(crop="random"), 0, np.array([i, 0, 0]))[0, 0].tolist() for i in range(200)
    ]
    mirrored = [a != b for a, b in zip(firsts, plain, strict=True)]
    assert 70 < sum(mirrored) < 130
    # Flipped first: the crop's corner counts from the mirrored picture's left.
    assert all(a == [23 - v for v in b] for a, b, m in zip(firsts, plain, mirrored, strict=True) if m)


@pytest.mark.parametrize(
    ("size", "shorter_px", "factor"),
    [
        ((64, 64), 32, 2),  # the whole resize
        ((64, 96), 8, 8),
        ((66, 64), 32, 2),
        ((65, 64), 32, 1),  # does not divide: a scaled picture would be shifted
        ((96, 96), 32, 1),  # would leave 1.5 to the filter
        ((128, 160), 32, 4),
        ((256, 256), 60, 2),  # leaves 2.1 to the filter
        ((64, 64), 0, 1),
        ((16, 16), 32, 1),
    ],
)
def test_large_jpegs_are_decoded_smaller_only_where_it_is_exact(size, shorter_px, factor):
    data = encoded(smooth(size[1], size[0]), "JPEG", quality=95)
    got = decode.pixels(data, shorter_px)
    assert got.shape == (size[1] // factor, size[0] // factor, 3)


def test_a_jpeg_at_half_its_size_looks_like_the_filtered_one():
    data = encoded(smooth(128, 128), "JPEG", quality=95)
    small = decode.picture(data, settings(resolution=64), 0, KEY).float()
    whole = decode.picture(decode.pixels(data), settings(resolution=64), 0, KEY).float()
    assert (small - whole).abs().mean() < 1.0


def test_nearest_takes_pixels_of_the_whole_jpeg():
    data = encoded(noise(64, 64), "JPEG", quality=95)
    got = decode.picture(data, settings(resolution=32, interpolation="nearest"), 0, KEY)
    want = decode.picture(decode.pixels(data), settings(resolution=32, interpolation="nearest"), 0, KEY)
    assert got.equal(want)
