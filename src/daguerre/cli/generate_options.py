"""The command line of `generate`, sorted: its own options, settings that pictures depend on, and what only trains.

Names that other trainers use are accepted as in `train`; those that say nothing about pictures are named in a line.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from daguerre.config import config as configs
from daguerre.config import fields, overrides, source_forms
from daguerre.config import options as config_options
from daguerre.config.aliases import lookup
from daguerre.config.aliases.relative import look_in
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.generation import load
from daguerre.generation.load import Model
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import ADDRESS, Idle, Settings

PLACE = ("output_dir", "run_name")
SAMPLING = tuple(name for name in SamplingSettings.model_fields if name != "prompts")
MAY_CHANGE = (
    "sampling.",
    "training.device",
    "training.mixed_precision",
    "training.frozen_precision",
    "training.attention",
    "training.matmul_precision",
    "training.max_device_memory",
    "resume_from_checkpoint",
)
"""Settings that pictures of a trained run may be drawn with in another way; those of its networks are fixed."""
_OF_BASE = ("model.", "objective.")
_BATCH = "training.per_device_batch_size"


EXAMPLES = {"prompt_file": "prompts_file", "out_dir": "out"}
"""Flags of open-diffusion's generate_examples.py that are options here."""


class Options(Settings):
    """What `generate` takes beside settings."""

    prompt: str | None = None
    """What to draw."""
    out: Annotated[str | None, ADDRESS] = None
    """Folder for the pictures."""
    format: Literal["png", "jpeg", "webp", "webdataset"] = "png"
    """Files of pictures, or tar shards of them."""
    quality: int | None = Field(None, ge=1, le=100)
    """Of JPEG and WebP."""
    shard_image: Literal["jpeg", "png", "webp"] = "jpeg"
    """What the pictures in shards are."""
    shard_samples: int = Field(1000, ge=1)
    """Pictures of a shard."""
    shard: str | None = None
    """Which part of the list is drawn, such as 2/8."""
    contact_sheet: bool = True
    """Write a page that shows the pictures."""
    base: bool = False
    """Draw with the pretrained networks as they are."""
    weights: Literal["ema", "raw"] | None = None
    """Which weights of a checkpoint; None: the averaged ones, if it has them."""

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("shard_image", "shard_samples"), lambda own: own.format != "webdataset", "only with format=webdataset"),
        Idle(
            ("quality",),
            lambda own: "png" in (own.format, own.shard_image if own.format == "webdataset" else ""),
            "PNG keeps every pixel as it is; only JPEG and WebP have a quality",
        ),
    )

    @property
    def image(self) -> Literal["jpeg", "png", "webp"]:
        """What pictures are, alone or in shards."""
        return self.shard_image if self.format == "webdataset" else self.format


@dataclass(frozen=True)
class Arguments:
    """What the command line asks for."""

    options: Options
    model: Model
    config: Config
    """With the settings of the command line."""
    notices: tuple[str, ...]
    own_prompts_file: bool
    """Whether the command line names one."""


@dataclass
class _Sorted:
    """Settings of the command line, by what they are for."""

    place: list[str] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)


def read(arguments: Sequence[str]) -> Arguments:
    """UserError or ConfigError for what cannot be."""
    words = [f"out={arguments[i + 1]}" if word == "-o" else word for i, word in _words(arguments)]
    notices: list[str] = []
    given = _of_examples(overrides.split(words), notices)
    options, rest = config_options.own_options(given.overrides, Options)
    pairs = [overrides.pair(override) for override in rest]
    place = [f"{path}={text}" for key, text in pairs for path, text in _place(key, text)]
    model = load.find(given.recipe, place, options.base)
    plain = model.trained or model.config(()).config
    changes = _changes(model, plain, [pair for pair in pairs if not _place(*pair)], notices)
    set_now = {change.partition("=")[0] for change in changes}
    if "sampling.num_images" not in set_now:
        changes.append("sampling.num_images=1")
    loaded = model.config(changes)
    _refuse_other_changes(model, plain, loaded.config)
    own_file = "sampling.prompts_file" in set_now
    if own_file and options.prompt is not None:
        raise UserError("prompt and prompts_file were both given: choose one")
    return Arguments(options, model, loaded.config, tuple(dict.fromkeys([*notices, *loaded.notices])), own_file)


def _of_examples(given: overrides.Arguments, notices: list[str]) -> overrides.Arguments:
    """The arguments without flags of generate_examples.py: what each is here."""
    recipe, kept = given.recipe, []
    for key, text in map(overrides.pair, given.overrides):
        if key == "pipeline" and not recipe:
            recipe = text
        elif key == "scratch_dir":
            notices.append("scratch_dir has no effect: each picture is written to its place at once")
        elif key == "tar":
            kept.append("format=webdataset")
        else:
            kept.append(f"{EXAMPLES.get(key, key)}={text}")
    return replace(given, recipe=recipe, overrides=tuple(kept))


def _words(arguments: Sequence[str]) -> list[tuple[int, str]]:
    """The words with their places; what follows `-o` is taken with it."""
    found = []
    for i, word in enumerate(arguments):
        if word == "-o" and i + 1 == len(arguments):
            raise UserError("-o needs a value: write -o FOLDER")
        if i == 0 or arguments[i - 1] != "-o":
            found.append((i, word))
    return found


def _place(key: str, text: str) -> list[tuple[str, str]]:
    """What a pair says about where the run is, by our own names or others'."""
    if key in SAMPLING or key == "resolution":
        return []
    return [(path, value) for path, value in lookup.translate(key, text).values if path in PLACE]


def _changes(model: Model, plain: Config, pairs: Sequence[tuple[str, str]], notices: list[str]) -> list[str]:
    """Overrides of the config for what pictures depend on; what only matters for training is said and left out."""
    tree = plain.model_dump()
    leaves, sections = fields.leaves(Config, tree), list(fields.sections(Config, tree))
    look = look_in(dict(pairs), source_forms.flat(tree))
    changes = []
    for key, text in pairs:
        if key.removeprefix("sampling.") in SAMPLING:
            changes.append(f"sampling.{key.removeprefix('sampling.')}={text}")
            continue
        if key == "resolution":
            changes += [f"sampling.height={text}", f"sampling.width={text}"]
            continue
        meaning = lookup.translate(key, text, look)
        notices += meaning.notices
        for path, value in meaning.values:
            found = overrides.find(path, leaves, sections)
            full = ".".join([found[0], *found[1]]) if found else path
            if found is None:
                _refuse_misspelt(key)
            is_theirs = path != key or "." not in key
            if full == _BATCH:
                changes.append(f"sampling.batch_size={value}")
            elif found and is_theirs and not full.startswith(_allowed(model)):
                notices.append(f"{key} matters for training alone, and not for pictures: left out")
            else:
                changes.append(f"{full}={value}")
    return changes


def _refuse_misspelt(key: str) -> None:
    """UserError for an unknown key that is nearly one of `generate`; the config knows what other keys are near."""
    near = difflib.get_close_matches(key, [*Options.model_fields, *SAMPLING], n=1, cutoff=0.75)
    if near:
        raise UserError(f"there is no option {key}; did you mean {near[0]}?")


def _allowed(model: Model) -> tuple[str, ...]:
    """Beginnings of the settings that the command may change."""
    return MAY_CHANGE if model.kind == "run" else (*MAY_CHANGE, *_OF_BASE)


def _refuse_other_changes(model: Model, plain: Config, config: Config) -> None:
    """UserError for settings that were given but are fixed by the run, or mean nothing here."""
    paths = [change.path for change in configs.diff(plain, config) if not change.path.startswith(_allowed(model))]
    if not paths:
        return
    fixed = f"fixed when {model.run.path} was trained, or " if model.run else ""
    known = [name for name in Options.model_fields if name != "base"]
    raise UserError(
        f"{', '.join(paths)}: {fixed}without effect on pictures; `generate` takes "
        f"{', '.join([*known, *SAMPLING, *(name.rstrip('.') for name in _allowed(model)[1:])])}"
    )
