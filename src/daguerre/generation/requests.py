"""Which pictures follow from prompts: each with its number, seed and size; and which of them are this process's.

A list is walked over from its start whenever it is needed, so that one of any length takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from daguerre.errors import UserError
from daguerre.generation.generate import Wanted
from daguerre.generation.prompts import Prompts, Row
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Prompt

RESERVED = frozenset({"request"})
"""File names that the folder of a list needs itself."""


@dataclass(frozen=True)
class Survey:
    """What a list asks for, as a whole."""

    prompts: int
    pictures: int
    sizes_px: Mapping[tuple[int, int], int]
    """Pictures by height and width."""
    own_seeds: bool
    """Whether the file gives any."""


@dataclass(frozen=True)
class PictureList:
    """The pictures of all prompts, in their order."""

    prompts: Prompts
    sampling: SamplingSettings
    """`num_images` of each prompt, where its row says nothing else."""
    resolution: int
    """Side of a picture where neither row nor settings say one."""
    taken: frozenset[str] = field(default=frozenset())
    """Keys of a picture's JSON that a file's columns must leave alone."""
    captioned: bool = False
    """Whether each picture needs words, as samples of a data set do."""

    def __iter__(self) -> Iterator[Wanted]:
        number = 0
        for row in self.prompts.rows():
            for copy in range(self._copies(row)):
                yield self._wanted(row, number, copy)
                number += 1

    def survey(self) -> Survey:
        """Walks over the list once. UserError for a row that cannot be drawn, or names that are not unique."""
        names: set[int] = set()
        sizes: dict[tuple[int, int], int] = {}
        prompts = pictures = 0
        own_seeds = False
        for row in self.prompts.rows():
            prompts += 1
            own_seeds |= row.seed is not None
            self._check(row)
            for copy in range(self._copies(row)):
                one = self._wanted(row, pictures, copy)
                pictures += 1
                sizes[one.size_px] = sizes.get(one.size_px, 0) + 1
                _take(one, row, names)
        if names and len(names) < pictures:
            raise UserError(
                f"{self.prompts.name}: {pictures - len(names):,} of {pictures:,} pictures have no file_name: give each "
                "row one, or none"
            )
        return Survey(prompts, pictures, sizes, own_seeds)

    def _copies(self, row: Row) -> int:
        return self.sampling.num_images if row.num_images is None else row.num_images

    def _wanted(self, row: Row, number: int, copy: int) -> Wanted:
        height, width = self.sampling.size_px(self.resolution)
        name = row.file_name
        scale, negative = row.guidance_scale, row.negative_prompt
        scale = self.sampling.guidance_scale if scale is None else scale
        # A row without guidance has no unguided side, so what the command leads away from does not concern it.
        usual = self.sampling.negative_prompt if scale > 1 else ""
        return Wanted(
            number,
            Prompt(row.prompt, usual if negative is None else negative),
            self.sampling.seed + number if row.seed is None else row.seed + copy,
            (row.height or height, row.width or width),
            scale,
            f"{name}-{copy}" if name and self._copies(row) > 1 else name,
            row.about,
        )

    def _check(self, row: Row) -> None:
        scale = self.sampling.guidance_scale if row.guidance_scale is None else row.guidance_scale
        if row.negative_prompt and scale <= 1:
            raise UserError(
                f"{row.where}: negative_prompt is {row.negative_prompt!r} and guidance_scale is {scale:g}, which runs "
                "no unguided side: raise guidance_scale or drop negative_prompt"
            )
        if self.captioned and not row.prompt.strip():
            raise UserError(f"{row.where}: an empty prompt, and samples of shards need a caption: leave it out")
        if clash := sorted(self.taken & row.about.keys()):
            raise UserError(
                f"{row.where}: the JSON of each picture says {', '.join(clash)} itself: rename the column, or remove it"
            )


def _take(one: Wanted, row: Row, names: set[int]) -> None:
    """Notes a name of the file's own; UserError where it was there before. Digests take a tenth of the names."""
    if one.name is None:
        return
    key = xxhash.xxh3_64_intdigest(one.name.lower().encode("utf-8", "replace"))
    if key in names:
        raise UserError(f"{row.where}: file_name {one.name!r} is there before: each picture needs a name of its own")
    if one.name.lower() in RESERVED:
        raise UserError(f"{row.where}: file_name {one.name!r} is kept for the folder's own file: choose another")
    names.add(key)
