"""Image requests made of prompts, each with its number, seed and size.

A list is read from its start whenever it is needed, so that one of any length takes no memory.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import xxhash

from daguerre.errors import UserError
from daguerre.generation import images as input_images
from daguerre.generation.generate import ImageRequest
from daguerre.generation.images import InputImage
from daguerre.generation.prompts import Prompts, Row
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance
from daguerre.samplers.known import steps_run
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import IMAGE, IMAGE_PROMPT, MASK, REFERENCES, Prompt, References

STRENGTH = {False: 0.8, True: 1.0}
"""Usual strength without and with a mask: diffusers' defaults."""
RESERVED = frozenset({"request"})
"""File names that the folder of a list needs itself."""


@dataclass(frozen=True)
class Survey:
    """Counts of a whole list."""

    images: int
    sizes_px: Mapping[tuple[int, int], int]
    """Images by height and width."""
    inputs: Mapping[str, int]
    """Rows with an image of each name."""
    inputs_sha256: str
    """Of these images, which row has which, hex."""
    notices: list[str]
    """For people: images that are scaled down, and those of several frames."""


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
    strength: float | None = None
    """Share of the steps that run from an image, if its row gives none. None: `STRENGTH` of images with and without a
    mask."""
    keep_unmasked: bool = True
    """See ImageRequest."""
    guidance: Guidance = CLASSIFIER_FREE
    """That of the family."""
    references: References | None = None
    """The reference images that the family reads."""
    reconstructs: bool = False
    """An image without a mask is started from only where a strength is given (FamilySettings.reconstructs)."""

    def __iter__(self) -> Iterator[ImageRequest]:
        number = 0
        for row in self.prompts.rows():
            for copy in range(self._copies(row)):
                yield self._request(row, number, copy)
                number += 1

    def texts(self) -> Iterator[str]:
        """The prompt of each row, and the negative one where it acts."""
        for number, row in enumerate(self.prompts.rows()):
            prompt = self._request(row, number, 0).prompt
            yield prompt.text
            if prompt.negative:
                yield prompt.negative
            if prompt.toward is not None:
                yield prompt.toward

    def survey(self) -> Survey:
        """Reads the list once. UserError for a row that cannot be generated, or names that are not unique."""
        names: set[int] = set()
        sizes: Counter[tuple[int, int]] = Counter()
        inputs = _Inputs(self._most_px)
        images = 0
        for number, row in enumerate(self.prompts.rows()):
            self._check(row)
            inputs.add(number, row, self._size_px(row), not any(self._sides(row)))
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
        self._check_used(inputs.counts)
        return Survey(images, sizes, inputs.counts, inputs.digest.hexdigest(), inputs.notices)

    def _copies(self, row: Row) -> int:
        return self.sampling.num_images if row.num_images is None else row.num_images

    def _scale(self, row: Row) -> float:
        return self.sampling.guidance_scale if row.guidance_scale is None else row.guidance_scale

    def _request(self, row: Row, number: int, copy: int) -> ImageRequest:
        name, scale = row.file_name, self._scale(row)
        # A row without guidance has no unguided side, so the command's negative prompt does not concern it.
        usual = self.sampling.negative_prompt if self.guidance.runs_null(scale) else ""
        negative = usual if row.negative_prompt is None else row.negative_prompt
        first = self.sampling.seed + number - copy if row.seed is None else row.seed
        # All images between two prompts start from one noise: what changes is what the prompts change.
        between = row.interpolate_to is not None
        share = copy / max(self._copies(row) - 1, 1) if between else 0.0
        return ImageRequest(
            number,
            Prompt(row.prompt, negative, toward=row.interpolate_to, share=share),
            first if between else first + copy,
            self._size_px(row),
            scale,
            f"{name}-{copy}" if name and self._copies(row) > 1 else name,
            input_images.of(row),
            self._strength(row),
            self.keep_unmasked,
            row.metadata,
            self._shown(row),
        )

    def _shown(self, row: Row) -> tuple[int, int, int, int] | None:
        """The part of an image that shows what its only reference image does: without what was added to that for its
        sides, unless a side was given."""
        if self.references is None or any(self._sides(row)):
            return None
        frames = input_images.reference_frames(input_images.of(row), self.references)
        first = next(iter(frames.values()), None)
        return first.shown if first is not None and self.references.of(len(frames)).pads else None

    @property
    def _most_px(self) -> int:
        # An image with more pixels than a model has ever drawn gets its shapes several times (rings for circles).
        return self.size_px[0] * self.size_px[1]

    def _sides(self, row: Row) -> tuple[int | None, int | None]:
        """Height and width that are given for a row."""
        return row.height or self.sampling.height, row.width or self.sampling.width

    def _size_px(self, row: Row) -> tuple[int, int]:
        height, width = self._sides(row)
        if not {*row.images} - {IMAGE_PROMPT} or (height is not None and width is not None):
            return height or self.size_px[0], width or self.size_px[1]
        first, *_ = input_images.of(row).values()
        if first.name in REFERENCES and self.references is not None:
            if self.references.sizing is None:
                return height or self.size_px[0], width or self.size_px[1]
            return self._beside_reference(row, self.references, self.references.sizing, height, width)
        return input_images.fitting(first.size_px, height, width, self._most_px)

    def _beside_reference(
        self, row: Row, rule: References, which: int, height: int | None, width: int | None
    ) -> tuple[int, int]:
        """The size in which a reference image is read, the first (0) or the last (-1); with one side given, in its
        aspect ratio."""
        frame = [*input_images.reference_frames(input_images.of(row), rule).values()][which]
        own_height, own_width, step = frame.height_px, frame.width_px, rule.step_px
        if height is not None:
            return height, max(step, own_width * height // own_height // step * step)
        if width is not None:
            return max(step, own_height * width // own_width // step * step), width
        return own_height, own_width

    def _strength(self, row: Row) -> float | None:
        if IMAGE not in row.images:
            return None
        given = self.strength if row.strength is None else row.strength
        if given is not None or (self.reconstructs and MASK not in row.images):
            return given
        return STRENGTH[MASK in row.images]

    def _check(self, row: Row) -> None:
        scale = self._scale(row)
        if fault := self.guidance.fault(scale):
            raise UserError(f"{row.where}: {fault}")
        if row.negative_prompt and not self.guidance.runs_null(scale):
            why = self.guidance.without_null(f"negative_prompt is {row.negative_prompt!r}", scale)
            raise UserError(f"{row.where}: {why}", code="unused")
        if row.interpolate_to is not None and self._copies(row) < 2:
            where = f"{row.where}: " if row.where else ""
            raise UserError(
                f"{where}interpolate_to is another prompt, to which images go in equal steps, the first by the prompt "
                "itself and the last by the other: set num_images to 2 or more",
                code="conflict",
                setting="sampling.num_images",
            )
        height, width = self._sides(row)
        given_px = (height, width) if height is not None and width is not None else None
        images = input_images.of(row)
        input_images.check(images, given_px)
        self._check_references(row, images)
        self._check_strength(row)
        if self.captioned and not row.prompt.strip():
            raise UserError(f"{row.where}: the prompt is empty, but samples in shards need a caption: remove the row")
        if clash := sorted(self.taken & row.metadata.keys()):
            raise UserError(
                f"{row.where}: {', '.join(clash)} is already a key of each image's JSON: rename or remove the column",
                code="conflict",
            )

    def _check_references(self, row: Row, images: Mapping[str, InputImage]) -> None:
        if self.references is not None:
            input_images.reference_frames(images, self.references)
        elif odd := [name for name in REFERENCES if name in images]:
            where = f"{row.where}: " if row.where else ""
            raise UserError(f"{where}this model reads no reference images: remove {', '.join(odd)}", code="unsupported")

    def _check_strength(self, row: Row) -> None:
        strength, steps = self._strength(row), self.sampling.num_inference_steps
        if IMAGE not in row.images:
            if row.strength is not None:
                raise UserError(
                    f"{row.where}: strength is {row.strength:g} and there is no image, and it acts on images "
                    "alone: add one, or leave strength empty",
                    code="unused",
                )
            return
        if strength is None:
            return
        if not 0 < strength <= 1:
            raise UserError(
                f"{row.where}: strength is {strength:g}: write a number above 0 (hardly anything changes) up "
                "to 1 (all is new)"
            )
        if not steps_run(steps, strength):
            raise UserError(
                f"strength is {strength:g} and num_inference_steps is {steps}, and int({steps} * {strength:g}) = 0 "
                f"steps would run: raise strength to {1 / steps:.2g} or more, or num_inference_steps",
                code="conflict",
            )

    def _check_used(self, inputs: Mapping[str, int]) -> None:
        """UserError for options of the whole list that concern none of its images."""
        for name, given, wanted in (
            ("strength", self.strength is not None, IMAGE),
            ("keep_unmasked", not self.keep_unmasked, MASK),
        ):
            if given and not inputs.get(wanted):
                raise UserError(
                    f"{name} acts on requests that have {wanted}=FILE, and none has: give one or remove {name}",
                    code="unused",
                    setting=name,
                )


@dataclass
class _Inputs:
    """Images that the rows of a list start from."""

    most_px: int
    """Largest area of an image whose size decides."""
    counts: Counter[str] = field(default_factory=Counter)
    digest: Any = field(default_factory=sha256)
    scaled: list[str] = field(default_factory=list)
    """Images that are larger, for people."""
    moving: dict[str, None] = field(default_factory=dict)
    """Files of several frames."""

    def add(self, number: int, row: Row, size_px: tuple[int, int], follows: bool) -> None:
        """A row, and whether its size follows its image."""
        images = input_images.of(row)
        for name, image in images.items():
            self.counts[name] += 1
            self.digest.update(f"{number} {name} {image.sha256}\n".encode())
            if image.has_frames:
                self.moving[f"{name}={image.path}"] = None
        for image in [one for one in images.values() if one.name not in REFERENCES][: int(follows)]:
            height, width = image.size_px
            if height * width > self.most_px:
                self.scaled.append(f"{image.path} of {height}x{width} px to {size_px[0]}x{size_px[1]}")

    @property
    def notices(self) -> list[str]:
        """Lines for people."""
        lines = []
        if self.scaled:
            lines.append(
                f"scaled down: {_first(self.scaled)} (height x width): no more than the {self.most_px:,} pixels of "
                "this model's own images; set height and width for another size"
            )
        if self.moving:
            lines.append(f"an animation, or pages: {_first([*self.moving])}: the first frame is used")
        return lines


def _first(names: Sequence[str]) -> str:
    return names[0] + f", and {len(names) - 1:,} more" * (len(names) > 1)


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
