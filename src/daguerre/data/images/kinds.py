"""Kinds of images that a sample may have with the one that is trained on, and how each is read. No torch here.

A source puts them into `Record.images` under these names. Masks and control images show the scene of the image, and are
cropped as the image itself (`decode.Frame`); a target shows a scene of its own, and so does a reference image, which
also keeps its size.
"""

import io
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from daguerre.conditions.condition import Images
from daguerre.data.images import headers
from daguerre.data.images.headers import Undecodable
from daguerre.types import CONTROLS, MASK, REFERENCES, TARGETS, References


@dataclass(frozen=True)
class Kind:
    """One kind."""

    channels: int
    """4: RGBA; 3: RGB; 1: grey, by luminance."""
    word: str
    """Name of such an image in messages."""
    reader: str
    """What of a recipe asks for it."""
    settings: tuple[str, ...]
    """Settings of sources that say where it is: a name, or {name of the image: name} for several."""
    absent: int | None
    """Value of every pixel if a sample has none; None: such a sample is left out, and counted."""
    remedy: str = "remove it"
    """What to do with `reader` where no sample has one and none is needed."""
    without: str = ""
    """What holds for a sample that is kept without one, for messages."""
    otherwise: str = ""
    """A way to do without stored ones, for messages."""
    is_scene: bool = False
    """Whether it shows a scene of its own, of any size: it is cut to the shape of its sample by a frame of its own.
    Else it shows the same scene as the image, at any scale."""
    interpolation: str | None = None
    """Filter of the resize. None: `data.interpolation`."""
    under: str | None = None
    """Colour under transparent pixels, as #rrggbb. None: `data.alpha_colour`."""


_MASK = Kind(
    1, "mask", "objective.mask", ("mask_dir", "mask_column"), absent=255, without=": all of it counts",
    interpolation="area", under="#000000",
)  # fmt: skip
_CONTROL = Kind(
    4, "control image", "an adapter", ("control_dir", "control_column"), absent=None,
    otherwise="let it be computed, such as adapter.condition=canny (docs/conditions.md)",
)  # fmt: skip
_REJECTED = Kind(3, "rejected image", "an objective", ("rejected_dir", "rejected_column"), absent=None, is_scene=True)
_REFERENCE = Kind(
    3, "reference image", "model.references", ("reference_dir", "reference_column"), absent=0,
    remedy="set it to 0", without=": from its caption alone", is_scene=True,
)  # fmt: skip
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        MASK: _MASK,
        **dict.fromkeys(CONTROLS, _CONTROL),
        **dict.fromkeys(TARGETS, _REJECTED),
        **dict.fromkeys(REFERENCES, _REFERENCE),
    }
)
"""By name."""
ControlName = Literal["control", "control_2", "control_3", "control_4"]
"""One of `CONTROLS`."""
ReferenceName = Literal[
    "reference", "reference_2", "reference_3", "reference_4", "reference_5", "reference_6", "reference_7",
    "reference_8", "reference_9", "reference_10",
]  # fmt: skip
"""One of `REFERENCES`."""
BESIDE: Mapping[str, str] = MappingProxyType(
    {**{name: name for name in KINDS}, **{f"ref{number}": name for number, name in enumerate(REFERENCES, 1)}}
)
"""Names of images by what stands before the extension of a file next to an image: `cat.ref1.png` as well as
`cat.reference.png`."""
_SUFFIXES: Mapping[str, str] = {
    **{f".{word}": name for word, name in BESIDE.items()}, "-masklabel": MASK, "-condlabel": CONTROLS[0]
}  # fmt: skip
"""Endings of their names in a folder; the last two are OneTrainer's."""


def owner(stem: str) -> tuple[str, str] | None:
    """(stem of the image, kind) for the name, without extension, of a further image."""
    for suffix, name in _SUFFIXES.items():
        if stem.endswith(suffix) and os.path.basename(stem) != suffix:
            return stem.removesuffix(suffix), name
    return None


def places(settings: object, which: Literal["dir", "column"]) -> list[tuple[str, str, str]]:
    """(setting, name of the image, place) of the folders or columns that the settings of a source give; a setting that
    several images share maps their names to places, or is the place of the first of them."""
    found, seen = [], set[str]()
    for name, kind in KINDS.items():
        setting = next(each for each in kind.settings if each.endswith(f"_{which}"))
        given = getattr(settings, setting, None)
        place = given.get(name) if isinstance(given, Mapping) else given if setting not in seen else None
        seen.add(setting)
        found += [] if place is None else [(setting, name, place)]
    return found


def lacking(name: str, needed: bool) -> str:
    """The reason for a sample without this image, which is left out where the image is needed."""
    kind = KINDS[name]
    return f"no {kind.word} ({name}) with the image" if needed else f"kept without a {kind.word}{kind.without}"


def unread(name: str) -> str:
    """The reason for a note about a sample with this image, which nothing reads."""
    kind = KINDS[name]
    return f"trained without its {kind.word} ({name}), which {kind.reader} would read"


def stored(images: Images) -> dict[str, bool]:
    """The images among these that the sources store, by name: whether a sample without one is left out."""
    found = {}
    for name, asked in images.items():
        if isinstance(asked, References):
            found[name] = REFERENCES.index(name) < asked.least
        elif asked is None:
            found[name] = KINDS[name].absent is None
    return found


def nowhere(name: str, needed: bool, there: Container[str]) -> str:
    """The message where no sample has this image; `needed` where one without it is left out. `there` are the further
    images that samples have."""
    kind, (folder, column) = KINDS[name], KINDS[name].settings
    first, *rest = REFERENCES
    if name == first and (later := next((other for other in rest if other in there), "")):
        return (
            f"samples have a {later} (cat.{later}.png or cat.ref{later.rpartition('_')[2]}.png), and none has the "
            f"first one: {kind.word}s are counted from {first} (cat.{first}.png or cat.ref1.png)"
        )
    where = f"cat.{name}.png next to cat.jpg, data.{folder}, or data.{column} of a table (docs/data.md)"
    if needed:
        return (
            f"no sample has a {kind.word} ({name}), which {kind.reader} of the recipe reads: add one to the samples, "
            f"{where}{kind.otherwise and '; or ' + kind.otherwise}"
        )
    what = f"no sample has a {kind.word}, so {kind.reader} has no effect"
    return f"{what}: {kind.remedy}, or add a {kind.word} to the samples, {where}"


def check(name: str, encoded: bytes, size: tuple[int, int], formats: Sequence[str]) -> None:
    """`Undecodable` if an image's header is broken, or it has to show the scene of an image of this (height, width) and
    has another shape."""
    with named(name):
        check_scene(name, headers.upright_size(io.BytesIO(encoded), formats), size)


def check_scene(name: str, own: tuple[int, int], size: tuple[int, int]) -> None:
    """`check_shape` for the kinds that show the scene of the image."""
    if not KINDS[name].is_scene:
        check_shape(own, size)


def check_shape(own: tuple[int, int], size: tuple[int, int]) -> None:
    """`Undecodable` if an image of this (height, width) is not `size` at another scale, within a pixel."""
    if abs(own[0] * size[1] - own[1] * size[0]) > max(size):
        raise Undecodable("another aspect ratio than its image's")


@contextmanager
def named(name: str) -> Iterator[None]:
    """A block whose `Undecodable` names the image."""
    try:
        yield
    except Undecodable as error:
        raise Undecodable(f"{name}: {error}") from error
