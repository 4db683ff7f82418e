"""From encoded images to the pixels that are trained on: decode, orient, colours; then the frame: resize, flip, crop.

Every image becomes 8-bit sRGB, upright, with transparency over a set colour; of an animation, the first frame. Shapes
are chosen in `buckets.py`; families scale to [-1, 1].
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageCms
from torch import Tensor
from torch.nn import functional

from daguerre import keys
from daguerre.conditions import condition as conditions
from daguerre.conditions.condition import NO_IMAGES, ConditionSettings, Images
from daguerre.data.images import kinds, saliency
from daguerre.data.images.headers import (
    BROKEN,
    PIXEL_LIMIT,
    Undecodable,
    is_transparent,
    opened,
    orientation,
    upright_size,
)
from daguerre.data.images.kinds import KINDS
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SharedSettings
from daguerre.types import ALPHA, IMAGE, MASK, References

_TORCH_FILTERS = frozenset({"bilinear", "bicubic"})  # the ones torch has with antialias for uint8: 6-9 times as fast
_PILLOW_FILTERS: Mapping[str, Image.Resampling] = MappingProxyType(
    {
        "nearest": Image.Resampling.NEAREST,
        "area": Image.Resampling.BOX,
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
        "lanczos": Image.Resampling.LANCZOS,
    }
)
_GREY_8 = ((np.arange(65536) + 128) // 257).astype(np.uint8)  # 65535 = 255 x 257; Pillow's own conversion saturates
_MOVED_SHARE, _MOVED_BY = 0.3, 0.2
"""Share of smart crops that are moved from what the image shows, and how far in shares of its sides, as in Stability's
training of Stable Cascade."""
_TOKEN_PX = 16
_TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0


@dataclass(frozen=True)
class Frame:
    """Resize and crop of an image, chosen by its size (and for a smart crop by what it shows), so that a second image
    of the scene can follow exactly."""

    size: tuple[int, int]
    """Height and width of the upright image."""
    resized: tuple[int, int]
    """Height and width after the resize."""
    top: int
    left: int
    """Corner of the crop, in the resized and flipped image; below 0 by as much as is padded there."""
    height_px: int
    width_px: int
    """Of the crop."""
    mirror: bool
    """Flipped left to right."""
    interpolation: str
    """Filter of the resize."""

    @property
    def sizes(self) -> np.ndarray:
        """[6] int32, what SDXL is conditioned on: `size`, `top` and `left`, height and width of the crop."""
        return np.array([*self.size, self.top, self.left, self.height_px, self.width_px], dtype=np.int32)

    @property
    def shown(self) -> tuple[int, int, int, int]:
        """Top, left, height and width of the picture within what is padded with its reflection."""
        return -self.top, -self.left, *self.resized

    def apply(self, pixels_HWC: np.ndarray, interpolation: str | None = None) -> Tensor:
        """The crop of an image [H, W, C] uint8 of the whole scene, at any scale: [C, height_px, width_px] uint8, a view
        whose memory is laid out [H, W, C] and may be that of `pixels_HWC`."""
        assert pixels_HWC.dtype == np.uint8, pixels_HWC.dtype
        assert pixels_HWC.ndim == 3, pixels_HWC.shape
        resized_CHW = _resize(pixels_HWC, self.resized, interpolation or self.interpolation)
        # `left` counts in the flipped image, but only the crop is flipped.
        start = self.resized[1] - self.left - self.width_px if self.mirror else self.left
        if self.height_px > self.resized[0] or self.width_px > self.resized[1]:
            return self._padded(resized_CHW)
        crop_CHW = resized_CHW[:, self.top : self.top + self.height_px, start : start + self.width_px]
        return crop_CHW.flip(2) if self.mirror else crop_CHW

    def _padded(self, resized_CHW: Tensor) -> Tensor:
        """The picture in the middle of its reflection, without the edge itself unless it is as small as a token of a
        transformer, as diffusers pads references of FLUX.3."""
        mode = "reflect" if min(self.resized) > _TOKEN_PX else "symmetric"
        before = {0: -self.top, 1: -self.left}
        rows, columns = (
            np.pad(np.arange(own), (before[dim], whole - own - before[dim]), mode=mode)  # type: ignore[call-overload]
            for dim, (own, whole) in enumerate(zip(self.resized, (self.height_px, self.width_px), strict=True))
        )
        return resized_CHW.permute(1, 2, 0)[rows][:, columns].permute(2, 0, 1)


def frame(
    size: tuple[int, int],
    settings: SharedSettings,
    bucket: Bucket,
    seed: int,
    key: np.ndarray,
    middle: tuple[float, float] | None = None,
) -> Frame:
    """The frame of an image of this upright (height, width): resized until it just covers the bucket. A smart crop is
    around `middle`, vertical and horizontal in [0, 1].

    Flip and random crop are functions of the seed and `key` (int64 [3]: sample id, epoch, repeat) alone. `Undecodable`
    if the resized image would be too large.
    """
    spare = _spare(size, bucket)
    mirror = settings.random_flip and bool(_uniforms(seed, "flip", key, 1)[0] < 0.5)
    if settings.crop == "smart":
        assert middle is not None, "found in the pixels"
        top, left = _around(middle, spare, bucket, seed, key)
        corner = top, spare[1] - left if mirror else left
    else:
        corner = _corner(spare, settings, seed, key)
    return _framed(size, settings, bucket, corner, mirror)


def frames(size: tuple[int, int], settings: SharedSettings, bucket: Bucket, seed: int, sample_id: int) -> list[Frame]:
    """Every frame that `frame` may give for a sample, each once; `Undecodable` as there. Not for random crops without
    `settings.crops`, of which there is no end."""
    spare = _spare(size, bucket)
    crops = range((settings.crops or 1) if settings.crop == "random" else 1)
    corners = dict.fromkeys(_corner_of(spare, settings, seed, sample_id, crop) for crop in crops)
    mirrors = (False, True) if settings.random_flip else (False,)
    return [_framed(size, settings, bucket, corner, mirror) for corner in corners for mirror in mirrors]


def _spare(size: tuple[int, int], bucket: Bucket) -> tuple[int, int]:
    """Pixels (vertical, horizontal) by which the resized image is larger than its bucket. `Undecodable` if it would be
    too large."""
    height, width = bucket.covering(*size)
    if height * width > PIXEL_LIMIT:
        raise Undecodable(f"too narrow: more than {PIXEL_LIMIT} pixels once it is resized to cover its bucket")
    return height - bucket.height_px, width - bucket.width_px


def _framed(
    size: tuple[int, int], settings: SharedSettings, bucket: Bucket, corner: tuple[int, int], mirror: bool
) -> Frame:
    sides = (bucket.height_px, bucket.width_px)
    return Frame(size, bucket.covering(*size), *corner, *sides, mirror, settings.interpolation)


def cut(
    images: Mapping[str, bytes | np.ndarray],
    settings: SharedSettings,
    bucket: Bucket,
    seed: int,
    key: np.ndarray,
    wanted: Images = NO_IMAGES,
    sizes: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> tuple[dict[str, Frame], dict[str, Tensor]]:
    """The images of a record in the shape of `bucket`, each [C, H, W] uint8: the one that is trained on, and those that
    are wanted (of `KINDS`), as far as it has them. One with a condition is computed from the first, as it is cut. The
    frames are those of the images that have one of their own, the first among them. An image of which only features are
    read is absent, and has its upright height and width in `sizes`. Reference images are `references.py`'s. Raises
    `Undecodable`."""
    found: dict[str, Tensor] = {}
    frames: dict[str, Frame] = {}
    if IMAGE in images:
        frames[IMAGE], found[IMAGE] = _scene(images[IMAGE], settings, bucket, seed, key)
    else:
        frames[IMAGE] = frame(sizes[IMAGE], settings, bucket, seed, key)
    for name, condition in wanted.items():
        kind = KINDS[name]
        if isinstance(condition, References):
            continue  # in data/images/references.py, as a sample has as many as it has
        if condition is not None:
            found[name] = _computed(condition, found[IMAGE], conditions.drawing(seed, name, key))
        elif name in images and kind.is_scene:
            with kinds.named(name):
                # By the same key: a pair is flipped and cropped together, so nothing but the pictures tells them apart.
                frames[name], found[name] = _scene(images[name], settings, bucket, seed, key)
        elif name in sizes:
            frames[name] = frame(sizes[name], settings, bucket, seed, key)
        elif (image := _held(images, name, settings)) is not None:
            pixels_HWC = beside(name, image, frames[IMAGE].size, settings, bucket)
            found[name] = _decided(frames[IMAGE].apply(pixels_HWC, kind.interpolation))
        elif kind.absent is None:
            raise Undecodable(kinds.lacking(name, needed=True))
    return frames, found


def _held(images: Mapping[str, bytes | np.ndarray], name: str, settings: SharedSettings) -> bytes | np.ndarray | None:
    """A further image of the record; its mask may be the alpha channel, as [H, W, 3]. `Undecodable`."""
    if name == MASK and name not in images and settings.alpha_mask:
        image = images.get(IMAGE, images.get(ALPHA))
        if image is not None and is_transparent(image, settings.formats):
            return np.repeat(sized(image, settings, None, alpha=True)[0][:, :, 3:], 3, axis=2)
    return images.get(name)


def upright_px(image: bytes | np.ndarray, formats: Sequence[str]) -> tuple[int, int]:
    """Height and width of an image. `Undecodable` if its header does not tell."""
    if isinstance(image, np.ndarray):
        return image.shape[0], image.shape[1]
    return upright_size(io.BytesIO(image), formats)


def _scene(
    image: bytes | np.ndarray, settings: SharedSettings, bucket: Bucket, seed: int, key: np.ndarray
) -> tuple[Frame, Tensor]:
    """The frame of an image with a scene of its own, and what it shows [3, H, W] uint8. `Undecodable`."""
    pixels_HWC, size = sized(image, settings, bucket)
    middle = saliency.middle(pixels_HWC, settings.saliency) if settings.crop == "smart" else None
    chosen = frame(size, settings, bucket, seed, key, middle)
    return chosen, chosen.apply(pixels_HWC)


def _decided(pixels_CHW: Tensor) -> Tensor:
    """RGBA whose pixels are known (255) or unknown (transparent black), and none in part; others as they are."""
    if len(pixels_CHW) < 4:
        return pixels_CHW
    opaque_HW = pixels_CHW[3] >= 128
    known_CHW = torch.cat([pixels_CHW[:3], torch.full_like(pixels_CHW[:1], 255)])
    return torch.where(opaque_HW, known_CHW, torch.zeros_like(known_CHW))


def _computed(condition: ConditionSettings, image_CHW: Tensor, draw: conditions.Draw) -> Tensor:
    """[4, H, W] uint8 of the image that is trained on."""
    pixels_HWC = np.ascontiguousarray(image_CHW.permute(1, 2, 0).numpy())
    return _channels_first(conditions.computed(condition, pixels_HWC, draw))[0]


def beside(
    name: str,
    image: bytes | np.ndarray,
    size: tuple[int, int],
    settings: SharedSettings,
    bucket: Bucket | None = None,
) -> np.ndarray:
    """[H, W, C] uint8 of an image that belongs to one of this height and width. `Undecodable` if it is damaged, or has
    to show the same scene and has another shape."""
    kind = KINDS[name]
    own = settings if kind.under is None else settings.model_copy(update={"alpha_colour": kind.under})
    with kinds.named(name):
        pixels_HWC, of_own = sized(image, own, bucket, alpha=kind.channels == 4)
        kinds.check_scene(name, of_own, size)
    if kind.channels == 4:
        return conditions.with_alpha(pixels_HWC)
    return pixels_HWC if kind.channels == 3 else np.asarray(Image.fromarray(pixels_HWC).convert("L"))[:, :, None]


def sized(
    encoded: bytes | np.ndarray, settings: SharedSettings, bucket: Bucket | None, alpha: bool = False
) -> tuple[np.ndarray, tuple[int, int]]:
    """The whole image, upright, [H, W, 3] uint8 sRGB (pixels stay as they are), and its full (height, width); with
    `alpha` [H, W, 4] where it has transparent pixels. Raises `Undecodable`. If it will be resized to cover `bucket`, a
    much larger JPEG comes at 1/2, 1/4 or 1/8 of its size."""
    if isinstance(encoded, np.ndarray):
        return encoded, encoded.shape[:2]
    try:
        image = opened(io.BytesIO(encoded), settings.formats)
        stored_HWC = _fast_jpeg(encoded, image, settings, bucket)
        if stored_HWC is None:
            stored_HWC = _by_pillow(image, settings, alpha)
        turn = orientation(image)
    except BROKEN as error:
        cut = "truncated" in str(error).lower()
        raise Undecodable("truncated image" if cut else "broken image") from error
    size = (image.width, image.height) if turn >= 5 else (image.height, image.width)
    return _upright(stored_HWC, turn), size


def _fast_jpeg(
    encoded: bytes, image: Image.Image, settings: SharedSettings, bucket: Bucket | None
) -> np.ndarray | None:
    """[H, W, 3] uint8 sRGB by libjpeg-turbo's own interface, as stored; None if it cannot decode it, but Pillow may."""
    if (image.format, image.mode) != ("JPEG", "RGB"):
        return None
    factor = 1
    if bucket is not None and settings.interpolation != "nearest":  # a JPEG at half its size is an average already
        stored = bucket.mirrored if orientation(image) >= 5 else bucket
        factor = _dct_factor(image.height, image.width, stored)
    smallest = {"min_width": image.width // factor, "min_height": image.height // factor, "min_factor": factor}
    try:
        fast_HWC = simplejpeg.decode_jpeg(encoded, colorspace="RGB", **smallest)
    except ValueError:
        return None
    transform = _to_srgb(image.info.get("icc_profile"), "RGB")
    return fast_HWC if transform is None else np.array(_transformed(Image.fromarray(fast_HWC), transform))


def _dct_factor(height_px: int, width_px: int, bucket: Bucket) -> int:
    """Factor by which a JPEG is decoded smaller: 8, 4 or 2 if that divides both sides and is the whole resize, or
    leaves a factor of 2 to the filter, so that the filter still decides the look."""
    for factor in (8, 4, 2):
        height, width = height_px // factor, width_px // factor
        whole = height_px % factor == width_px % factor == 0
        left = min(height / bucket.height_px, width / bucket.width_px)
        if whole and (left == 1 or left >= 2):
            return factor
    return 1


def _by_pillow(image: Image.Image, settings: SharedSettings, keep_alpha: bool) -> np.ndarray:
    """[H, W, 3] uint8 sRGB, as stored; or [H, W, 4]."""
    colours, alpha = _layers(image)
    transform = _to_srgb(image.info.get("icc_profile"), colours.mode)
    if transform is not None:
        rgb = _transformed(colours, transform)
    else:
        rgb = colours if colours.mode == "RGB" else colours.convert("RGB")  # no copy: the largest ones take 0.5 GB
    if alpha is None:
        return np.array(rgb)
    rgb.putalpha(alpha)
    if keep_alpha:
        return np.array(rgb)
    under = Image.new("RGBA", rgb.size, settings.alpha_colour)
    return np.array(Image.alpha_composite(under, rgb).convert("RGB"))


def _layers(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colours of 8 bits without a palette (mode L, RGB, CMYK ...), and alpha if there is any."""
    image.load()
    if image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.mode in ("I", "F"):
        raise Undecodable("colours of more than 16 bits")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        grey = image.mode in ("L", "LA", "La")  # its profile is one for grey
        return layer.convert("L" if grey else "RGB"), layer.getchannel("A")
    mode = {"P": "RGB", "1": "L"}.get(image.mode, image.mode)
    return (image if mode == image.mode else image.convert(mode)), None


def _eight_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Grey of 16 bits as 8, and alpha."""
    grey = np.asarray(image)
    transparent = image.info.get("transparency")
    alpha = Image.fromarray(np.where(grey == transparent, 0, 255).astype(np.uint8)) if transparent is not None else None
    if getattr(image, "tag_v2", {}).get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
        grey = ~grey  # Pillow does this for 8 bits alone
    return Image.fromarray(_GREY_8[grey]), alpha


_SAME_LEVELS = 2
"""Largest difference, of 255, that counts as rounding: tables of sRGB's curve differ by as much."""
_NO_PROFILE: tuple[type[Exception], ...] = (*BROKEN, ImageCms.PyCMSError)


@lru_cache(maxsize=32)
def _to_srgb(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The transform from a profile's colours to sRGB; None for sRGB itself, without a profile, and for one that is
    broken or of another mode, which is ignored."""
    if not profile:
        return None
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
        return None if _changes_nothing(transform, mode) else transform
    except _NO_PROFILE:
        return None


def _changes_nothing(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """True if colours from all over the space stay as they are, but for rounding; the profile's name does not tell."""
    if mode not in ("L", "RGB"):
        return False
    greys = np.arange(256, dtype=np.uint8)
    grid = np.stack(np.meshgrid(*[greys[::17]] * 3), axis=-1).reshape(-1, 1, 3)
    probe = greys[:, None] if mode == "L" else np.concatenate([np.stack([greys] * 3, axis=-1)[:, None], grid])
    before = Image.fromarray(probe)
    after = np.asarray(_transformed(before, transform), dtype=np.int16)
    return bool(np.abs(after - np.asarray(before.convert("RGB"), dtype=np.int16)).max() <= _SAME_LEVELS)


def _transformed(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    other = ImageCms.applyTransform(image, transform)
    assert other is not None  # as it does not work in place
    return other


def _upright(pixels_HWC: np.ndarray, turn: int) -> np.ndarray:
    """Applies EXIF's orientation: 5 to 8 are transposed first, then flipped."""
    if turn >= 5:
        pixels_HWC = pixels_HWC.swapaxes(0, 1)
    if turn in (3, 4, 7, 8):
        pixels_HWC = pixels_HWC[::-1]
    if turn in (2, 3, 6, 7):
        pixels_HWC = pixels_HWC[:, ::-1]
    return np.ascontiguousarray(pixels_HWC)


def _resize(pixels_HWC: np.ndarray, size: tuple[int, int], interpolation: str) -> Tensor:
    """[C, h, w] uint8 of this height and width, antialiased."""
    if size == pixels_HWC.shape[:2]:
        return _channels_first(pixels_HWC)[0]
    if pixels_HWC.shape[2] == 4 and pixels_HWC[:, :, 3].min() == 255:
        rgb_CHW = _resize(np.ascontiguousarray(pixels_HWC[:, :, :3]), size, interpolation)
        return torch.cat([rgb_CHW, torch.full_like(rgb_CHW[:1], 255)])
    if interpolation in _TORCH_FILTERS and pixels_HWC.shape[2] != 4:  # Pillow weighs colours by their alpha
        return functional.interpolate(_channels_first(pixels_HWC), size, mode=interpolation, antialias=True)[0]
    image = Image.fromarray(pixels_HWC.squeeze(2) if pixels_HWC.shape[2] == 1 else pixels_HWC)
    resized = np.array(image.resize(size[::-1], _PILLOW_FILTERS[interpolation]))
    return _channels_first(resized.reshape(*size, -1))[0]


def _channels_first(pixels_HWC: np.ndarray) -> Tensor:
    """[1, C, H, W] over the same memory. With the 1 in front before the dims are permuted torch sees channels_last, and
    its resize takes them as they are."""
    return torch.from_numpy(np.require(pixels_HWC, requirements=["C", "W"]))[None].permute(0, 3, 1, 2)


def _corner(spare: tuple[int, int], settings: SharedSettings, seed: int, key: np.ndarray) -> tuple[int, int]:
    """Top and left of the crop, with so many (vertical, horizontal) pixels to spare."""
    if settings.crop == "random" and settings.crops is None:
        return _drawn_corner(spare, seed, key)
    crop = int(_uniforms(seed, "crop of an epoch", key, 1)[0] * settings.crops) if settings.crops else 0
    return _corner_of(spare, settings, seed, int(key[0]), crop)


def _corner_of(
    spare: tuple[int, int], settings: SharedSettings, seed: int, sample_id: int, crop: int
) -> tuple[int, int]:
    """The corner of one of the crops that a sample has in all epochs."""
    if settings.crop == "center":
        return spare[0] // 2, spare[1] // 2
    return _drawn_corner(spare, seed, np.array([sample_id, crop, 0]))


def _around(
    middle: tuple[float, float], spare: tuple[int, int], bucket: Bucket, seed: int, key: np.ndarray
) -> tuple[int, int]:
    """Top and left of a smart crop, in the image that is not flipped."""
    moves, *offsets = _uniforms(seed, "smart crop", key, 3).tolist()
    found = []
    for place, offset, side, own in zip(middle, offsets, (bucket.height_px, bucket.width_px), spare, strict=True):
        moved = place + (_MOVED_BY * (2 * offset - 1) if moves < _MOVED_SHARE else 0.0)
        found.append(int(min(max(moved * (side + own) - side / 2, 0), own)))
    return found[0], found[1]


def _drawn_corner(spare: tuple[int, int], seed: int, key: np.ndarray) -> tuple[int, int]:
    down, right = _uniforms(seed, "crop", key, 2)
    return int(down * (spare[0] + 1)), int(right * (spare[1] + 1))


def _uniforms(seed: int, purpose: str, key: np.ndarray, count: int) -> np.ndarray:
    sample_id, epoch, repeat = map(int, key)
    return keys.uniforms(seed, purpose, sample_id, epoch, repeat, count=count)
