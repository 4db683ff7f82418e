"""Images that a request starts from: files by name, found, checked and measured before any weight is read, and decoded
with the batch that needs them.

`image` is what image-to-image starts from, `mask` says where it is painted again (white), `control`, `control_2` ...
are control images, and `control_from` is a photo of which they are computed. `reference`, `reference_2` ... say what is
generated, with the prompt, each in a size of its own.
"""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from math import isqrt, log
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import numpy as np
from PIL import Image

from daguerre.conditions.condition import with_alpha
from daguerre.data.images import decode, headers, kinds, references
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.images.kinds import KINDS
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SharedSettings
from daguerre.errors import UserError
from daguerre.generation.prompts import CONTROL_FROM, IMAGES, Prompts, Row
from daguerre.regular import check_regular
from daguerre.types import CONTROLS, IMAGE, IMAGE_PROMPT, MASK, REFERENCES, References

Found = TypeVar("Found")
STEP_PX = 8
"""Sides that follow an image are multiples of this."""
_SETTINGS = SharedSettings(formats=("jpeg", "png", "webp", "gif", "bmp", "tiff"), interpolation="lanczos")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image of a request: a file, or a picture that was made."""

    name: str
    """One of `prompts.IMAGES`."""
    path: Path
    made: bytes | None = None
    """The picture as a file's bytes, where it is in no file; `path` is then its name for people."""

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width, upright. UserError for a file that is no image."""
        return _size_px(self)

    @property
    def has_frames(self) -> bool:
        """True of an animation, and of several pages. UserError as `size_px`."""
        return _has_frames(self)

    @property
    def sha256(self) -> str:
        """SHA-256 of the file, hex."""
        return _sha256(self)

    def content(self) -> bytes:
        """The file. UserError if it cannot be read."""
        if self.made is not None:
            return self.made
        try:
            check_regular(self.path)
            return self.path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{self.name}={self.path} cannot be read: {error.strerror or error}", code="missing"
            ) from error

    def upright(self) -> np.ndarray:
        """[H, W, 3] uint8, sRGB, transparency over white. UserError for a file that is no whole image."""
        try:
            return decode.sized(self.content(), _SETTINGS, None)[0]
        except Undecodable as reason:
            raise self.refused(reason) from reason

    def refused(self, reason: Undecodable) -> UserError:
        """The error for a file that is no image that can be used."""
        return UserError(f"{self.name}={self.path} cannot be used: {reason}", code="damaged")


def made(name: str, pixels_HWC: np.ndarray) -> InputImage:
    """An image [H, W, 3] uint8 as one of a request."""
    content = io.BytesIO()
    Image.fromarray(pixels_HWC).save(content, "png")
    return InputImage(name, Path(name), content.getvalue())


@lru_cache(maxsize=4096)
def _size_px(image: InputImage) -> tuple[int, int]:
    return _of_header(image, headers.upright_size)


@lru_cache(maxsize=4096)
def _has_frames(image: InputImage) -> bool:
    return _of_header(image, headers.has_frames)


def _of_header(image: InputImage, read: Callable[[BinaryIO, Sequence[str]], Found]) -> Found:
    if image.made is not None:
        return read(io.BytesIO(image.made), _SETTINGS.formats)
    try:
        check_regular(image.path)
        with image.path.open("rb") as file:
            return read(file, _SETTINGS.formats)
    except Undecodable as reason:
        raise image.refused(reason) from reason
    except OSError as error:
        raise UserError(
            f"{image.name}={image.path} cannot be read: {error.strerror or error}", code="missing"
        ) from error


@lru_cache(maxsize=4096)
def _sha256(image: InputImage) -> str:
    return hashlib.sha256(image.content()).hexdigest()


def fitting(own_px: tuple[int, int], height: int | None, width: int | None, most_px: int) -> tuple[int, int]:
    """Height and width of what is generated from an image of this (height, width), where not both are given.

    Its own size, cut to multiples of `STEP_PX`; one of more than `most_px` pixels is scaled down to that first, and of
    the sizes around it that have no more the one nearest to its aspect ratio is taken. With one side given the other
    follows the aspect ratio.
    """
    own_height, own_width = own_px
    if height is not None:
        return height, _cut(own_width * height // own_height)
    if width is not None:
        return _cut(own_height * width // own_width), width
    if own_height * own_width <= most_px:
        return _cut(own_height), _cut(own_width)
    low = _cut(isqrt(most_px * own_height // own_width)), _cut(isqrt(most_px * own_width // own_height))
    near = [(low[0] + more[0], low[1] + more[1]) for more in product((0, STEP_PX), repeat=2)]
    # Both sides cut would change the shape of a small image: 300 x 400 at 64 x 64 px is 56 x 72, not 48 x 72.
    fits = [size for size in near if size == low or size[0] * size[1] <= most_px]
    return min(fits, key=lambda size: (abs(log(size[0] * own_width / (size[1] * own_height))), -size[0] * size[1]))


def _cut(side_px: int) -> int:
    return max(STEP_PX, side_px // STEP_PX * STEP_PX)


def of(row: Row) -> dict[str, InputImage]:
    """The images of a row, the one first that decides the size."""
    return {name: InputImage(name, row.images[name]) for name in IMAGES if name in row.images}


def check(images: Mapping[str, InputImage], given_px: tuple[int, int] | None = None) -> None:
    """UserError for a mask without an image, for a mask or control image of another shape than what is generated
    (`given_px`: height and width that are given), and for a file that is no image; by headers alone."""
    for image in images.values():
        size_px = image.size_px
        if image.name in CONTROLS:
            _check_control(image, given_px or next(iter(images.values())).size_px)
        if image.name != MASK:
            continue
        if IMAGE not in images:
            raise UserError(
                f"mask={image.path} says where an image is painted again, and there is no image: give image=FILE",
                code="missing",
            )
        try:
            kinds.check_shape(size_px, images[IMAGE].size_px)
        except Undecodable as reason:
            shown = " and ".join(f"{h}x{w}" for h, w in (size_px, images[IMAGE].size_px))
            raise UserError(
                f"mask={image.path} has {reason} ({shown} px, height x width): give one of its shape, at any scale",
                code="conflict",
            ) from reason


def _check_control(image: InputImage, size_px: tuple[int, int]) -> None:
    try:
        kinds.check_shape(image.size_px, size_px)
    except Undecodable as reason:
        shown = " and ".join(f"{h}x{w}" for h, w in (image.size_px, size_px))
        raise UserError(
            f"{image.name}={image.path} has another shape than what is generated ({shown} px, height x width): give "
            "one of its shape, at any scale, or leave height and width out",
            code="conflict",
        ) from reason


def pixels(
    images: Mapping[str, InputImage],
    size_px: tuple[int, int],
    control_px: tuple[int, int],
    rule: References | None = None,
) -> dict[str, np.ndarray]:
    """[H, W, 3] uint8 of each image, in the size of the request: upright, sRGB, transparency over white (a mask's over
    black); control images are [H, W, 4], RGBA, and like the photo of which they are computed in the size `control_px`.

    Resized until it covers the size, and its middle cropped; one that is larger by less than `STEP_PX` is only cropped,
    so that its pixels stay as they are. One that only says what is generated keeps its size, a reference image has the
    one that the `rule` gives it. A mask follows its image and is 255 or 0. UserError for a broken file.
    """
    found: dict[str, np.ndarray] = {}
    for name, frame in ({} if rule is None else reference_frames(images, rule)).items():
        try:
            seen = None if rule is None else rule.seen
            each = references.cut({name: images[name].content()}, {name: frame}, _SETTINGS, seen)
        except Undecodable as reason:
            raise images[name].refused(reason) from reason
        found |= {own: pixels_CHW.permute(1, 2, 0).numpy() for own, pixels_CHW in each.items()}
    for name, image in images.items():
        try:
            if name in REFERENCES:
                continue
            if name == MASK:
                whole_HWC = decode.beside(name, image.content(), images[IMAGE].size_px, _SETTINGS)
                frame, interpolation = _frame(images[IMAGE].size_px, size_px), KINDS[name].interpolation
            elif name == IMAGE_PROMPT:
                found[name], _ = decode.sized(image.content(), _SETTINGS, None)
                continue
            else:
                is_control = name in CONTROLS
                whole_HWC, own_px = decode.sized(image.content(), _SETTINGS, None, alpha=is_control)
                whole_HWC = with_alpha(whole_HWC) if is_control else whole_HWC
                of_control = is_control or name == CONTROL_FROM
                frame, interpolation = _frame(own_px, control_px if of_control else size_px), None
        except Undecodable as reason:
            raise image.refused(reason) from reason
        cut_HWC = frame.apply(whole_HWC, interpolation).permute(1, 2, 0).numpy()
        found[name] = (
            np.where(cut_HWC >= 128, np.uint8(255), np.uint8(0)).repeat(3, axis=2) if name == MASK else cut_HWC
        )
    return found


def reference_frames(images: Mapping[str, InputImage], rule: References) -> dict[str, Frame]:
    """The frames of the reference images among these, in their order, by headers alone. UserError where there are more
    than the model reads, one is missing among them, or one is too narrow."""
    if absent := [f"{name}=PICTURE" for name in REFERENCES[: rule.least] if name not in images]:
        raise UserError(
            f"this model reads a reference image with each prompt: give {', '.join(absent)}", code="missing"
        )
    sizes = {name: images[name].size_px for name in REFERENCES if name in images}
    try:
        return references.frames({}, rule, _SETTINGS.formats, sizes)
    except Undecodable as reason:
        given = ", ".join(f"{name}={images[name].path}" for name in sizes)
        raise UserError(f"{given}: {reason}", code="unsupported") from reason


def _frame(own_px: tuple[int, int], size_px: tuple[int, int]) -> Frame:
    spare = [own - wanted for own, wanted in zip(own_px, size_px, strict=True)]
    resized = own_px if all(0 <= px < STEP_PX for px in spare) else Bucket(*size_px).covering(*own_px)
    top, left = ((side - wanted) // 2 for side, wanted in zip(resized, size_px, strict=True))
    return Frame(own_px, resized, top, left, *size_px, mirror=False, interpolation=_SETTINGS.interpolation)


@dataclass(frozen=True)
class Given:
    """Files that an option gives: one for all requests, or several, of which each makes a request."""

    name: str
    files: tuple[Path, ...]
    place: Literal["file", "folder", "list"] = "file"

    @property
    def several(self) -> bool:
        return self.place != "file"

    def stem(self, number: int) -> str:
        """The name of file `number`, without its suffix, and without `.mask` of `cat.mask.png`."""
        return _stem(self.files[number], self.name)

    def matching(self, number: int, leading: "Given") -> Path:
        """The file that goes with file `number` of the option that leads: of a folder the one with its name, of a list
        the one in its place."""
        if not self.several:
            return self.files[0]
        if self.place == "list":
            return self.files[number]
        stem = leading.stem(number)
        alike = [path for path in self.files if _stem(path, self.name) == stem]
        if len(alike) == 1:
            return alike[0]
        raise UserError(
            f"{self.name}: {len(alike)} of its {len(self.files)} files are named {stem}, as "
            f"{leading.name}={leading.files[number]} is: each needs one",
            code="missing",
        )


def given(name: str, value: str | list[str]) -> Given:
    """The files of an option: a file, a folder or a list of files. UserError if there are none, or for addresses."""
    for each in [value] if isinstance(value, str) else value:
        if not each.strip() or "://" in each:
            raise UserError(
                f"{name}={each}: give an image file of this machine, a folder of them, or a list", setting=name
            )
    if isinstance(value, list):
        found = Given(name, tuple(Path(each).expanduser() for each in value), "list")
    elif not (place := Path(value).expanduser()).is_dir():
        return Given(name, (place,))
    else:
        found = Given(name, _inside(place, name), "folder")
    if not found.files:
        raise UserError(f"{name}={value} holds no image ({', '.join(_SUFFIXES)})", code="empty", setting=name)
    return found


def _stem(path: Path, name: str) -> str:
    """The file's name without its suffix, and without what says that it is an image of this name."""
    of, kind = kinds.owner(path.stem) or (path.stem, name)
    return of if kind == name else path.stem


def _inside(folder: Path, name: str) -> tuple[Path, ...]:
    """The images of a folder: those that are named after others (`cat.mask.png` next to `cat.jpg`) if there are
    some, else all but those that are named after others."""
    every = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    stems = {path.stem for path in every}
    owners = {path: kinds.owner(path.stem) for path in every}
    beside = {path: owner[1] for path, owner in owners.items() if owner and owner[0] in stems}
    return tuple(path for path, kind in beside.items() if kind == name) or tuple(
        path for path in every if path not in beside
    )


def with_images(prompts: Prompts, options: Sequence[Given]) -> Prompts:
    """The prompts with the images of the command line; what a row names itself stays. Of several images each makes a
    request, named after it, which takes a single prompt."""
    leading = next((each for each in options if each.several), None)
    single = {each.name: each.files[0] for each in options if not each.several}
    if leading is None:
        return replace(prompts, rows=lambda: (_with(row, single) for row in prompts.rows())) if options else prompts
    for each in options:
        if each.place == "list" and len(each.files) != len(leading.files):
            raise UserError(
                f"{each.name} has {len(each.files)} images and {leading.name} {len(leading.files)}: give as many",
                code="conflict",
                setting=each.name,
            )
    first, *others = islice(prompts.rows(), 2)
    if others:
        raise UserError(
            f"{leading.name} has {len(leading.files):,} images, and there are several prompts, so it is open which "
            f"belong together: write a prompts_file with a column {leading.name}",
            code="conflict",
            setting=leading.name,
        )

    def rows() -> Iterator[Row]:
        for number in range(len(leading.files)):
            own = {each.name: each.matching(number, leading) for each in options}
            yield _with(replace(first, file_name=leading.stem(number)), own)

    return replace(prompts, rows=rows)


def _with(row: Row, more: Mapping[str, Path]) -> Row:
    return replace(row, images={**more, **row.images})
