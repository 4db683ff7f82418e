"""Emoji, drawn by a colour font of this machine, with their names as captions: real pictures that most machines have.

Names and groups are the table `assets/emoji.txt`, of Unicode's CLDR 48 (`tools/make_emoji_table.py`): those of Python's
`unicodedata` differ from version to version. Combinations are held out, not names at random, so that a model can be
asked for what it never saw but has met the parts of: some of the coloured circles, squares and hearts, and one in six
of the hands of a skin tone.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from daguerre.data import skipped
from daguerre.data.images.emoji_pictures import digest, open_pictures
from daguerre.data.images.words import words
from daguerre.data.index.index import Index
from daguerre.data.settings import SourceSettings
from daguerre.data.skipped import SkipReport
from daguerre.data.source import Split
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, FREE, Unused
from daguerre.types import IMAGE, Record

PLACES = (
    "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto/NotoColorEmoji.ttf",
    "/usr/share/fonts/noto-emoji/NotoColorEmoji.ttf",
    "/usr/share/fonts/google-noto-color-emoji-fonts/NotoColorEmoji.ttf",
    "/usr/share/fonts/google-noto-emoji/NotoColorEmoji.ttf",
    "/System/Library/Fonts/Apple Color Emoji.ttc",
    "C:/Windows/Fonts/seguiemj.ttf",
)
"""Where systems keep a colour emoji font: Debian's, Arch's, openSUSE's and Fedora's Noto, Apple's, Microsoft's."""
TONES = ("light", "medium-light", "medium", "medium-dark", "dark")
_TONE_START = 0x1F3FB
HELD_OUT = ("purple square", "green circle", "orange heart", "blue square", "yellow circle", "brown heart")
"""Coloured shapes that are never trained on: all their colours and shapes are, in other pairs."""
_HELD_OUT_HANDS = 6
"""One hand of a skin tone in so many is held out."""
_TABLE = Path(__file__).parents[2] / "assets" / "emoji.txt"
_LARGEST_PX = 128
_VARIATION = 0xFE0F


class Settings(SourceSettings):
    """Emoji of a colour font of this machine, with their names as captions."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        *SourceSettings.unused_when,
        Unused(("held_out_fraction",), lambda own: True, "the source itself says which combinations are held out"),
        Unused(("formats",), lambda own: True, "no effect on pictures that are drawn"),
    )

    source: Literal["emoji"] = "emoji"
    """Name of this source."""
    resolution: int = Field(64, ge=8, le=_LARGEST_PX)
    """Side of the square images that are trained on, in pixels."""
    font: Annotated[str | None, ADDRESS] = Field(None, min_length=1, json_schema_extra=FREE)
    """The font's file, or a folder of pictures that are named by code points, such as 1f44b-1f3fd.png. The digest of
    it is part of what a run trains on, its place is not. Default: Noto Color Emoji, Apple Color Emoji or Segoe UI
    Emoji, where the system keeps it."""
    tones: bool = True
    """Whether hands and people are drawn in the five skin tones, too."""
    checked_prompts: int = Field(72, ge=0, json_schema_extra=FREE)
    """Emoji of those that were trained on, and as many held-out ones at most, that are generated at the end of a run
    and compared with the font's. 0: nothing is checked."""

    @field_validator("resolution", mode="before")
    @classmethod
    def _as_drawn(cls, resolution: Any) -> Any:
        if isinstance(resolution, int) and resolution > _LARGEST_PX:
            raise ValueError(
                f"fonts of bitmaps hold emoji of about {_LARGEST_PX} px: set {_LARGEST_PX} or fewer, or train on "
                "images of your own (data.source=folder data.path=FOLDER)"
            )
        return resolution

    def words(self) -> frozenset[str]:
        given = super().words()
        return _words(self.tones) | self.captions.words() if given is None else given


class Emoji(NamedTuple):
    """One emoji of the table."""

    text: str
    """Its code points."""
    name: str
    group: str
    """Such as food-drink."""
    subgroup: str
    """Such as food-fruit."""
    tone: str | None
    """One of `TONES`; None without one."""
    held_out: bool

    @property
    def code(self) -> str:
        """Its code points in hexadecimal digits, such as 1F44B-1F3FD."""
        return "-".join(f"{ord(point):X}" for point in self.text)

    @property
    def metadata(self) -> dict[str, str]:
        """Fields for filters; `tone` is `none` without one, as samples that lack a field are left out."""
        return {"name": self.name, "group": self.group, "subgroup": self.subgroup, "tone": self.tone or "none"}

    @property
    def is_joined(self) -> bool:
        """True for a sequence, which takes FriBiDi and Raqm to be drawn as one picture."""
        return len(self.text) > 1


@dataclass(frozen=True)
class EmojiSource:
    """The emoji that a font draws. It travels without its index, which follows from the table."""

    font: Path
    digest: bytes
    """Of the font's file."""
    settings: Settings
    held: bytes
    """A bit for each emoji of the table: whether the font draws it."""
    found: SkipReport

    @property
    def metric(self) -> str | None:
        return "emoji" if self.settings.checked_prompts else None

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def drawn(self) -> tuple[Emoji, ...]:
        """The emoji that it draws, in the table's order."""
        bits = np.unpackbits(np.frombuffer(self.held, np.uint8))
        return tuple(one for one, bit in zip(table(self.settings.tones), bits, strict=False) if bit)

    @cached_property
    def index(self) -> Index:
        ids = [blake2b(one.text.encode(), key=self.digest, digest_size=8).digest() for one in self.drawn]
        metadata = [one.metadata for one in self.drawn]
        sides = np.full(len(ids), open_pictures(self.font).side_px, dtype=np.int32)
        return Index(
            np.array([int.from_bytes(own, "big") >> 1 for own in ids], dtype=np.int64),
            np.arange(len(ids) + 1),  # nothing is gained by reading neighbours
            sides,
            sides,
            texts={name: pa.array([own[name] for own in metadata], pa.string()) for name in metadata[0]},
            images={},
            captioned={"text": pa.array([True] * len(ids))},
            held_out=np.array([one.held_out for one in self.drawn]),
        )

    def sample_id(self, number: int) -> int:
        """63-bit hash of the code points and of the font's file: another font's pictures are other samples."""
        return int(self.index.ids[number])

    def name(self, number: int) -> str:
        return f"emoji/{self.drawn[number].code}"

    def stamps(self) -> np.ndarray:
        """Ids stand for the pictures, as the font's digest is in them."""
        return self.index.ids[:].astype(np.uint64)

    def record(self, number: int) -> Record:
        """Record `number`: the picture on `data.alpha_colour`, (side, side, 3) uint8, its name as `text`; group,
        subgroup and tone as metadata."""
        one = self.drawn[number]
        return Record(self.name(number), {IMAGE: self.picture(one.text)}, {"text": one.name}, one.metadata)

    def picture(self, text: str) -> np.ndarray:
        """The picture of an emoji on `data.alpha_colour`, (side, side, 3) uint8."""
        return open_pictures(self.font).on(text, self.settings.alpha_colour)

    def report(self) -> SkipReport:
        return self.found


def open_source(settings: Settings, split: Split) -> EmojiSource:
    """Finds the font and what it draws. UserError without one, or for one that draws nothing here."""
    font = _font(settings.font)
    own = digest(font)
    return EmojiSource(font, own, settings, *_drawable(font, own, settings.tones))


def _font(given: str | None) -> Path:
    if given is not None:
        path = Path(given).expanduser()
        if not path.exists():
            raise UserError(f"data.font: there is no file or folder {given}", code="missing", setting="data.font")
        return path.resolve()
    found = next((Path(place) for place in PLACES if Path(place).is_file()), None)
    if found is None:
        raise UserError(
            "the source `emoji` draws a colour emoji font, and this machine has none where systems keep it: "
            "`sudo apt install fonts-noto-color-emoji libfribidi0` brings Noto's on Debian and Ubuntu; or name the "
            "file of one, or a folder of pictures such as 1f600.png: data.font=PLACE",
            code="missing",
            setting="data.font",
        )
    return found


@functools.lru_cache(maxsize=4)
def _drawable(place: Path, digest: bytes, tones: bool) -> tuple[bytes, SkipReport]:
    """A bit for each emoji of the table: whether there is a picture, and as of no other one before; and the others by
    reason. UserError where all are left out."""
    pictures = open_pictures(place)
    left_out: skipped.Counts = {}
    seen = dict.fromkeys(pictures.missing, pictures.blank)
    reasons: list[str | None] = []
    for one in table(tones):
        reason = pictures.fault(one.text)
        if reason is None:
            drawn = pictures.glyph(one.text).tobytes()
            reason = seen.get(drawn)
            seen.setdefault(drawn, "drawn like another one")
        reasons.append(reason)
        if reason:
            skipped.add(left_out, reason, f"{one.code} {one.name}", damage=False)
    held = np.array([reason is None for reason in reasons])
    if not held.any():
        raise UserError(f"{place}: {pictures.none}", code="unsupported", setting="data.font")
    return np.packbits(held).tobytes(), left_out


@functools.lru_cache(maxsize=2)
def table(tones: bool = True) -> tuple[Emoji, ...]:
    """All emoji by name, in Unicode's order; with `tones` also each person and hand in each skin tone."""
    return tuple(_read(tones))


def _read(tones: bool) -> Iterator[Emoji]:
    group = subgroup = ""
    hands = 0
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        code, _, name = line.partition(" ")
        if code == "#":
            group, subgroup = name.split("/")
            continue
        points = [int(point, 16) for point in code.removeprefix("+").split("-")]
        yield Emoji("".join(map(chr, points)), name, group, subgroup, None, name in HELD_OUT)
        if not tones or not code.startswith("+"):
            continue
        is_hand = subgroup.startswith("hand")
        hands += is_hand
        rest = points[2:] if points[1:2] == [_VARIATION] else points[1:]
        for i, tone in enumerate(TONES):
            toned = "".join(map(chr, (points[0], _TONE_START + i, *rest)))
            held_out = is_hand and (hands + i) % _HELD_OUT_HANDS == 0
            yield Emoji(toned, f"{name}, {tone} skin tone", group, subgroup, tone, held_out)


@functools.cache
def _words(tones: bool) -> frozenset[str]:
    return frozenset(words(*(one.name for one in table(tones))))
