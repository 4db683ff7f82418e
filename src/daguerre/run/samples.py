"""The sample images of a run at each save, and their files in the run folder."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from daguerre import documents, regular
from daguerre.assembly.parts import Components
from daguerre.checkpoint.atomic import make_folder, write_json_atomically
from daguerre.conditions.condition import ControlImages, computed, drawing
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.generation import generate, prompt_syntax
from daguerre.generation import prompts as generation_prompts
from daguerre.generation.generate import GeneratedImage, ImageRequest
from daguerre.generation.image_files import Encoding
from daguerre.generation.prompts import Prompts, Row
from daguerre.generation.requests import RequestList
from daguerre.models.family import Family
from daguerre.run import known_words
from daguerre.samplers.guidance import CLASSIFIER_FREE
from daguerre.types import CONTROLS, IMAGE, REFERENCES, SEEN, Batch

_PNG = Encoding()
LISTING = "samples.json"
CONTROL_FILES = "control_files"
"""In the listing: the files of an image's control and reference images, and of the one that it was made again of, by
name."""
STRENGTHS = "strengths"
"""Folder below the samples with images by the strength of adapters."""
ASKED = "asked"
"""Folder below the samples with images that somebody asked for, in a folder for each action."""
COMPARED = 3
"""Sample images that are generated at each strength."""


def requests(config: Config, captions: Callable[[int], list[str]]) -> list[ImageRequest]:
    """`sampling.num_images` images of the prompts of the recipe or of its file, in turn; without either, of
    `captions`. Image i has the seed `sampling.seed` + i, unless its row in the file gives one."""
    sampling = config.sampling
    if not sampling.num_images:
        return []
    if sampling.prompts_file is not None:
        # As many as are generated: a file of millions of prompts is not read to its end.
        rows = list(islice(generation_prompts.of_file(sampling.prompts_file).rows(), sampling.num_images))
    else:
        rows = [Row(prompt) for prompt in sampling.prompts or captions(sampling.num_images)]
    each = [_in_turn(rows[i % len(rows)], i // len(rows)) for i in range(sampling.num_images)]
    single = sampling.model_copy(update={"num_images": 1})
    prompts, size_px = Prompts("prompts_file", "", lambda: iter(each)), generate.image_size(config, "sample")
    guidance = config.model.guidance or CLASSIFIER_FREE
    listed = RequestList(prompts, single, size_px, generate.KEYS, guidance=guidance)
    listed.survey()  # for its UserErrors
    return list(listed)


def with_images(
    family: Family, each: Sequence[ImageRequest], batches: Iterable[Batch], names: Collection[str]
) -> list[ImageRequest]:
    """The same requests with images of samples, such as the control images `names`, in turn, as far as a sample has
    them: each is generated in the size that the family gives an image of its own. UserError if there is no sample."""
    pairs = [(batch, row) for batch in batches for row in range(len(batch.names)) if batch.valid_B[row]]
    if not pairs:
        raise UserError(f"no sample has {', '.join(names)}, so sample images cannot be generated", code="missing")
    found = []
    for number, one in enumerate(each):
        batch, row = pairs[number % len(pairs)]
        images = {
            name: batch.images[name][row].permute(1, 2, 0).numpy()
            for name in (*names, *SEEN.values())
            if name in batch.images
        }
        if not images:  # a sample without reference images
            found.append(one)
            continue
        _, height, width = batch.pixel_shape
        size_px = family.generated_px((height, width))
        found.append(replace(one, prompt=replace(one.prompt, images=images), size_px=size_px))
    return found


def control_images(wanted: ControlImages, pixels_HWC: np.ndarray, number: int) -> dict[str, np.ndarray]:
    """The control images of an image [H, W, 3] uint8, as the conditions compute them; `number` is its seed."""
    return {
        name: computed(condition, pixels_HWC, drawing(0, name, (number, 0, 0)))
        for name, condition in wanted.items()
        if condition is not None
    }


def _in_turn(row: Row, turn: int) -> Row:
    """The row for its image number `turn`."""
    if row.num_images is not None:
        raise UserError(
            f"{row.where}: the column num_images is for `generate`: a run generates sampling.num_images images in all "
            "at each save; remove the column, or repeat the row",
            code="unused",
        )
    return replace(row, seed=None if row.seed is None else row.seed + turn, file_name=None)


def check(config: Config, parts: Components) -> None:
    """UserError for images that could not be generated: now, and not after hours of training."""
    if not config.sampling.num_images or not parts.family.generates:
        return
    wanted = requests(config, lambda count: [""] * count)
    generate.generative(parts, {name for one in wanted for name in one.images})
    for height, width in {one.size_px for one in wanted}:
        parts.family.generated.latent_shape((3, height, width))


def prompt_notices(config: Config) -> list[str]:
    """Notices of the prompts of the recipe: words that no caption teaches, marks of other programs."""
    prompts = [one.prompt for one in requests(config, lambda count: [""] * count)]
    texts = [text for prompt in prompts for text in (prompt.text, prompt.negative)]
    return [*known_words.notices(config, texts), *prompt_syntax.notices(texts)]


def first(folder: Path) -> Path | None:
    """The first image in a folder that `write` has filled; None without one."""
    try:
        name = documents.parse(regular.content(folder / LISTING))[0]["file"]
        path = folder / Path(name).name  # of this folder alone: it goes into files that are shared
    # A thumbnail in a header is worth no error, whatever the listing holds.
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return path if path.is_file() else None


def write(
    parts: Components,
    config: Config,
    each: Sequence[ImageRequest],
    folder: Path | None,
    provenance: Mapping[str, Any],
    show: Callable[[GeneratedImage], None] = lambda image: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Generates `each` into `folder`/000.png, 001.png ...; without a folder only to take part with other devices.

    The control images of image 000 lie next to it as 000.control.png, the one that it makes again as 000.image.png, and
    its reference images as 000.reference.png, 000.reference_2.png and so on.
    `folder`/samples.json, written last, has the metadata of each and `provenance`. Existing files are overwritten.
    `show` gets each image that was written. generate.Stopped where `stop` says so, and then without a listing.
    """
    refused: OSError | None = None
    listing: dict[int, dict[str, Any]] = {}
    for image in generate.generate(parts, config.sampling, each, stop):
        one = image.request
        if folder is None or refused:
            continue  # other devices still need this one to take part
        path = folder / f"{generate.numbered(one.number, len(each))}.png"
        controls = {
            name: f"{path.stem}.{name}.png" for name in (IMAGE, *CONTROLS, *REFERENCES) if name in one.prompt.images
        }
        try:
            make_folder(folder)
            _PNG.write(path, image.pixels_HWC)
            for name, file in controls.items():
                _PNG.write(folder / file, one.prompt.images[name])
            show(image)
        except OSError as error:
            refused = error
        made = generate.image_metadata(parts, config.sampling, one)
        listing[one.number] = {"file": path.name, **one.metadata, **made, **provenance}
        if controls:
            listing[one.number][CONTROL_FILES] = controls
    if refused is not None:
        raise refused
    if folder is not None:
        # In the order of numbers: requests of one size are generated together, and so out of turn.
        write_json_atomically(folder / LISTING, [listing[number] for number in sorted(listing)])
