"""What is there of a list and what is still to be drawn, as files or as shards; the drawing itself is handed in."""

from __future__ import annotations

import json
import os
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from daguerre.data.tools.pack import Shard
from daguerre.generation.contact_sheet import MOST, Example
from daguerre.generation.generate import Drawn, Wanted, in_order
from daguerre.generation.image_files import Encoding, Files, in_threads
from daguerre.generation.image_shards import Shards
from daguerre.generation.ranks import Part
from daguerre.generation.requests import PictureList
from daguerre.tracking.progress import Counter

Draw = Callable[[Iterable[Wanted]], Iterator[Drawn]]
About = Callable[[Wanted], dict[str, Any]]
_LISTING_PAUSE = 20
"""How many times as long as it takes to list shards passes before they are listed again."""


@dataclass
class Work(ABC):
    """The pictures of a list in a folder; `part` of them are this process's."""

    folder: Path
    pictures: PictureList
    total: int
    part: Part
    encoding: Encoding
    asked: dict[str, Any]
    kept: int = 0
    """Pictures of this part that were there already."""
    written: int = 0
    """Pictures of shards that were finished since."""

    @property
    @abstractmethod
    def share(self) -> int:
        """Pictures of this part."""

    @abstractmethod
    def look(self) -> None:
        """Finds out what of this part is there, by every byte."""

    @abstractmethod
    def draw(self, draw: Draw, about: About) -> None:
        """Draws and writes the rest of this part."""

    @abstractmethod
    def missing(self) -> int:
        """Pictures of the whole list that are not there; by their names alone, as other parts looked at theirs."""

    @abstractmethod
    def examples(self) -> Iterator[Example]:
        """Some pictures of the whole list, evenly spread."""

    @abstractmethod
    def where(self) -> str:
        """Where the pictures are, for people."""

    @abstractmethod
    def saved(self, drawn: int) -> str:
        """What is kept of so many pictures that were drawn when a signal came, for people."""

    def left(self, began: bool) -> int:
        """How many pictures of this part are to be drawn."""
        if began:
            self.look()
        return self.share - self.kept

    @cached_property
    def shown(self) -> frozenset[int]:
        """The numbers of the pictures on the contact sheet."""
        return frozenset(np.linspace(0, self.total - 1, min(self.total, MOST)).round().astype(int).tolist())


@dataclass
class FileWork(Work):
    """A file a picture."""

    _whole: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @property
    def share(self) -> int:
        return self.part.share(self.total)

    def look(self) -> None:
        self._whole = np.zeros(self.total, dtype=bool)
        files = self._files()
        with Counter("looking at what is there", self.share, unit="pictures") as counter:
            for number, whole in in_threads(lambda one: (one.number, files.is_whole(one)), self._mine()):
                self._whole[number] = whole
                counter.add(1)
        self.kept = int(self._whole.sum())

    def draw(self, draw: Draw, about: About) -> None:
        rest = (one for one in self._mine() if not (self._whole.size and self._whole[one.number]))
        for _ in in_threads(self._files(about).write, draw(rest)):
            pass

    def missing(self) -> int:
        files, there = self._files(), _Listed()
        return 0 if self.part.count == 1 else sum(files.image(one) not in there for one in self.pictures)

    def examples(self) -> Iterator[Example]:
        files = self._files()
        for one in self.pictures:
            if one.number in self.shown:
                path = files.image(one)
                link = path.relative_to(self.folder).as_posix()
                yield Example(path.read_bytes(), one.prompt.text, one.seed, one.size_px, link, link)

    def where(self) -> str:
        if self.total > 1:
            return f"{self.folder}: {self.total:,} pictures, a JSON beside each"
        return f"{self._files().image(next(iter(self.pictures)))}, a JSON beside it"

    def saved(self, drawn: int) -> str:
        return f"{drawn:,} pictures were drawn and are kept"

    def _mine(self) -> Iterator[Wanted]:
        return (one for one in self.pictures if one.number in self.part)

    def _files(self, about: About = lambda one: {}) -> Files:
        return Files(self.folder, self.total, self.encoding, about)


@dataclass
class _Listed:
    """Files that are there; each folder is listed once, which is quicker than asking for each file."""

    folders: dict[Path, frozenset[str]] = field(default_factory=dict)

    def __contains__(self, path: Path) -> bool:
        if path.parent not in self.folders:
            names = os.listdir(path.parent) if path.parent.is_dir() else ()
            self.folders[path.parent] = frozenset(names)
        return path.name in self.folders[path.parent]


@dataclass
class ShardWork(Work):
    """A tar shard for each stretch of the list."""

    _whole: frozenset[str] = frozenset()

    @property
    def share(self) -> int:
        return sum(len(shard.numbers) for shard in self._mine())

    def look(self) -> None:
        whole = []
        with Counter("looking at what is there", self.share, unit="pictures") as counter:
            for shard in self._mine():
                if self._shards().is_whole(shard):
                    whole.append(shard)
                counter.add(len(shard.numbers))
        self._whole = frozenset(shard.name for shard in whole)
        self.kept = sum(len(shard.numbers) for shard in whole)

    def draw(self, draw: Draw, about: About) -> None:
        shards = self._shards(about)
        shards.list_up()
        mine = {i: shard for i, shard in enumerate(shards.all()) if i in self.part and shard.name not in self._whole}
        listed_until = 0.0
        for i, wanted in groupby(self.pictures, lambda one: one.number // shards.samples_per_shard):
            if i in mine:
                self.written += shards.write(mine[i], in_order(draw, wanted)).samples
                if (begun := time.monotonic()) >= listed_until:  # it reads the index of every shard that is there
                    shards.list_up()
                    listed_until = begun + _LISTING_PAUSE * (time.monotonic() - begun)

    def missing(self) -> int:
        listed = self._shards()
        if listed.list_up():
            return 0
        return sum(len(shard.numbers) for shard in listed.all() if not (self.folder / shard.name).is_file())

    def examples(self) -> Iterator[Example]:
        shards = self._shards()
        for shard in shards.all():
            numbers = [number for number in shard.numbers.tolist() if number in self.shown]
            for number, image, about in shards.read(shard, numbers):
                known = json.loads(about)
                size_px = known["height"], known["width"]
                name = f"{shard.name}, {number:09d}"
                yield Example(image, known["prompt"], known["seed"], size_px, name, None)

    def where(self) -> str:
        count = len(self._shards().all())
        shards = f"{count:,} shards" if count > 1 else "one shard"
        return (
            f"{self.folder}: {self.total:,} pictures in {shards}; train on them with data.source=webdataset "
            f"data.path={shlex.quote(str(self.folder))}"
        )

    def saved(self, drawn: int) -> str:
        return f"{self.written:,} pictures are in finished shards, {drawn - self.written:,} of the open shard are lost"

    def _mine(self) -> list[Shard]:
        return [shard for i, shard in enumerate(self._shards().all()) if i in self.part]

    def _shards(self, about: About = lambda one: {}) -> Shards:
        size = int(self.asked["shard_samples"])
        return Shards(self.folder, self.total, size, self.encoding, about, self.asked)
