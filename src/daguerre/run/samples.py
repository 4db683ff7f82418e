"""The pictures that a run draws of itself at each save: which they are, and their files in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from daguerre.build.parts import Parts
from daguerre.checkpoint.atomic import make_folder, write_json_atomically
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.generation import generate
from daguerre.generation import prompts as generation_prompts
from daguerre.generation.generate import Drawn, Wanted
from daguerre.generation.prompts import Prompts, Row
from daguerre.generation.requests import PictureList
from daguerre.run import known_words

LISTING = "samples.json"


def wanted(config: Config, captions: Callable[[int], list[str]]) -> list[Wanted]:
    """`sampling.num_images` pictures of the prompts of the recipe or of its file, in turn; without either, of
    `captions`. Picture i has the seed `sampling.seed` + i, where its row in the file says no other."""
    sampling = config.sampling
    if not sampling.num_images:
        return []
    if sampling.prompts_file is not None:
        rows = list(islice(generation_prompts.of_file(sampling.prompts_file).rows(), sampling.num_images))
    else:
        rows = [Row(prompt) for prompt in sampling.prompts or captions(sampling.num_images)]
    each = [_in_turn(rows[i % len(rows)], i // len(rows)) for i in range(sampling.num_images)]
    single = sampling.model_copy(update={"num_images": 1})
    listed = PictureList(Prompts("prompts_file", "", lambda: iter(each)), single, config.data.resolution, generate.KEYS)
    listed.survey()  # for what it refuses
    return list(listed)


def _in_turn(row: Row, turn: int) -> Row:
    """The row for its picture number `turn`."""
    if row.num_images is not None:
        raise UserError(
            f"{row.where}: the column num_images is for `generate`: a run draws sampling.num_images pictures in all at "
            "each save; remove the column, or repeat the row"
        )
    return replace(row, seed=None if row.seed is None else row.seed + turn, file_name=None)


def check(config: Config, parts: Parts) -> None:
    """UserError for pictures that could not be drawn: now, and not after hours of training."""
    if not config.sampling.num_images or not parts.family.generates:
        return
    for height, width in {one.size_px for one in wanted(config, lambda count: [""] * count)}:
        parts.family.latent_shape((3, height, width))


def strange_words(config: Config) -> list[str]:
    """What to say of words in the prompts of the recipe that training does not teach; its captions it does."""
    prompts = [one.prompt.text for one in wanted(config, lambda count: [""] * count)]
    return known_words.told(config, [*prompts, *([config.sampling.negative_prompt] if prompts else [])])


def write(
    parts: Parts,
    config: Config,
    each: Sequence[Wanted],
    folder: Path | None,
    made_with: Mapping[str, Any],
    show: Callable[[Drawn], None] = lambda drawn: None,
) -> None:
    """Draws `each` into `folder`/000.png, 001.png ...; without a folder for nothing but the company of other devices.

    `folder`/samples.json, written last, says of each how it was made; `made_with` goes into each entry. Files of the
    same names are overwritten. `show` gets each picture that was written.
    """
    refused: OSError | None = None
    listing: dict[int, dict[str, Any]] = {}
    for drawn in generate.draw_all(parts, config.sampling, each):
        one = drawn.wanted
        if folder is None or refused:
            continue  # other devices still need this one to draw
        path = folder / f"{generate.numbered(one.number, len(each))}.png"
        try:
            make_folder(folder)
            Image.fromarray(drawn.pixels_HWC).save(path)
            show(drawn)
        except OSError as error:
            refused = error
        listing[one.number] = {"file": path.name, **one.about, **generate.about(parts, config.sampling, one)}
        listing[one.number] |= dict(made_with)
    if refused is not None:
        raise refused
    if folder is not None:
        write_json_atomically(folder / LISTING, [listing[number] for number in sorted(listing)])
