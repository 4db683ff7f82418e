"""The images that are measured, by sample id: generated ones, and those of a data set."""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from daguerre import keys
from daguerre.assembly.parts import Components
from daguerre.checkpoint.atomic import make_folder
from daguerre.config.config import Config
from daguerre.data import captions
from daguerre.data.dataset import Dataset, Member
from daguerre.data.images import decode
from daguerre.data.images.decode import Frame
from daguerre.data.images.headers import Undecodable
from daguerre.data.loading.collate import retrying
from daguerre.data.plan.buckets import Bucket
from daguerre.errors import UserError
from daguerre.evaluation.blocks import BLOCK
from daguerre.evaluation.metric import Incomplete
from daguerre.generation import generate
from daguerre.generation.generate import GeneratedImage, ImageRequest
from daguerre.generation.image_files import Encoding
from daguerre.generation.image_shards import ShardOutput
from daguerre.generation.images import made
from daguerre.generation.jobs import TaskShard
from daguerre.generation.prompts import Prompts, Row
from daguerre.generation.requests import RequestList
from daguerre.samplers.guidance import CLASSIFIER_FREE
from daguerre.samplers.settings import SamplingSettings
from daguerre.tracking.progress import Counter
from daguerre.types import REFERENCES, Prompt


class ImageSet(Protocol):
    """Images by sample id, from 0 on."""

    @property
    def total(self) -> int:
        """Images of all processes."""

    @property
    def texts(self) -> Sequence[str]:
        """The prompt or caption of each."""

    def of(self, ids: range) -> list[np.ndarray]:
        """[H, W, 3] uint8 of a block of ids that belongs to this process."""


@dataclass
class GeneratedImages:
    """Images of prompts in shards of a folder, a shard for each block: so each image is generated in the same batch,
    whoever does it."""

    folder: Path
    requests: Iterable[ImageRequest]
    sampling: SamplingSettings
    part: TaskShard
    parts: Callable[[], Components]
    """The networks; loaded when the first image is missing."""
    provenance: dict[str, Any]
    stop: Callable[[], bool]
    what: str = "generating"
    """Shown with the number of images that are done."""
    _made: bool = False

    @cached_property
    def texts(self) -> list[str]:
        return [one.prompt.text for one in self.requests]

    @property
    def total(self) -> int:
        return len(self.texts)

    def of(self, ids: range) -> list[np.ndarray]:
        self.make()
        return self._shard(ids.start // BLOCK)

    def make(self) -> None:
        """Generates what is missing of this process's part. Stopped by a signal."""
        if self._made:
            return
        make_folder(self.folder)
        self._output.find_existing()
        left = self._output.share - self._output.kept
        if left:
            self._generate(left)
        self._made = True

    def all(self) -> Iterator[np.ndarray]:
        """All images in their order. Incomplete if other processes still have some to make."""
        self.make()
        if self._output.missing():
            raise Incomplete(self.folder.name)
        for number in range(-(-self.total // BLOCK)):
            yield from self._shard(number)

    @cached_property
    def _output(self) -> ShardOutput:
        parameters = {"shard_samples": BLOCK, "prompts_sha256": digest_of_texts(self.texts), **self.provenance}
        return ShardOutput(self.folder, self.requests, self.total, self.part, parameters, encoding=Encoding("png"))

    def _generate(self, left: int) -> None:
        parts, sampling = self.parts(), self.sampling
        generate.generative(parts)
        if read := {*parts.attached.images}:
            raise UserError(
                f"this model reads {', '.join(sorted(read))} with the prompt, and `daguerre evaluate RUN` generates "
                "from prompts alone: generate images with control=FOLDER out=IMAGES (docs/controlnet.md), then measure "
                "them: `daguerre evaluate IMAGES metrics=[...]`",
                code="unsupported",
            )
        for size_px in {one.size_px for one in self.requests}:
            parts.family.latent_shape((3, *size_px))
        with Counter(self.what, left, unit="images") as counter:
            counter.add(0)

            def generated(requests: Iterable[ImageRequest]) -> Iterator[GeneratedImage]:
                for image in generate.generate(parts, sampling, requests, self.stop):
                    counter.add(1)
                    yield image

            def describe(one: ImageRequest) -> dict[str, Any]:
                return {**generate.image_metadata(parts, sampling, one), **self.provenance}

            self._output.write(generated, describe)

    def _shard(self, number: int) -> list[np.ndarray]:
        opened = (Image.open(io.BytesIO(content)) for content in self._output.images(number))
        return [np.array(image) for image in opened]


def request_list(prompts: Prompts, config: Config, size_px: tuple[int, int], most: int) -> RequestList:
    """One image for each of the first `most` prompts. UserError for prompts that cannot be evaluated."""
    limited = replace(prompts, rows=lambda: islice(prompts.rows(), most))
    single, guidance = config.sampling.model_copy(update={"num_images": 1}), config.model.guidance or CLASSIFIER_FREE
    found = RequestList(limited, single, size_px, generate.KEYS, captioned=True, guidance=guidance)
    if found.survey().inputs:
        raise UserError(
            f"{prompts.name} has images to start from, and metrics are for prompts alone: remove the column"
        )
    return found


def digest_of_texts(texts: Iterable[str]) -> str:
    """SHA-256 of prompts, hex."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def of_texts(name: str, texts: Sequence[str]) -> Prompts:
    """These texts as a list of prompts."""
    return Prompts(name, digest_of_texts(texts), lambda: (Row(text, f"{name} {i}") for i, text in enumerate(texts)))


def of_metric(config: Config, texts: Sequence[str], references: Sequence[np.ndarray] = ()) -> list[ImageRequest]:
    """The images of a metric's own prompts, each with its reference image [H, W, 3] uint8 where these are given, as
    large as those that are trained on."""
    sampling, size_px = config.sampling, generate.image_size(config, "evaluation")
    images = [{REFERENCES[0]: made(REFERENCES[0], pixels)} for pixels in references] or [{} for _ in texts]
    return [
        ImageRequest(
            i, Prompt(text, sampling.negative_prompt), sampling.seed + i, size_px, sampling.guidance_scale, images=own
        )
        for i, (text, own) in enumerate(zip(texts, images, strict=True))
    ]


def digest_of_requests(requests: Iterable[ImageRequest]) -> str:
    """SHA-256 of all that decides the images but the model and the sampling that they share, hex."""
    whole = hashlib.sha256()
    for one in requests:
        of_images = {name: image.sha256 for name, image in one.images.items()}
        decides = [one.prompt.text, one.prompt.negative, one.seed, one.size_px, one.guidance_scale, of_images]
        whole.update(f"{json.dumps(decides, sort_keys=True)}\n".encode())
    return whole.hexdigest()


@dataclass(frozen=True, eq=False)
class SourceImages:
    """The first images of a data set in its own order, or some that a seed draws."""

    dataset: Dataset
    most: int
    crop_px: int | None = None
    """Side of the middle square that each image is cut and resized to; None: images as they are."""
    sample_seed: int | None = None
    """Draws `most` of all samples; None takes the first."""

    @property
    def total(self) -> int:
        return len(self.places)

    @cached_property
    def texts(self) -> list[str]:
        found = []
        for member, number in self.places:
            plain = member.settings.model_copy(update={"caption_dropout": 0.0})
            key = np.array([member.source.sample_id(number), 0, 0], dtype=np.int64)
            found.append(captions.choose(retrying(member.source.record, number), plain, 0, key))
        return found

    @cached_property
    def places(self) -> list[tuple[Member, int]]:
        """Member and number of each image. UserError where there are fewer than two."""
        found: list[tuple[Member, int]] = []
        for member, chosen in zip(self.dataset.members, self.dataset.selections, strict=True):
            numbers = range(self.most) if chosen is None else chosen.numbers[:].tolist()
            found += [(member, number) for number in numbers]
        if self.sample_seed is not None:
            drawn = keys.permutation(self.sample_seed, "evaluation sample", 0, len(found))[: self.most]
            found = [found[index] for index in sorted(drawn.tolist())]
        if len(found) < 2:
            raise UserError(f"there is {len(found)} image to measure, and statistics need two or more", code="empty")
        return found[: self.most]

    def place(self, i: int) -> str:
        """The place of an image, for people."""
        member, number = self.places[i]
        return member.source.name(number)

    @cached_property
    def names(self) -> list[str]:
        """The name of each image without folders and suffix."""
        return [Path(member.source.name(number)).stem for member, number in self.places]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the pixels that are measured, in their order."""
        whole = hashlib.sha256()
        with Counter("digest of the images", self.total, unit="images") as counter:
            for i in range(self.total):
                (pixels,) = self.of(range(i, i + 1))
                whole.update(f"{pixels.shape} ".encode() + np.ascontiguousarray(pixels).tobytes())
                counter.add(1)
        return whole.hexdigest()

    def of(self, ids: range) -> list[np.ndarray]:
        return [self._pixels(*self.places[i]) for i in ids]

    def _pixels(self, member: Member, number: int) -> np.ndarray:
        image = retrying(member.source.record, number).image
        bucket = None if self.crop_px is None else Bucket(self.crop_px, self.crop_px)
        try:
            pixels_HWC, own_px = decode.sized(image, member.settings, None)
        except Undecodable as reason:
            raise UserError(
                f"{member.source.name(number)} cannot be measured: {reason}. Nothing is left out in silence: remove "
                "the file, or repair it",
                code="damaged",
            ) from reason
        if bucket is None:
            return pixels_HWC
        resized = bucket.covering(*own_px)
        top, left = ((size - bucket.height_px) // 2 for size in resized)
        frame = Frame(own_px, resized, top, left, bucket.height_px, bucket.width_px, False, "bicubic")
        return frame.apply(pixels_HWC).permute(1, 2, 0).numpy()


def matched(images: SourceImages, others: SourceImages) -> list[int]:
    """For each image the number of the one of the same name among the others. UserError where a name is missing."""
    numbers = {name: number for number, name in enumerate(others.names)}
    with suppress(KeyError):
        return [numbers[name] for name in images.names]
    absent = [name for name in images.names if name not in numbers]
    raise UserError(
        f"against: {len(absent)} of {images.total} images have no partner of the same name there, such as {absent[0]}",
        code="missing",
        setting="against",
    )
