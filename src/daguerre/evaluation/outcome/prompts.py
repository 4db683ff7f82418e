"""The lists of prompts by which an adapter is compared with its base, and the training pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from daguerre.checkpoint.run_dir import RunFolder
from daguerre.config import config as configs
from daguerre.config.config import Config
from daguerre.data.dataset import Dataset, open_datasets
from daguerre.data.loading import loader
from daguerre.errors import UserError
from daguerre.evaluation import images
from daguerre.evaluation.images import SourceImages
from daguerre.generation import prompts as generation_prompts
from daguerre.generation.generate import ImageRequest

_GENERAL = Path(__file__).parents[2] / "assets" / "general_prompts.txt"
_MOST_PICTURES = 1000


class Listed(NamedTuple):
    """Prompts, and where they are from, for people."""

    texts: tuple[str, ...]
    origin: str


@dataclass(frozen=True)
class Lists:
    """Lists of prompts that are drawn, and the pictures to compare with."""

    trained: Listed
    """Captions of training pictures."""
    new: Listed
    """Prompts that no training picture has."""
    base: Listed
    """Prompts that the base was made for."""
    source: str
    """Name of the source whose pictures are learnt; empty for the only one."""
    pictures: Pictures

    @property
    def by_name(self) -> dict[str, Listed]:
        return {"trained": self.trained, "new": self.new, "base": self.base}

    def requests(self, config: Config) -> dict[str, list[ImageRequest]]:
        """An image for each prompt, its number i with the seed `sampling.seed` + i."""
        return {name: images.of_metric(config, own.texts) for name, own in self.by_name.items()}

    def document(self) -> dict[str, Any]:
        """For the file of the result."""
        prompts = {name: {"origin": own.origin, "texts": [*own.texts]} for name, own in self.by_name.items()}
        return {"source": self.source, "pictures": self.pictures.total, "prompts": prompts}


@dataclass(frozen=True)
class Pictures:
    """Training pictures that differ, by number from 0 on (`images.ImageSet`)."""

    images: SourceImages
    kept: tuple[int, ...]
    """Their numbers in `images`."""
    digest: str
    """SHA-256 of their pixels, hex."""

    @property
    def total(self) -> int:
        return len(self.kept)

    @property
    def texts(self) -> list[str]:
        """The caption of each."""
        return [self.images.texts[i] for i in self.kept]

    def of(self, ids: range) -> list[np.ndarray]:
        return [self.images.of(range(self.kept[i], self.kept[i] + 1))[0] for i in ids]


def distinct(images: SourceImages) -> Pictures:
    """The pictures, each once: a source without an end shows its own again and again, and two equal pictures are nearer
    to each other than to any copy."""
    first: dict[str, int] = {}
    for i in range(images.total):
        (pixels,) = images.of(range(i, i + 1))
        first.setdefault(sha256(f"{pixels.shape} ".encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest(), i)
    return Pictures(images, tuple(first.values()), sha256("".join(first).encode()).hexdigest())


def lists(
    config: Config, count: int, source: str | None = None, new_file: str | None = None, base_file: str | None = None
) -> Lists:
    """`count` prompts of each list, in turn where there are fewer. UserError where a list would be empty.

    Args:
        source: the source whose pictures are learnt; None: the one with the fewest.
        new_file: prompts that no training picture has, as for `generate`; None: held-out captions, else the recipe's.
        base_file: prompts that the base was made for; None: held-out captions of the run whose model the base is, else
            general ones.
    """
    train, held_out = open_datasets(config.data, ["train", "held_out"])
    name, number = _chosen(config, train, source)
    side = config.data.resolution
    pictures = distinct(SourceImages(_one(train, number), _MOST_PICTURES, side))
    captions = pictures.texts
    new = _of_file(new_file, count) if new_file else _new(config, held_out, number, {*captions}, count)
    base = _of_file(base_file, count) if base_file else _of_base(config, count)
    trained = Listed(_in_turn(captions, count), f"captions of {pictures.total} training pictures")
    return Lists(trained, new, base, name, pictures)


def _chosen(config: Config, train: Dataset, source: str | None) -> tuple[str, int]:
    names = [*config.data.named()]
    if source is not None:
        if source not in names:
            raise UserError(
                f"source={source}: the run's data has {', '.join(filter(None, names)) or 'one source without a name'}",
                code="unknown",
                setting="source",
            )
        return source, names.index(source)
    # Beside the pictures that are learnt others stand for what shall be kept, and those are more.
    sizes = [float("inf") if chosen is None else len(chosen.numbers) for chosen in train.selections]
    number = min(range(len(sizes)), key=sizes.__getitem__)
    return names[number], number


def _one(dataset: Dataset, number: int) -> Dataset:
    rows = slice(number, number + 1)
    own = {name: getattr(dataset, name)[rows] for name in ("members", "selections", "weights")}
    return replace(dataset, **own)


def _in_turn(texts: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(texts[i % len(texts)] for i in range(count))


def _of_file(place: str, count: int) -> Listed:
    rows = [row.prompt for row, _ in zip(generation_prompts.of_file(place).rows(), range(count), strict=False)]
    return Listed(_in_turn(rows, count), place)


def _new(config: Config, held_out: Dataset, number: int, trained: set[str], count: int) -> Listed:
    own = _one(held_out, number)
    captions = [] if own.size == 0 else loader.fixed_captions(own, 4 * count)
    found = [text for text in dict.fromkeys(captions) if text not in trained][:count]
    # Of twenty pictures one is held out: one caption alone would say little of new prompts.
    more = [text for text in config.sampling.prompts or () if text not in {*trained, *found}][: count - len(found)]
    if found or more:
        places = [place for place, texts in (("held-out captions", found), ("sampling.prompts", more)) if texts]
        return Listed(_in_turn([*found, *more], count), " and ".join(places))
    raise UserError(
        "there are no new prompts to see by whether training pictures come back: no picture is held out with a caption "
        "of its own, and sampling.prompts has none but training captions. Give prompts_file=FILE, or set "
        "sampling.prompts",
        code="missing",
        setting="sampling.prompts",
    )


def _of_base(config: Config, count: int) -> Listed:
    place = getattr(config.model, "pretrained_model_name_or_path", None)
    run = RunFolder(Path(str(place)).expanduser().resolve().parent)
    if place is not None and run.config.is_file():
        try:
            (held_out,) = open_datasets(configs.load(str(run.path)).config.data, ["held_out"])
            captions = [] if held_out.size == 0 else loader.fixed_captions(held_out, count)
        except UserError:  # its data is not on this machine
            captions = []
        if captions:
            return Listed(_in_turn(captions, count), f"held-out captions of the base's run {run.path.name}")
    return Listed(_in_turn(_GENERAL.read_text(encoding="utf-8").splitlines(), count), "general prompts")
