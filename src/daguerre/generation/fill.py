"""A folder brought to a number of pictures of one prompt: the class pictures of DreamBooth.

What is there counts, whoever made it; what is missing is drawn, each picture whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from daguerre.build.parts import Parts
from daguerre.checkpoint.atomic import make_folder, write_bytes_atomically
from daguerre.data.folder.scan import EXTENSIONS
from daguerre.generation import generate
from daguerre.generation.generate import Drawn, Stopped, Wanted
from daguerre.generation.image_files import Encoding, Files, in_threads
from daguerre.samplers.settings import SamplingSettings
from daguerre.tracking.progress import Counter
from daguerre.types import Prompt


@dataclass(frozen=True)
class Filled:
    """What was done."""

    kept: int
    """Pictures that were there."""
    drawn: int
    missing: int
    """Pictures that are still to be drawn, where `stop` said so."""


def fill(
    parts: Parts,
    sampling: SamplingSettings,
    prompt: str,
    folder: Path,
    count: int,
    *,
    size_px: tuple[int, int],
    made_with: Mapping[str, Any] | None = None,
    what: str = "pictures",
    stop: Callable[[], bool] = lambda: False,
) -> Filled:
    """Brings `folder` to `count` pictures in all, those of folders inside counted.

    Picture i of those that are drawn is drawn-0000i.png, of seed `sampling.seed` + i; beside it are a .txt with the
    prompt, which data.source=folder reads, and a .json that says how it was made, with what `made_with` adds. Height
    and width are `size_px`. The net is used as it is. `stop` is asked before each batch.
    """
    files = Files(folder, count, Encoding("png"), partial(_about, parts, sampling, made_with or {}))
    make_folder(folder)
    wanted = [_wanted(sampling, prompt, size_px, i) for i in range(count)]
    not_whole = [one for one in wanted if not files.is_whole(one)]
    there = pictures_in(folder) - sum(files.image(one).exists() for one in not_whole)
    missing = max(0, count - there)
    drawn = 0

    def counted() -> Iterator[Drawn]:
        nonlocal drawn
        for one in generate.draw_all(parts, sampling, not_whole[:missing], stop):
            drawn += 1
            counter.add(1)
            yield one

    with Counter(f"drawing {what}", missing, unit="pictures") as counter, suppress(Stopped):
        for _ in in_threads(partial(_write, files), counted()):
            pass
    return Filled(there, drawn, missing - drawn)


def _wanted(sampling: SamplingSettings, prompt: str, size_px: tuple[int, int], number: int) -> Wanted:
    negative, scale = sampling.negative_prompt, sampling.guidance_scale
    return Wanted(number, Prompt(prompt, negative), sampling.seed + number, size_px, scale, f"drawn-{number:05d}")


def _about(parts: Parts, sampling: SamplingSettings, made_with: Mapping[str, Any], one: Wanted) -> dict[str, Any]:
    return {**generate.about(parts, sampling, one), **made_with}


def _write(files: Files, drawn: Drawn) -> None:
    """The caption first: a picture that is there has one."""
    write_bytes_atomically(files.image(drawn.wanted).with_suffix(".txt"), (drawn.wanted.prompt.text + "\n").encode())
    files.write(drawn)


def pictures_in(folder: Path) -> int:
    """Pictures in a folder and in those inside; 0 where there is none."""
    return sum(path.suffix.lower() in EXTENSIONS for path in _visible(folder))


def _visible(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
