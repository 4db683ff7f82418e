"""The command line of `bench`: its own options, the recipe, and the variants as overrides of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from daguerre.config import config as configs
from daguerre.config import options as config_options
from daguerre.config import overrides
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, Settings


class Options(Settings):
    """Options of `bench` other than the recipe's settings."""

    variants: dict[str, list[str]] = Field({"base": []}, min_length=1)
    """Overrides of the recipe by name, `{base: [], ckpt: [training.gradient_checkpointing=true]}`; the others are
    compared with the first."""
    part: Literal["step", "encode"] = "step"
    """`step`: whole updates; `encode`: what a step adds that has no cached latents, the frozen networks alone."""
    inputs: Literal["latents", "pixels", "loader"] = "latents"
    """Inputs of the updates: random latents with text features, made beforehand (`latents`); random images with
    captions, which the frozen networks encode in each update (`pixels`); the recipe's own data by its loader."""
    rounds: int = Field(12, ge=1)
    """Rounds at most; in each the variants take turns."""
    turn_seconds: float = Field(2.0, gt=0)
    """Length of a turn, about: as many updates as have room, one at least."""
    soak_seconds: float | None = Field(None, ge=0)
    """Training before the first round, for clocks and temperatures to settle. null: 60 on a GPU, 2 on a CPU."""
    budget_seconds: float = Field(300.0, gt=0)
    """Most time that all of it takes; what was measured by then is written."""
    out: Annotated[str | None, ADDRESS] = None
    """JSON file that everything is written to. null: bench-RECIPE.json in the current folder."""

    @field_validator("variants")
    @classmethod
    def _names_are_words(cls, variants: dict[str, list[str]]) -> dict[str, list[str]]:
        if odd := [name for name in variants if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name)]:
            raise ValueError(f"{odd[0]!r} cannot be the name of a variant: use letters, digits and . + - _")
        return variants


@dataclass(frozen=True)
class VariantConfig:
    """One way of training the recipe."""

    name: str
    overrides: tuple[str, ...]
    config: Config


@dataclass(frozen=True)
class Request:
    """A command line of `bench`, read."""

    recipe: str
    options: Options
    variants: tuple[VariantConfig, ...]
    notices: tuple[str, ...]


def read(arguments: Sequence[str]) -> Request:
    """Raises UserError or ConfigError for what is not allowed, in whichever variant."""
    given = overrides.split(arguments)
    options, rest = config_options.own_options(given.overrides, Options)
    variants: list[VariantConfig] = []
    notices: list[str] = []
    for name, own in options.variants.items():
        loaded = configs.load(given.recipe, [*rest, *own])
        variants.append(VariantConfig(name, tuple(own), loaded.config))
        notices += loaded.notices
    _check_different(variants)
    return Request(given.recipe, options, tuple(variants), tuple(dict.fromkeys(notices)))


def _check_different(variants: Sequence[VariantConfig]) -> None:
    """UserError for two names of one configuration: their ratio would be read as that of something."""
    for i, one in enumerate(variants):
        for other in variants[:i]:
            if one.config == other.config and one.overrides:
                raise UserError(
                    f"variants: {other.name} and {one.name} are the same: {', '.join(one.overrides)} changes nothing",
                    code="unused",
                    setting="variants",
                )
