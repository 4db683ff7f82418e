"""Image requests made of prompts, each with its number, seed and size.

A list is read from its start whenever it is needed, so that one of any length takes no memory.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from daguerre.errors import UserError
from daguerre.generation.generate import ImageRequest
from daguerre.generation.prompts import Prompts, Row
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Prompt

RESERVED = frozenset({"request"})
"""File names that the folder of a list needs itself."""


@dataclass(frozen=True)
class Survey:
    """Counts of a whole list."""

    images: int
    sizes_px: Mapping[tuple[int, int], int]
    """Images by height and width."""


@dataclass(frozen=True)
class RequestList:
    """The images of all prompts, in their order."""

    prompts: Prompts
    sampling: SamplingSettings
    """`num_images` of each prompt, if its row gives no number."""
    size_px: tuple[int, int]
    """Height and width of an image whose row gives none."""
    taken: frozenset[str] = field(default=frozenset())
    """Keys of an image's JSON that a file's columns must leave alone."""
    captioned: bool = False
    """Each image needs words, as samples of a data set do."""

    def __iter__(self) -> Iterator[ImageRequest]:
        number = 0
        for row in self.prompts.rows():
            for copy in range(self._copies(row)):
                yield self._request(row, number, copy)
                number += 1

    def survey(self) -> Survey:
        """Reads the list once. UserError for a row that cannot be generated, or names that are not unique."""
        names: set[int] = set()
        sizes: Counter[tuple[int, int]] = Counter()
        images = 0
        for row in self.prompts.rows():
            self._check(row)
            for copy in range(self._copies(row)):
                one = self._request(row, images, copy)
                images += 1
                sizes[one.size_px] += 1
                _note_name(one, row, names)
        if names and len(names) < images:
            raise UserError(
                f"{self.prompts.name}: {images - len(names):,} of {images:,} images have no file_name: set it in "
                "every row, or in none",
                code="missing",
            )
        return Survey(images, sizes)

    def _copies(self, row: Row) -> int:
        return self.sampling.num_images if row.num_images is None else row.num_images

    def _scale(self, row: Row) -> float:
        return self.sampling.guidance_scale if row.guidance_scale is None else row.guidance_scale

    def _request(self, row: Row, number: int, copy: int) -> ImageRequest:
        height, width = self.size_px
        name, scale = row.file_name, self._scale(row)
        # A row without guidance has no unguided side, so the command's negative prompt does not concern it.
        usual = self.sampling.negative_prompt if scale > 1 else ""
        return ImageRequest(
            number,
            Prompt(row.prompt, usual if row.negative_prompt is None else row.negative_prompt),
            self.sampling.seed + number if row.seed is None else row.seed + copy,
            (row.height or height, row.width or width),
            scale,
            f"{name}-{copy}" if name and self._copies(row) > 1 else name,
            row.metadata,
        )

    def _check(self, row: Row) -> None:
        scale = self._scale(row)
        if row.negative_prompt and scale <= 1:
            raise UserError(
                f"{row.where}: negative_prompt is {row.negative_prompt!r} and guidance_scale is {scale:g}, and "
                "without guidance a negative prompt has no effect: raise guidance_scale or remove negative_prompt",
                code="unused",
            )
        if self.captioned and not row.prompt.strip():
            raise UserError(f"{row.where}: the prompt is empty, but samples in shards need a caption: remove the row")
        if clash := sorted(self.taken & row.metadata.keys()):
            raise UserError(
                f"{row.where}: {', '.join(clash)} is already a key of each image's JSON: rename or remove the column",
                code="conflict",
            )


def _note_name(one: ImageRequest, row: Row, names: set[int]) -> None:
    """Notes a name of the file's own. UserError if it was there before. Digests take a tenth of the names' memory."""
    if one.name is None:
        return
    key = xxhash.xxh3_64_intdigest(one.name.lower().encode("utf-8", "replace"))
    if key in names:
        raise UserError(f"{row.where}: file_name {one.name!r} is used twice: each image needs its own name")
    if one.name.lower() in RESERVED:
        raise UserError(f"{row.where}: file_name {one.name!r} is reserved: choose another name")
    names.add(key)
