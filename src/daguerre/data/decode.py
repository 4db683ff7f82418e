"""From an encoded picture to the square of pixels that is trained on: decode, orient, colours, resize, flip, crop.

JPEG, PNG and WebP only, whatever the file is called. What a picture means is settled here once: 8-bit sRGB, upright,
transparency over white, the first frame of an animation. Which pictures there are is the sources' business; scaling
to [-1, 1] is the family's.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageCms
from torch import Tensor
from torch.nn import functional

from daguerre import keys
from daguerre.data.headers import BROKEN, PIXEL_LIMIT, Undecodable, opened
from daguerre.data.settings import SourceSettings

_TORCH_FILTERS = frozenset({"bilinear", "bicubic"})  # the ones torch has with antialias for uint8: 2-3 times as fast
_PILLOW_FILTERS: Mapping[str, Image.Resampling] = MappingProxyType(
    {"nearest": Image.Resampling.NEAREST, "area": Image.Resampling.BOX, "lanczos": Image.Resampling.LANCZOS}
)


def picture(image: bytes | np.ndarray, settings: SourceSettings, seed: int, key: np.ndarray) -> Tensor:
    """The training picture of a record: uint8 [3, resolution, resolution], RGB.

    `image` is an encoded file, or pixels [H, W, 3] uint8. The shorter side is resized to `resolution`; flip and random
    crop are functions of the seed and `key` (int64 [3]: sample id, epoch, repeat) alone. Raises `Undecodable`.
    """
    pixels_HWC = image if isinstance(image, np.ndarray) else pixels(image, _shorter_px(settings))
    assert pixels_HWC.dtype == np.uint8, pixels_HWC.dtype
    assert pixels_HWC.ndim == 3, pixels_HWC.shape
    assert pixels_HWC.shape[2] == 3, pixels_HWC.shape
    pixels_CHW = _resize(pixels_HWC, settings.resolution, settings.interpolation)
    if settings.random_flip and _uniforms(seed, "flip", key, 1)[0] < 0.5:
        pixels_CHW = pixels_CHW.flip(2)
    top, left = _corner(pixels_CHW, settings, seed, key)
    side = settings.resolution
    return pixels_CHW[:, top : top + side, left : left + side].contiguous()


def pixels(encoded: bytes, shorter_px: int = 0) -> np.ndarray:
    """The whole picture of a file, upright: [H, W, 3] uint8 sRGB. Raises `Undecodable`.

    Where its shorter side will be resized to `shorter_px`, a much larger JPEG comes at 1/2, 1/4 or 1/8 of its size.
    """
    try:
        image = opened(io.BytesIO(encoded))
        return np.ascontiguousarray(_upright(_colours(image, encoded, shorter_px), image))
    except BROKEN as error:
        cut = "truncated" in str(error).lower()
        raise Undecodable("truncated image" if cut else "broken image") from error


def _shorter_px(settings: SourceSettings) -> int:
    """0 (no shortcut) for the filter that averages nothing: a JPEG at half its size is an average already."""
    return 0 if settings.interpolation == "nearest" else settings.resolution


def _colours(image: Image.Image, encoded: bytes, shorter_px: int) -> np.ndarray:
    """[H, W, 3] uint8 sRGB, as stored (not yet upright)."""
    profile = image.info.get("icc_profile")
    fast = _fast_jpeg(encoded, image, shorter_px) if image.format == "JPEG" and image.mode == "RGB" else None
    if fast is not None and not profile:
        return fast
    flat = _flat(image) if fast is None else Image.fromarray(fast)
    transform = _to_srgb(profile, flat.mode) if profile else None
    return np.array(flat.convert("RGB") if transform is None else ImageCms.applyTransform(flat, transform))


def _fast_jpeg(encoded: bytes, image: Image.Image, shorter_px: int) -> np.ndarray | None:
    """The picture by libjpeg-turbo's own interface; None where it refuses, and Pillow has the last word."""
    factor = _dct_factor(image.width, image.height, shorter_px)
    smallest = {"min_width": image.width // factor, "min_height": image.height // factor, "min_factor": factor}
    try:
        return simplejpeg.decode_jpeg(encoded, colorspace="RGB", **smallest)
    except ValueError:
        return None


def _dct_factor(width_px: int, height_px: int, shorter_px: int) -> int:
    """How much smaller a JPEG is decoded: 8, 4 or 2 where that divides both sides and is the whole resize, or leaves
    another factor of 2 to the filter, so that it is still the filter that decides how the picture looks."""
    for factor in (8, 4, 2) if shorter_px else ():
        left_px = min(width_px, height_px) // factor
        whole = width_px % factor == height_px % factor == 0
        if whole and (left_px == shorter_px or left_px >= 2 * shorter_px):
            return factor
    return 1


def _flat(image: Image.Image) -> Image.Image:
    """Pixels of 8 bits without palette or alpha: mode L, RGB or CMYK."""
    image.load()
    if image.mode.startswith("I"):
        return _eight_bits(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        over = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        return over.convert("L" if image.mode in ("L", "LA") else "RGB")  # a grey picture's profile is one for grey
    return image.convert({"P": "RGB", "1": "L"}.get(image.mode, image.mode))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits to 8: 65535 = 255 x 257. Pillow's own conversion saturates."""
    grey = np.asarray(image).astype(np.int64)
    if isinstance(transparent := image.info.get("transparency"), int):
        grey = np.where(grey == transparent, 65535, grey)
    return Image.fromarray(((grey + 128) // 257).clip(0, 255).astype(np.uint8))


_NO_PROFILE: tuple[type[Exception], ...] = (*BROKEN, ImageCms.PyCMSError)


@lru_cache(maxsize=32)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The way from a profile's colours to sRGB; None for sRGB itself, and for a profile that is broken or for
    another kind of picture: such a picture is taken as if it had none."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if ImageCms.getProfileDescription(source).startswith("sRGB"):
            return None
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except _NO_PROFILE:
        return None


def _upright(pixels_HWC: np.ndarray, image: Image.Image) -> np.ndarray:
    """Turned as EXIF's orientation (tag 274) says: 5 to 8 are transposed first, then flipped."""
    orientation = _orientation(image)
    if orientation >= 5:
        pixels_HWC = pixels_HWC.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels_HWC = pixels_HWC[::-1]
    if orientation in (2, 3, 6, 7):
        pixels_HWC = pixels_HWC[:, ::-1]
    return pixels_HWC


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(274, 1)
    except BROKEN:
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
