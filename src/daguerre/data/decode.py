"""From an encoded picture to the square of pixels that is trained on: decode, orient, colours, resize, flip, crop.

JPEG, PNG and WebP only, whatever the file is called. What a picture means is settled here once: 8-bit sRGB, upright,
transparency over white, the first frame of an animation. Which pictures there are is the sources' business; scaling
to [-1, 1] is the family's.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageCms, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
from torch import Tensor
from torch.nn import functional

from daguerre import keys
from daguerre.data.settings import SourceSettings

PIXEL_LIMIT = 2**27
"""Largest picture that is decoded, in pixels (134 million; 400 MB as RGB): a small file can claim any size."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError, struct.error, zlib.error)
# What Pillow raises for damaged files; a broken animated PNG is a SyntaxError.

_TORCH_FILTERS = frozenset({"bilinear", "bicubic"})  # the ones torch has with antialias for uint8: 2-3 times as fast
_PILLOW_FILTERS: Mapping[str, Image.Resampling] = MappingProxyType(
    {"nearest": Image.Resampling.NEAREST, "area": Image.Resampling.BOX, "lanczos": Image.Resampling.LANCZOS}
)


class Undecodable(Exception):
    """The picture cannot be used, now or later. The text is the reason, the same for every file with that fault."""


def picture(image: bytes | np.ndarray, settings: SourceSettings, seed: int, key: np.ndarray) -> Tensor:
    """The training picture of a record: uint8 [3, resolution, resolution], RGB.

    `image` is an encoded file, or pixels [H, W, 3] uint8. The shorter side is resized to `resolution`; flip and random
    crop are functions of the seed and `key` (int64 [3]: sample id, epoch, repeat) alone. Raises `Undecodable`.
    """
    pixels_HWC = image if isinstance(image, np.ndarray) else pixels(image)
    assert pixels_HWC.dtype == np.uint8, pixels_HWC.dtype
    assert pixels_HWC.ndim == 3, pixels_HWC.shape
    assert pixels_HWC.shape[2] == 3, pixels_HWC.shape
    pixels_CHW = _resize(pixels_HWC, settings.resolution, settings.interpolation)
    if settings.random_flip and _uniforms(seed, "flip", key, 1)[0] < 0.5:
        pixels_CHW = pixels_CHW.flip(2)
    top, left = _corner(pixels_CHW, settings, seed, key)
    side = settings.resolution
    return pixels_CHW[:, top : top + side, left : left + side].contiguous()


def pixels(encoded: bytes) -> np.ndarray:
    """The whole picture of a file, upright: [H, W, 3] uint8 sRGB. Raises `Undecodable`."""
    try:
        opened = _open(encoded)
        _check_size(*opened.size)
        return np.ascontiguousarray(_upright(_colours(opened, encoded), opened))
    except _BROKEN as error:
        cut = "truncated" in str(error).lower()
        raise Undecodable("truncated image" if cut else "broken image") from error


def _open(encoded: bytes) -> Image.Image:
    """The file's header, read; no pixel yet.

    Not by `Image.open`: it tries formats by its own list, and has a size limit of its own.
    """
    file = io.BytesIO(encoded)
    if not encoded:
        raise Undecodable("empty file")
    if encoded.startswith(b"\xff\xd8\xff"):
        return JpegImagePlugin.JpegImageFile(file)
    if encoded.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile(file)
    if encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile(file)
    raise Undecodable("not an image (JPEG, PNG and WebP can be read)")


def _check_size(width_px: int, height_px: int) -> None:
    if width_px * height_px > PIXEL_LIMIT:
        raise Undecodable(f"too many pixels (limit {PIXEL_LIMIT})")


def _colours(opened: Image.Image, encoded: bytes) -> np.ndarray:
    """[H, W, 3] uint8 sRGB, as stored (not yet upright)."""
    profile = opened.info.get("icc_profile")
    if opened.mode.startswith("I"):
        # Pillow's own conversion of 16-bit grey saturates. 65535 = 255 x 257.
        grey = (np.asarray(opened).astype(np.int64) + 128) // 257
        return np.repeat(grey.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2)
    flat: Image.Image | np.ndarray | None = None
    if opened.format == "JPEG" and opened.mode == "RGB":
        flat = _fast_jpeg(encoded)
    if flat is None:
        flat = _over_white(opened) if opened.has_transparency_data else opened
    transform = _to_srgb(profile, "RGB" if isinstance(flat, np.ndarray) else flat.mode) if profile else None
    if transform is not None:
        stored = Image.fromarray(flat) if isinstance(flat, np.ndarray) else flat
        stored.load()
        flat = ImageCms.applyTransform(stored, transform)
    return flat if isinstance(flat, np.ndarray) else np.array(flat.convert("RGB"))


def _fast_jpeg(encoded: bytes) -> np.ndarray | None:
    """The picture by libjpeg-turbo's own interface; None where it refuses, and Pillow has the last word."""
    try:
        return simplejpeg.decode_jpeg(encoded, colorspace="RGB")
    except ValueError:
        return None


def _over_white(opened: Image.Image) -> Image.Image:
    layer = opened.convert("RGBA")
    flat = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return flat.convert("L") if opened.mode == "LA" else flat  # a grey picture's profile is one for grey


@lru_cache(maxsize=32)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The way from a profile's colours to sRGB; None for sRGB itself, and for a profile that is broken or for
    another kind of picture: such a picture is taken as if it had none."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if ImageCms.getProfileDescription(source).startswith("sRGB"):
            return None
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (*_BROKEN, ImageCms.PyCMSError):
        return None


def _upright(pixels_HWC: np.ndarray, opened: Image.Image) -> np.ndarray:
    """Turned as EXIF's orientation (tag 274) says: 5 to 8 are transposed first, then flipped."""
    orientation = _orientation(opened)
    if orientation >= 5:
        pixels_HWC = pixels_HWC.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels_HWC = pixels_HWC[::-1]
    if orientation in (2, 3, 6, 7):
        pixels_HWC = pixels_HWC[:, ::-1]
    return pixels_HWC


def _orientation(opened: Image.Image) -> int:
    try:
        orientation = opened.getexif().get(274, 1)
    except _BROKEN:
        return 1  # the picture itself is whole
    return orientation if orientation in range(1, 9) else 1


def _resize(pixels_HWC: np.ndarray, side_px: int, interpolation: str) -> Tensor:
    """[3, h, w] uint8 with the shorter of h and w equal to `side_px`, antialiased."""
    height, width = pixels_HWC.shape[:2]
    scale = side_px / min(height, width)
    size = max(side_px, round(height * scale)), max(side_px, round(width * scale))
    if size[0] * size[1] > PIXEL_LIMIT:
        raise Undecodable(f"too narrow: more than {PIXEL_LIMIT} pixels once its shorter side is at the resolution")
    if size == (height, width):
        return _channels_first(pixels_HWC)
    if interpolation in _TORCH_FILTERS:
        stored = _channels_first(pixels_HWC)[None]
        return functional.interpolate(stored, size, mode=interpolation, antialias=True)[0]
    resized = Image.fromarray(pixels_HWC).resize(size[::-1], _PILLOW_FILTERS[interpolation])
    return _channels_first(np.array(resized))


def _channels_first(pixels_HWC: np.ndarray) -> Tensor:
    return torch.from_numpy(np.require(pixels_HWC, requirements=["C", "W"])).permute(2, 0, 1)


def _corner(pixels_CHW: Tensor, settings: SourceSettings, seed: int, key: np.ndarray) -> tuple[int, int]:
    """Top and left of the crop; one of the two has no choice."""
    spare = [length - settings.resolution for length in pixels_CHW.shape[1:]]
    if settings.crop == "center":
        return spare[0] // 2, spare[1] // 2
    down, right = _uniforms(seed, "crop", key, 2)
    return int(down * (spare[0] + 1)), int(right * (spare[1] + 1))


def _uniforms(seed: int, purpose: str, key: np.ndarray, count: int) -> np.ndarray:
    sample_id, epoch, repeat = map(int, key)
    return keys.uniforms(seed, purpose, sample_id, epoch, repeat, count=count)
