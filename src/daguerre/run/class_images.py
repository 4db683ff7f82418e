"""Pictures that a source wants drawn before training: DreamBooth's class pictures, so that a model that learns one
thing does not forget its kind.

They are drawn by the model that training starts from, once: what is in the folder is kept and counted. How pictures are
drawn and written is generation/fill.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daguerre.build.parts import Parts
from daguerre.config.config import Config
from daguerre.data.dataset import open_dataset
from daguerre.data.settings import GenerateSettings
from daguerre.data.sources import folder
from daguerre.errors import FAILED, UserError
from daguerre.formatting import duration_text
from daguerre.generation import fill, generate
from daguerre.models import compatibility
from daguerre.models.settings import BASE

_FIRST = "drawn-00000.json"


class Stopped(UserError):
    """A signal came while pictures were drawn; there is no run yet that could be saved."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Wish:
    """Pictures that a source wants."""

    setting: str
    """Where it is said, such as `data.sources.class.generate`."""
    folder: Path
    prompt: str
    count: int
    seed: int

    @property
    def missing(self) -> int:
        """Pictures that are still to be drawn."""
        return max(0, self.count - fill.pictures_in(self.folder))


def wishes(config: Config) -> Iterator[Wish]:
    """What the sources of a recipe want."""
    for name, source in config.data.named().items():
        if isinstance(source, folder.Settings) and source.generate is not None:
            made: GenerateSettings = source.generate
            prompt = made.prompt or source.captions.text
            assert prompt is not None, "the settings have checked it"
            setting = f"data{name and '.sources.' + name}.generate"
            yield Wish(setting, Path(source.path).expanduser(), prompt, made.count, made.seed)


def told(config: Config) -> list[str]:
    """What would be drawn before training, in lines; nothing where no source wants more than there is."""
    return [
        f"{wish.setting}: {wish.missing:,} pictures of {wish.prompt!r} will be drawn into {wish.folder} before training"
        for wish in wishes(config)
        if wish.missing
    ]


def draw(config: Config, parts: Parts, stop: Callable[[], int]) -> list[str]:
    """Draws what is missing with the net as it is; says what was done, a line each.

    UserError where the model cannot draw, or a folder holds pictures that were drawn otherwise. `stop` is asked between
    batches and gives the exit code where a signal came, else 0: then `Stopped` is raised.
    """
    refuse_other_predictions(config, parts)
    wanted, made_with = list(wishes(config)), _made_with(config)
    for wish in wanted:
        _refuse_others(wish, config, made_with)
        if wish.missing:
            _refuse_strangers(wish, config, parts)
    if any(wish.missing for wish in wanted):
        open_others(config)
    return [_drawn(wish, config, parts, made_with, stop) for wish in wanted if wish.missing]


def refuse_other_predictions(config: Config, parts: Parts) -> None:
    """UserError where DreamBooth starts from a UNet that predicts something else: its few updates teach one thing."""
    pretrained = parts.family.pretrained
    wish = next(wishes(config), None)
    if wish is None or config.init_from is not None or pretrained is None:
        return
    if why := compatibility.prediction(pretrained, parts.objective):
        raise UserError(
            f"{wish.setting}: DreamBooth takes too few updates for this: {why}. Take the objective of the base, or "
            "train another one all the same with model.scheduler=null, which compares nothing"
        )


def open_others(config: Config) -> None:
    """UserError where what is trained on beside these pictures cannot be read: minutes earlier than after drawing."""
    for source in config.data.sources.values():
        if getattr(source, "generate", None) is None:
            open_dataset(source, "train")


def _drawn(wish: Wish, config: Config, parts: Parts, made_with: Mapping[str, Any], stop: Callable[[], int]) -> str:
    side = config.data.resolution
    sampling = config.sampling.model_copy(update={"seed": wish.seed})
    print(f"{wish.setting}: drawing {wish.missing:,} pictures of {wish.prompt!r} into {wish.folder}", flush=True)
    began, training = time.monotonic(), parts.net.training
    parts.net.eval()
    filled = fill.fill(
        parts, sampling, wish.prompt, wish.folder, wish.count, size_px=(side, side), made_with=made_with,
        stop=lambda: bool(stop()),
    )  # fmt: skip
    parts.net.train(training)
    if filled.missing:
        raise Stopped(
            f"stopped while class pictures were drawn: {wish.folder} has {wish.count - filled.missing:,} of "
            f"{wish.count:,}, and the same command draws the others",
            stop() or FAILED,
        )
    took = duration_text(time.monotonic() - began)
    return f"{wish.setting}: drew {filled.drawn:,} pictures of {wish.prompt!r} (seed {wish.seed}) in {took}"


def _made_with(config: Config) -> dict[str, Any]:
    """Which model draws; a folder by its whole path, wherever the command is given."""
    model = config.model
    found: dict[str, Any] = {
        "base": getattr(model, "pretrained_model_name_or_path", None),
        "revision": getattr(model, "revision", None),
        **{name: value for name, value in model.places.items() if value != BASE},
        "init_from": config.init_from,
    }
    return {name: _whole(value) for name, value in found.items() if value is not None}


def _whole(value: Any) -> Any:
    return str(Path(value).resolve()) if isinstance(value, str) and Path(value).exists() else value


def _refuse_others(wish: Wish, config: Config, made_with: Mapping[str, Any]) -> None:
    """UserError where the folder's drawn pictures are of another prompt, size or model."""
    path = wish.folder / _FIRST
    if not path.is_file():
        return
    side = config.data.resolution
    wanted = {"prompt": wish.prompt, "height": side, "width": side, **made_with}
    before: dict[str, Any] = json.loads(path.read_bytes())
    names = [
        *wanted,
        *(
            name
            for name in ("revision", *config.model.networks(), "init_from")
            if name in before.keys() - wanted.keys()
        ),
    ]
    differs = [name for name in names if before.get(name) != wanted.get(name)]
    if differs:
        listed = ", ".join(f"{name} {before.get(name)!r}, now {wanted.get(name)!r}" for name in differs)
        raise UserError(
            f"{wish.setting}: the pictures in {wish.folder} were drawn otherwise ({listed}). Give another folder, "
            "remove this one to have them drawn anew, or remove the setting to train on them as they are"
        )


def _refuse_strangers(wish: Wish, config: Config, parts: Parts) -> None:
    """UserError where the model that training starts from cannot draw yet."""
    way_out = f"Put {wish.count:,} pictures into {wish.folder}, or remove the setting"
    try:
        generate.drawing(parts)
    except UserError as error:
        raise UserError(f"{wish.setting}: {error}. {way_out}") from None
    if config.init_from is not None:
        return
    random = [f"model.{name}" for name, place in config.model.places.items() if not isinstance(place, str)]
    if random:
        why = f"{', '.join(random)} starts from random weights, which draw noise"
    elif said := parts.family.remarks(parts.objective):
        why = f"this recipe's objective is not what the weights were trained for ({'; '.join(said)})"
    else:
        return
    raise UserError(f"{wish.setting}: nothing can be drawn before training: {why}. {way_out}")
