"""The rows that samples need in a cache: parts of their images, and captions, by keys that follow from contents.

A caption that is read with reference images has a row for each list of them, and so has the empty one.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from daguerre.assembly.parts import Components
from daguerre.caching.cache import Wanted
from daguerre.caching.encode import Caption
from daguerre.conditions import condition as conditions
from daguerre.config.config import Config
from daguerre.data import captions
from daguerre.data.cached.samples import Fact, Picture
from daguerre.data.cached.source import image_digest, image_key, text_key
from daguerre.data.images import decode, kinds, references
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.settings import SharedSettings, SourceSettings
from daguerre.models.family import ReferenceText
from daguerre.types import IMAGE, REFERENCES, Record, References, as_seen

Known = dict[tuple[int, int], Fact]
"""What is known of samples, by member and number."""


class Said(NamedTuple):
    """A caption to encode."""

    text: str
    of: Wanted | None = None
    """The sample with whose reference images it is read; None: it is read alone."""


@dataclass(frozen=True)
class Needed:
    """The rows of a recipe's samples."""

    config: Config
    parts: Components

    @cached_property
    def rule(self) -> References | None:
        """The sizes in which reference images are read; None for a family that reads none."""
        return conditions.references(self.parts.images)

    @property
    def further(self) -> tuple[str, ...]:
        """The further images of a sample that are encoded, if it has them."""
        return (*self.parts.targets, *(() if self.rule is None else self.rule.names))

    @property
    def spare(self) -> tuple[str, ...]:
        """Those that a sample may lack."""
        return REFERENCES if self.rule is None else REFERENCES[self.rule.least :]

    @property
    def pictured(self) -> bool:
        """True where captions are read with the reference images."""
        return self.rule is not None and isinstance(self.parts.family.text, ReferenceText)

    def keys(self, one: Wanted, fact: Fact | None) -> list[bytes]:
        """The keys of all parts of a sample's images that training takes."""
        return [] if fact is None else [*self.crops(one, fact)]

    def crops(self, one: Wanted, fact: Fact) -> dict[bytes, tuple[str, Frame]]:
        """The parts of a sample's images that training takes, by their keys: the image's name and its frame. Nothing
        where the sample cannot be used."""
        if fact.broken:
            return {}
        pictures = fact.pictures
        names = [name for name in (IMAGE, *self.parts.targets) if name in pictures]
        try:
            frames = [(name, frame) for name in names for frame in self._frames(one, pictures[name])]
            frames += self._references(one, fact).items()
        except Undecodable:
            return {}
        return {image_key(pictures[name].digest, frame, one.settings): (name, frame) for name, frame in frames}

    def _frames(self, one: Wanted, picture: Picture) -> list[Frame]:
        size = (picture.height, picture.width)
        return decode.frames(size, one.settings, one.bucket, self.config.seed, one.key)

    def _references(self, one: Wanted, fact: Fact) -> dict[str, Frame]:
        """The frames of a sample's reference images. `Undecodable`."""
        if self.rule is None:
            return {}
        sizes = {name: (one.height, one.width) for name, one in fact.further.items()}
        return references.frames({}, self.rule, one.settings.formats, sizes)

    def pictures(self, record: Record, settings: SourceSettings) -> dict[str, Picture]:
        """The further images of a sample that are encoded. `Undecodable` for one that is broken."""
        found = {}
        for name in self.further:
            if name in record.images:
                with kinds.named(name):
                    size = decode.upright_px(record.images[name], settings.formats)
                found[name] = Picture(image_digest(record.images[name]), *size)
        return found

    def captions(self, each: Iterable[Wanted], known: Known) -> dict[bytes, Said]:
        """Every caption that these samples may have, by its key."""
        each = [*each]
        found = {text_key(text): Said(text) for text in possible(each, known)}
        for one in each if self.pictured else ():
            fact = known.get((one.member, one.number))
            if fact is None or fact.broken:
                continue
            with suppress(Undecodable):
                frames = self._references(one, fact).items()
                pictures = [image_key(fact.further[name].digest, frame, one.settings) for name, frame in frames]
                # The empty one, too: guidance leads away from it, and keeps the pictures.
                texts = ["", *captions.possible(fact.texts, one.settings)] if pictures else []
                found |= {text_key(text, pictures): Said(text, one) for text in texts}
        return found

    def caption(self, text: str, record: Record, settings: SharedSettings) -> Caption:
        """A caption with the reference images of a sample. `Undecodable`."""
        if self.rule is None or not self.pictured:
            return Caption(text)
        frames = references.frames(record.images, self.rule, settings.formats)
        return Caption(text, tuple(as_seen(references.cut(record.images, frames, settings, self.rule.seen))))


def possible(each: Iterable[Wanted], known: Known) -> list[str]:
    """Every caption that those of these samples may have of which something is known, and the empty one, each once."""
    found: dict[str, None] = {}
    for one in each:
        fact = known.get((one.member, one.number))
        if fact is not None and not fact.broken:
            with suppress(Undecodable):
                found |= dict.fromkeys(captions.possible(fact.texts, one.settings))
    # The null caption is read by whatever guides, whether dropout of captions leaves some empty or not.
    return [*(found | {"": None})]
