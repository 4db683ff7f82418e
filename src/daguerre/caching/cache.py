"""The cache of a recipe: which half of it can be cached, by which keys, and which samples need rows.

A row is known by contents: of the image's bytes and the part of it that is taken, or of the text; the folder it is in,
by all that the encoder is. So nothing in a cache can be stale: what changed has another name, and is encoded again.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from daguerre.assembly.parts import Components
from daguerre.caching import encode
from daguerre.config.config import Config
from daguerre.data.cached.rows import Rows
from daguerre.data.cached.settings import CacheSettings
from daguerre.data.dataset import Dataset, Member
from daguerre.data.loading.loader import without_chance
from daguerre.data.plan.buckets import Bucket
from daguerre.data.settings import SourceSettings
from daguerre.data.source import cache_of
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.family import Cacheable, Family
from daguerre.storage import address
from daguerre.storage.location import Location

AUTO = "auto"
CODE = 2
"""Raised by hand when the code of encoding, of decoding or of a key changes what a row holds: everything is encoded
again."""


class Half(NamedTuple):
    """One of the two things that are cached."""

    name: str
    """`images` or `texts`."""
    key: str
    """Digest of everything but the image or text that decides the rows."""
    told: Mapping[str, Any]
    """What the key was made of."""

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.key[:24]}"


@dataclass(frozen=True)
class Cache:
    """The cache of a run."""

    url: str
    halves: Mapping[str, Half]
    """By `images` and `texts`: those that are cached."""
    notices: tuple[str, ...]

    @property
    def components(self) -> set[str]:
        """The networks whose results it has."""
        return {name for half in self.halves.values() for name in half.told["networks"]}

    @property
    def name(self) -> str:
        """For messages."""
        return Location(self.url).name

    def rows(self, name: str) -> Rows | None:
        """The rows of a half, as they are now; None where it is not cached."""
        half = self.halves.get(name)
        return None if half is None else Rows.found(f"{self.url}/{half.folder}")


def opened(config: Config, parts: Components, anew: bool = False) -> Cache | None:
    """The cache of a recipe, which may be empty; None without one. `anew`: files of weights are read, whatever their
    sizes and times of change say. UserError where something is asked for that cannot be cached."""
    settings, family = config.cache, parts.family
    if settings.path is None:
        return None
    found: dict[str, Half] = {}
    reasons: dict[str, list[str]] = {}
    for name, codec, why in _asked(config, family):
        asked = getattr(settings, name)
        if why is not None and asked:
            raise UserError(f"cache.{name}: cannot be cached: {why}", code="conflict", setting=f"cache.{name}")
        if why is not None:
            reasons.setdefault(why, []).append(name)
            continue
        assert isinstance(codec, Cacheable)
        found[name] = _half(name, codec, family, config, anew)
    notices = tuple(f"{' and '.join(names)} are not cached: {why}" for why, names in reasons.items())
    if not found and settings.path != AUTO:
        raise nothing(notices)
    return Cache(place(config) if found else "", found, notices)


def nothing(notices: Sequence[str]) -> UserError:
    """The refusal of a cache that would be empty."""
    why = "; ".join(notices) or "cache.images and cache.texts are both false"
    return UserError(f"cache.path: {why}", code="conflict", setting="cache.path")


def expected(config: Config, family: Family) -> dict[str, Cacheable]:
    """The encoders of the halves of a recipe's cache, by `images` and `texts`."""
    if config.cache.path is None:
        return {}
    return {name: codec for name, codec, why in _asked(config, family) if why is None}


def _asked(config: Config, family: Family) -> Iterator[tuple[str, Any, str | None]]:
    """The halves that shall be cached, each with what encodes it and the reason for which it cannot be."""
    if config.cache.images is not False:
        yield "images", family.images, _why_not_images(config, family)
    if config.cache.texts is not False:
        yield "texts", family.text, _why_not_texts(config, family)


def place(config: Config) -> str:
    """The folder or address of a recipe's cache."""
    path = config.cache.path
    assert path is not None
    if path == AUTO:
        (settings, *_) = config.data.sources.values()
        return str(cache_of(settings).folder / "encoded")
    return address.checked(path).rstrip("/") if address.is_remote(path) else str(Path(path).expanduser().absolute())


def _why_not_images(config: Config, family: Family) -> str | None:
    """The reason for which images cannot be cached."""
    if reason := family.uncached_images or _why_not(config, family, family.images, "images"):
        return reason
    if any(own.crop == "smart" for own in config.data.sources.values()):
        return "smart crops are found in the pixels, which a cached sample does not have: data.crop=center"
    if any(own.crop == "random" and own.crops is None for own in config.data.sources.values()):
        return "each epoch has new random crops; data.crops=4 gives each image four, of which an epoch takes one"
    return None


def _why_not_texts(config: Config, family: Family) -> str | None:
    if family.text is None:
        return "the family reads no captions"
    if reason := _why_not(config, family, family.text, "captions"):
        return reason
    if any(own.captions.is_endless for own in config.data.sources.values()):
        own = "data.captions.shuffle_tags, tag_dropout, wildcards"
        return f"each epoch has tags in another order, other tags or other words ({own})"
    return None


def _why_not(config: Config, family: Family, codec: Any, what: str) -> str | None:
    if not isinstance(codec, Cacheable) or family.pretrained is None:
        return f"no frozen network of this family encodes {what}"
    if trained := sorted({*codec.networks} & {*family.trained}):
        return f"{', '.join(trained)} is trained, and what it makes of them changes with every update"
    if any(own.endless for own in config.data.sources.values()):
        return "the samples are made as they are needed, without end"
    return None


def _half(name: str, codec: Cacheable, family: Family, config: Config, anew: bool) -> Half:
    told = {
        "code": CODE,
        "dtype": _dtype(name, codec, config.cache),
        "matmul_precision": config.training.matmul_precision,
        "frozen_precision": config.training.frozen_precision,
        "codec": type(codec).__name__,
        "networks": {component: encoders.identity(family, component, anew) for component in codec.networks},
        "rules": codec.rules(),
    }
    return Half(name, sha256(json.dumps(told, sort_keys=True).encode()).hexdigest(), told)


def _dtype(name: str, codec: Any, settings: CacheSettings) -> str:
    """Type of what is kept, as a key has it: float16 is `auto` there, which was the only one besides float32."""
    dtype = torch.float32 if settings.dtype == "float32" else torch.float16
    if name == "texts":
        dtype = encode.dtype_of_texts(settings, codec)
    return "auto" if dtype == torch.float16 else str(dtype).removeprefix("torch.")


class Wanted(NamedTuple):
    """A sample that is trained or validated on."""

    member: int
    number: int
    sample_id: int
    """The source's own."""
    key: int
    """With the salt of its source, by which crops are drawn."""
    bucket: Bucket
    settings: SourceSettings


def wanted(config: Config, dataset: Dataset, held_out: Dataset) -> list[Wanted]:
    """The samples whose features a run reads: all that are trained on, and the first held-out ones."""
    found = _wanted(dataset, dataset.members, dataset.first(None))
    shown = max(config.validation.num_samples, config.sampling.num_images)
    return found + _wanted(held_out, without_chance(held_out), held_out.first(shown))


def _wanted(dataset: Dataset, members: Sequence[Member], groups: Iterable[tuple[int, Any]]) -> list[Wanted]:
    found = []
    for number, reads in groups:
        bucket = dataset.buckets[number]
        for member, sample, key in zip(
            reads.members.tolist(), reads.numbers.tolist(), reads.keys[:, 0].tolist(), strict=True
        ):
            own = members[member]
            found.append(Wanted(member, sample, own.source.sample_id(sample), key, bucket, own.settings))
    return found
