"""Each oddity of an image file has one defined result; what cannot be decoded has one reason."""

import io
import struct
import warnings
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from daguerre.data.images import decode, headers
from daguerre.data.images.decode import Undecodable
from daguerre.data.plan.buckets import Bucket
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


def decoded(data, **given):
    """The whole image of a file."""
    return decode.sized(data, settings(**given), None)[0]


def framed(image, chosen, seed=0, key=KEY, bucket=None):
    """Frame and pixels of the image in `bucket`, or in the square of the settings' resolution."""
    bucket = bucket or Bucket(chosen.resolution, chosen.resolution)
    frames, images = decode.cut({"image": image}, chosen, bucket, seed, key)
    return SimpleNamespace(sizes=frames["image"].sizes, pixels_CHW=images["image"])


def cut(image, chosen, seed=0, key=KEY, bucket=None):
    """The pixels of `framed`."""
    return framed(image, chosen, seed, key, bucket).pixels_CHW


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
    levels_HWC = noise(20, 30)
    assert np.array_equal(decoded(encoded(levels_HWC, kind, lossless=True)), levels_HWC)


def test_jpeg_equals_pillows_decoder():
    data = encoded(smooth(60, 80), "JPEG", quality=92)
    assert np.abs(decoded(data).astype(int) - np.asarray(Image.open(io.BytesIO(data))).astype(int)).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation_is_applied_once(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(smooth(24, 40), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as stored:
        upright = np.asarray(ImageOps.exif_transpose(stored).convert("RGB")).astype(int)
    got = decoded(data).astype(int)
    assert got.shape == upright.shape == ((40, 24, 3) if orientation >= 5 else (24, 40, 3))
    assert np.abs(got - upright).max() <= 2


@pytest.mark.parametrize("value", [0, 9, 77])
def test_an_impossible_orientation_is_upright(value):
    exif = Image.Exif()
    exif[0x0112] = value
    assert decoded(encoded(noise(8, 12), exif=exif)).shape == (8, 12, 3)


def test_a_broken_exif_block_leaves_the_image():
    data = encoded(noise(8, 12), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decoded(data).shape == (8, 12, 3)


def test_cmyk_jpeg_is_converted():
    inks = np.zeros((16, 16, 4), np.uint8)
    inks[..., 0] = 255  # cyan ink only
    red, green, blue = decoded(encoded(Image.fromarray(inks, "CMYK"), "JPEG", quality=95)).mean((0, 1))
    assert red < 10
    assert min(green, blue) > 245


def test_16_bit_grey_is_divided_by_257():
    grey = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    got = decoded(encoded(grey))
    assert np.array_equal(got[..., 0], np.round(grey / 257).astype(np.uint8))
    assert np.array_equal(got[..., 0], got[..., 2])


def test_16_bit_grey_with_a_transparent_level():
    grey = np.array([[0, 1000], [30000, 65535]], np.uint16)
    got = decoded(encoded(Image.fromarray(grey), transparency=1000))
    assert got[..., 0].tolist() == [[0, 255], [117, 255]]


def test_one_bit_and_eight_bit_grey():
    assert decoded(encoded(Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1"))).tolist() == [
        [[0, 0, 0], [255, 255, 255]]
    ]
    assert decoded(encoded(np.full((2, 2), 77, np.uint8))).tolist() == [[[77] * 3] * 2] * 2
    assert decoded(encoded(np.full((8, 8), 77, np.uint8), "JPEG"))[0, 0].tolist() == [77] * 3


def test_alpha_lies_over_white():
    rgba = np.array([[[200, 0, 0, 0], [200, 0, 0, 255], [200, 0, 100, 128]]], np.uint8)
    got = decoded(encoded(rgba))
    assert got[0, :2].tolist() == [[255, 255, 255], [200, 0, 0]]
    assert np.abs(got[0, 2].astype(int) - [227, 127, 177]).max() <= 1
    webp = decoded(encoded(rgba, "WEBP", lossless=True, exact=True))
    assert np.array_equal(webp, got)


def test_grey_with_alpha_lies_over_white():
    got = decoded(encoded(Image.fromarray(np.array([[[40, 0], [40, 255]]], np.uint8), "LA")))
    assert got.tolist() == [[[255] * 3, [40] * 3]]


def test_palette_with_transparency():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    assert decoded(encoded(image)).tolist() == [[[10, 20, 30], [40, 50, 60], [70, 80, 90]]]
    assert decoded(encoded(image, transparency=1)).tolist() == [[[10, 20, 30], [255] * 3, [70, 80, 90]]]
    partly = decoded(encoded(image, transparency=bytes([0, 255, 255])))
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
    got = decoded(encoded(plain, kind, icc_profile=swapped_profile())).mean((0, 1))
    assert got[2] > 200 > 90 > got[0]


def test_a_colour_profile_of_a_palette_too():
    image = Image.fromarray(np.zeros((2, 2), np.uint8), "P")
    image.putpalette([230, 20, 40])
    got = decoded(encoded(image, icc_profile=swapped_profile())).mean((0, 1))
    assert got[2] > 200 > 90 > got[0]


def srgb_with(curve: bytes, name: str) -> bytes:
    """An sRGB profile with another tone curve and another name; the three colours share the curve."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    tags = struct.unpack(">I", profile[128:132])[0]
    table, data = bytearray(), bytearray()
    start = 132 + 12 * tags
    named = name.encode("utf-16-be")
    described = b"mluc" + bytes(4) + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(named), 28) + named
    for at in range(132, start, 12):
        tag, (offset, length) = profile[at : at + 4], struct.unpack(">II", profile[at + 4 : at + 12])
        own = curve if tag.endswith(b"TRC") else described if tag == b"desc" else profile[offset : offset + length]
        table += tag + struct.pack(">II", start + len(data), len(own))
        data += own + bytes(-len(own) % 4)
    whole = profile[4:132] + table + data
    return struct.pack(">I", len(whole) + 4) + whole


LINEAR = b"para" + bytes(4) + struct.pack(">HHi", 0, 0, 1 << 16)
TABLE = b"curv" + bytes(4) + struct.pack(">I1024H", 1024, *(
    round(65535 * (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4)) for x in np.linspace(0, 1, 1024)
))  # fmt: skip


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_profile_counts_by_its_numbers_and_not_by_its_name(kind):
    grey = Image.new("RGB", (8, 8), (50, 50, 50))
    assert np.abs(decoded(encoded(grey, kind, icc_profile=srgb_with(LINEAR, "sRGB-lin"))).astype(int) - 122).max() <= 1
    table = srgb_with(TABLE, "of a camera")
    assert np.array_equal(decoded(encoded(noise(4, 4), icc_profile=table)), noise(4, 4))


def test_a_grey_image_is_taken_by_its_profile_too():
    profile = bytearray(srgb_with(LINEAR, "sRGB grey"))
    profile[16:20] = b"GRAY"
    at = profile.index(b"rTRC", 128)
    profile[at : at + 4] = b"kTRC"
    got = decoded(encoded(Image.new("L", (8, 8), 50), icc_profile=bytes(profile)))
    assert np.abs(got.astype(int) - 122).max() <= 1


@pytest.mark.parametrize("profile", [b"rubbish", ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()])
def test_srgb_and_broken_profiles_change_nothing(profile):
    assert np.array_equal(decoded(encoded(noise(4, 4), icc_profile=profile)), noise(4, 4))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_gives_its_first_frame(kind):
    first, second = noise(8, 8, seed=1), noise(8, 8, seed=2)
    data = encoded(first, kind, save_all=True, append_images=[Image.fromarray(second)], lossless=True)
    assert np.array_equal(decoded(data), first)


def test_a_broken_apng_is_undecodable():
    data = encoded(noise(8, 8, seed=1), save_all=True, append_images=[Image.fromarray(noise(8, 8, seed=2))])
    shuffled = [
        (kind, struct.pack(">I", 9) + body[4:]) if kind == b"fcTL" else (kind, body) for kind, body in chunks(data)
    ]
    with pytest.raises(Undecodable, match="broken image"):
        decoded(png_of(shuffled))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_file_is_undecodable(kind):
    data = encoded(noise(64, 64), kind)
    for length in (len(data) // 2, 40):
        with pytest.raises(Undecodable, match=r"^(truncated|broken) image$"):
            decoded(data[:length])


def test_flipped_bytes_give_an_image_or_a_reason():
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
                    assert decoded(bytes(damaged)).dtype == np.uint8
                except Undecodable as error:
                    reasons.add(str(error))
    assert {"broken image"} <= reasons <= {"broken image", "truncated image", IMAGES, TOO_LARGE}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_files_of_every_format_end_as_an_image_or_a_reason(kind):
    every = ("jpeg", "png", "webp", "gif", "bmp", "tiff")
    whole = encoded(smooth(24, 32), kind, **({"compression": "tiff_lzw"} if kind == "TIFF" else {}))
    reasons = set()
    for seed in range(150):
        rng = np.random.default_rng(seed)
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 5)):
            damaged[rng.integers(rng.choice([40, len(damaged)]))] = rng.integers(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                shape = decoded(bytes(damaged), formats=every).shape
                assert headers.upright_size(io.BytesIO(damaged), every) == shape[:2]
            except Undecodable as error:
                reasons.add(str(error))
    assert "broken image" in reasons or kind == "BMP"
    assert all(len(reason) < 80 for reason in reasons)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"<html>404</html>", "not an image"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", r"^not an image \(JPEG, PNG and WebP can be read\)$"),
        (encoded(noise(4, 4), "GIF"), r"^a GIF file, which data.formats does not allow \(jpeg, png, webp\)$"),
        (encoded(noise(4, 4), "TIFF"), r"^a TIFF file, which data.formats does not allow"),
        (encoded(noise(4, 4), "BMP"), r"^a BMP file, which data.formats does not allow"),
        (b"\x89PNG\r\n\x1a\n", "broken image"),
        (b"\xff\xd8\xff", "broken image"),
    ],
)
def test_what_is_no_image_is_named(data, reason):
    with pytest.raises(Undecodable, match=reason):
        decoded(data)


def test_a_huge_image_is_refused_by_its_header():
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    bomb = png_of([(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")])
    with pytest.raises(Undecodable, match="too many pixels"):
        headers.opened(io.BytesIO(bomb), headers.USUAL)
    with pytest.raises(Undecodable, match="too many pixels"):
        decoded(bomb)


def test_a_sliver_is_refused_before_it_is_enlarged():
    with pytest.raises(Undecodable, match="too narrow"):
        cut(np.zeros((1, 60_000, 3), np.uint8), settings(resolution=64), 0, KEY)


@pytest.mark.parametrize("shape", [(16, 16), (20, 31), (31, 20), (64, 48), (9, 7), (1, 1)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "area", "lanczos"])
def test_every_size_becomes_the_square(shape, interpolation):
    got = cut(np.full((*shape, 3), 90, np.uint8), settings(interpolation=interpolation), 0, KEY)
    assert got.shape == (3, 16, 16)
    assert got.unique().tolist() == [90]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area", "lanczos"])
def test_resize_agrees_with_pillow(interpolation):
    pillow = {"bilinear": 2, "bicubic": 3, "area": 4, "lanczos": 1}[interpolation]
    levels_HWC = noise(64, 64)
    want = np.asarray(Image.fromarray(levels_HWC).resize((24, 24), pillow)).astype(int)
    got = cut(levels_HWC, settings(resolution=24, interpolation=interpolation), 0, KEY)
    assert np.abs(got.permute(1, 2, 0).numpy().astype(int) - want).max() <= 1


def test_centre_crop_takes_the_middle():
    levels_HWC = np.zeros((16, 48, 3), np.uint8)
    levels_HWC[:, 16:32] = 200
    assert cut(levels_HWC, settings(), 0, KEY).unique().tolist() == [200]


def test_random_crops_follow_the_key_and_reach_both_ends():
    levels_HWC = np.repeat(np.arange(24, dtype=np.uint8)[None, :, None], 16, axis=0).repeat(3, axis=2)
    chosen = settings(crop="random")
    lefts = [int(cut(levels_HWC, chosen, 0, np.array([i, 0, 0]))[0, 0, 0]) for i in range(200)]
    assert set(lefts) == set(range(9))
    assert lefts == [int(cut(levels_HWC, chosen, 0, np.array([i, 0, 0]))[0, 0, 0]) for i in range(200)]
    other = [int(cut(levels_HWC, chosen, 0, np.array([i, 1, 0]))[0, 0, 0]) for i in range(200)]
    assert lefts != other


def test_half_of_the_images_are_flipped_before_the_crop():
    levels_HWC = np.repeat(np.arange(24, dtype=np.uint8)[None, :, None], 16, axis=0).repeat(3, axis=2)
    firsts = [
        cut(levels_HWC, settings(random_flip=True, crop="random"), 0, np.array([i, 0, 0]))[0, 0].tolist()
        for i in range(200)
    ]
    plain = [cut(levels_HWC, settings(crop="random"), 0, np.array([i, 0, 0]))[0, 0].tolist() for i in range(200)]
    mirrored = [a != b for a, b in zip(firsts, plain, strict=True)]
    assert 70 < sum(mirrored) < 130
    # Flipped first: the crop's corner counts from the mirrored image's left.
    assert all(a == [23 - v for v in b] for a, b, m in zip(firsts, plain, mirrored, strict=True) if m)


def test_only_the_formats_of_the_recipe_are_read():
    for kind, name in (("JPEG", "jpeg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp")):
        data = encoded(Image.fromarray(noise(8, 8)[..., 0]), kind)
        assert decoded(data, formats=(name,)).shape == (8, 8, 3)
        others = tuple({"jpeg", "png", "webp", "tiff"} - {name})
        with pytest.raises(Undecodable, match=r"which data\.formats does not allow"):
            decoded(data, formats=others)
    with pytest.raises(Undecodable, match=r"^not an image \(PNG can be read\)$"):
        decoded(b"words", formats=("png",))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK", "1"])
def test_tiff_where_it_is_allowed(mode):
    image = Image.fromarray(smooth(12, 18)).convert(mode)
    want = np.asarray(image.convert("RGB"))
    assert np.array_equal(decoded(encoded(image, "TIFF"), formats=("tiff",)), want)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_tiff_is_turned_once(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data, levels_HWC = encoded(noise(6, 9), "TIFF", exif=exif), Image.fromarray(noise(6, 9))
    levels_HWC.getexif()[0x0112] = orientation
    want = np.asarray(ImageOps.exif_transpose(levels_HWC))
    assert np.array_equal(decoded(data, formats=("tiff",)), want)
    assert headers.upright_size(io.BytesIO(data), ("tiff",)) == want.shape[:2]


def tiff_of(samples: np.ndarray, order: str, photometric: int) -> bytes:
    """A one-line TIFF of 16-bit samples [W, C]; Pillow itself writes few kinds of them."""
    width, channels = samples.shape
    body = samples.astype(order + "u2").tobytes()
    bits = struct.pack(order + "3H", 16, 16, 16)
    tags = [
        (256, 4, 1, width),
        (257, 4, 1, 1),
        (258, 4, 1, 16),
        (259, 4, 1, 1),
        (262, 4, 1, photometric),
        (273, 4, 1, 14),
    ]
    tags += [(277, 4, 1, channels), (278, 4, 1, 1), (279, 4, 1, len(body))]
    if channels == 3:
        tags[2] = (258, 3, 3, 8)
    entries = b"".join(struct.pack(order + "HHII", *tag) for tag in tags)
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 14 + len(body))
    return head + bits + body + struct.pack(order + "H", len(tags)) + entries + struct.pack(order + "I", 0)


@pytest.mark.parametrize(("order", "photometric", "want"), [("<", 1, 0), (">", 1, 0), ("<", 0, 255)])
def test_16_bit_grey_tiff_is_divided_by_257_too(order, photometric, want):
    data = tiff_of(np.array([[0], [257], [30000], [65535]]), order, photometric)
    assert decoded(data, formats=("tiff",))[0, :, 0].tolist() == [abs(want - v) for v in (0, 1, 117, 255)]


def test_16_bit_colour_keeps_its_high_bytes():
    colours = np.array([[0, 257, 65535], [30000, 65280, 255]])
    got = decoded(tiff_of(colours, "<", 2), formats=("tiff",))[0].astype(int)
    assert np.abs(got - colours / 257).max() <= 1


def test_a_tiff_that_pillow_does_not_know_says_so():
    with pytest.raises(Undecodable, match=r"^a TIFF with pixels of a kind that is not read$"):
        decoded(tiff_of(np.zeros((4, 1)), ">", 0), formats=("tiff",))


@pytest.mark.parametrize("mode", ["F", "I"])
def test_colours_of_more_than_16_bits_are_refused(mode):
    with pytest.raises(Undecodable, match=r"^colours of more than 16 bits$"):
        decoded(encoded(Image.new(mode, (4, 4)), "TIFF"), formats=("tiff",))


def test_an_animated_gif_gives_its_first_frame():
    frames = [Image.fromarray(noise(8, 8, seed=s)).quantize(256) for s in (1, 2)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(decoded(data, formats=("gif",)), np.asarray(frames[0].convert("RGB")))


def test_transparent_gif_lies_over_the_set_colour():
    image = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    data = encoded(image, "GIF", transparency=1)
    assert decoded(data, formats=("gif",), alpha_colour="#0000ff").tolist() == [[[10, 20, 30], [0, 0, 255]]]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L", "I;16"])
def test_alpha_lies_over_any_colour_that_is_set(mode):
    options = {}
    if mode in ("RGBA", "LA"):
        image = Image.fromarray(np.array([[[50, 50, 50, 0], [50, 50, 50, 255], [50, 50, 50, 51]]], np.uint8)).convert(
            mode
        )
    elif mode == "I;16":
        image, options = Image.fromarray(np.array([[9, 50 * 257]], np.uint16)), {"transparency": 9}
    else:
        image = Image.fromarray(np.array([[[9] * 3, [50] * 3]], np.uint8)).convert("L").convert(mode)
        index = image.getpixel((0, 0))
        options = {"transparency": index}
    got = decoded(encoded(image, **options), alpha_colour="#ff8000")[0].astype(int)
    assert got[:2].tolist() == [[255, 128, 0], [50, 50, 50]]
    if mode in ("RGBA", "LA"):  # a fifth of 50, four fifths of the colour
        assert np.abs(got[2] - [214, 112.4, 10]).max() <= 1


def test_the_colour_under_alpha_is_srgb_whatever_profile_the_image_has():
    rgba = np.array([[[230, 20, 40, 0], [230, 20, 40, 255]]], np.uint8)
    clear, opaque = decoded(encoded(rgba, icc_profile=swapped_profile()), alpha_colour="#ff0000")[0].tolist()
    assert clear == [255, 0, 0]
    assert opaque[2] > 200 > 90 > opaque[0]


def test_a_grey_profile_of_a_grey_image_with_alpha():
    grey = Image.fromarray(np.array([[[100, 255], [100, 0]]], np.uint8), "LA")
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()  # not one for grey: ignored
    assert decoded(encoded(grey, icc_profile=lab), alpha_colour="#102030").tolist() == [[[100] * 3, [16, 32, 48]]]


SHAPES = [Bucket(16, 16), Bucket(16, 32), Bucket(40, 24), Bucket(8, 64)]


@pytest.mark.parametrize("bucket", SHAPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (20, 31), (31, 20), (64, 48), (9, 7), (1, 1), (40, 24)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "area", "lanczos"])
def test_every_size_becomes_its_bucket(shape, interpolation, bucket):
    chosen = settings(interpolation=interpolation, crop="random", random_flip=True)
    got = framed(np.full((*shape, 3), 90, np.uint8), chosen, bucket=bucket)
    assert got.pixels_CHW.shape == (3, bucket.height_px, bucket.width_px)
    assert got.pixels_CHW.unique().tolist() == [90]
    assert got.sizes.dtype == np.int32
    assert got.sizes[:2].tolist() == list(shape)
    assert got.sizes[4:].tolist() == [bucket.height_px, bucket.width_px]


def test_the_image_just_covers_its_bucket():
    chosen = settings(interpolation="bilinear")
    wide = np.repeat(np.linspace(0, 255, 80).astype(np.uint8)[None, :, None], 40, axis=0).repeat(3, axis=2)
    whole = cut(wide, chosen, bucket=Bucket(20, 40))  # the image's own shape: nothing is cut off
    assert int(whole[0, 0, 0]) <= 3
    assert int(whole[0, 0, -1]) >= 252
    middle = framed(wide, chosen, bucket=Bucket(20, 20))
    assert middle.sizes.tolist() == [40, 80, 0, 10, 20, 20]
    assert middle.pixels_CHW.equal(whole[:, :, 10:30])


@pytest.mark.parametrize("flip", [False, True])
def test_sizes_are_those_that_sdxl_is_conditioned_on(flip):
    """Original size upright; the corner in resized pixels, counted after the flip; the bucket."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(smooth(60, 90), "JPEG", exif=exif)  # 90 high and 60 wide once it is upright
    chosen = settings(crop="random", random_flip=flip)
    corners = set()
    for sample in range(60):
        got = framed(data, chosen, key=np.array([sample, 0, 0]), bucket=Bucket(20, 20))
        assert got.sizes.tolist()[:2] == [90, 60]
        assert got.sizes.tolist()[4:] == [20, 20]
        top, left = got.sizes[2:4].tolist()
        assert left == 0
        corners.add(top)
        resized = cut(decoded(data), chosen, key=np.array([sample, 0, 0]), bucket=Bucket(30, 20))
        assert got.pixels_CHW.equal(resized[:, top : top + 20])
    assert corners == set(range(11))


def test_the_corner_counts_in_the_flipped_image():
    ramp = np.repeat(np.arange(24, dtype=np.uint8)[None, :, None], 16, axis=0).repeat(3, axis=2)
    flips = set()
    for sample in range(40):
        got = framed(ramp, settings(crop="random", random_flip=True), key=np.array([sample, 0, 0]))
        row, left = got.pixels_CHW[0, 0].tolist(), int(got.sizes[3])
        flips.add(row[0] > row[-1])
        assert row == list(range(24))[:: -1 if row[0] > row[-1] else 1][left : left + 16]
    assert flips == {False, True}


def test_the_original_size_is_that_of_the_file_where_it_is_decoded_smaller():
    data = encoded(smooth(64, 128), "JPEG", quality=95)
    got = framed(data, settings(), bucket=Bucket(16, 32))
    assert got.sizes.tolist() == [64, 128, 0, 0, 16, 32]


def test_a_turned_jpeg_is_decoded_smaller_for_its_upright_shape():
    exif = Image.Exif()
    exif[0x0112] = 8
    data = encoded(smooth(64, 128), "JPEG", exif=exif)
    assert decode.sized(data, settings(), Bucket(64, 32))[0].shape == (64, 32, 3)
    assert decode.sized(data, settings(), Bucket(32, 64))[0].shape == (128, 64, 3)  # 64 wide is all it has


@pytest.mark.parametrize(
    ("size", "shorter_px", "factor"),
    [
        ((64, 64), 32, 2),  # the whole resize
        ((64, 96), 8, 8),
        ((66, 64), 32, 2),
        ((65, 64), 32, 1),  # does not divide: a scaled image would be shifted
        ((96, 96), 32, 1),  # would leave 1.5 to the filter
        ((128, 160), 32, 4),
        ((256, 256), 60, 2),  # leaves 2.1 to the filter
        ((64, 64), 0, 1),
        ((16, 16), 32, 1),
    ],
)
def test_large_jpegs_are_decoded_smaller_only_where_it_is_exact(size, shorter_px, factor):
    data = encoded(smooth(size[1], size[0]), "JPEG", quality=95)
    got = decode.sized(data, settings(), Bucket(shorter_px, shorter_px) if shorter_px else None)[0]
    assert got.shape == (size[1] // factor, size[0] // factor, 3)


def test_a_jpeg_at_half_its_size_looks_like_the_filtered_one():
    data = encoded(smooth(128, 128), "JPEG", quality=95)
    small = cut(data, settings(resolution=64), 0, KEY).float()
    whole = cut(decoded(data), settings(resolution=64), 0, KEY).float()
    assert (small - whole).abs().mean() < 1.0


@pytest.mark.parametrize(
    ("size", "bucket", "factor"),
    [
        ((128, 64), Bucket(32, 64), 2),  # width and height of the file; both sides are the whole resize
        ((128, 64), Bucket(32, 32), 2),  # the height is, and the width is cropped
        ((128, 128), Bucket(32, 64), 2),  # the width is, and the height is cropped
        ((132, 128), Bucket(32, 64), 1),  # would leave 66 / 64 to the filter
        ((256, 128), Bucket(16, 64), 4),
        ((512, 128), Bucket(32, 64), 4),
        ((512, 512), Bucket(64, 32), 8),
        ((512, 512), Bucket(72, 32), 2),  # a quarter leaves 128 / 72
    ],
)
def test_both_sides_of_the_bucket_decide_how_small_a_jpeg_is_decoded(size, bucket, factor):
    data = encoded(smooth(size[1], size[0]), "JPEG", quality=95)
    assert decode.sized(data, settings(), bucket)[0].shape == (size[1] // factor, size[0] // factor, 3)


def test_nearest_takes_pixels_of_the_whole_jpeg():
    data = encoded(noise(64, 64), "JPEG", quality=95)
    got = cut(data, settings(resolution=32, interpolation="nearest"), 0, KEY)
    want = cut(decoded(data), settings(resolution=32, interpolation="nearest"), 0, KEY)
    assert got.equal(want)
