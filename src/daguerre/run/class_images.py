"""Class images of DreamBooth, generated before training so that a model that learns one thing does not forget its kind.

They are generated once, by the model that training starts from. Images that are in the folder count, whoever made them;
each missing one is written whole or not at all.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from daguerre import documents
from daguerre.assembly.parts import Components
from daguerre.checkpoint.atomic import make_folder, write_bytes_atomically
from daguerre.config.config import Config
from daguerre.data.dataset import naming, open_dataset
from daguerre.data.folder.scan import EXTENSIONS
from daguerre.data.sources import folder
from daguerre.errors import FAILED, UserError
from daguerre.formatting import format_duration
from daguerre.generation import generate
from daguerre.generation.generate import GeneratedImage, ImageRequest, image_size
from daguerre.generation.image_files import Encoding, Files, in_threads
from daguerre.models import compatibility, encoders
from daguerre.models.frozen import in_evaluation
from daguerre.models.settings import BASE
from daguerre.samplers.settings import SamplingSettings
from daguerre.tracking.progress import Counter
from daguerre.types import Prompt


class Stopped(UserError):
    """A signal came while images were generated; there is no run yet that could be saved."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text, code="failed")
        self.exit_code = exit_code


@dataclass(frozen=True)
class ClassImageRequest:
    """Images that a source asks for."""

    setting: str
    """Path of the setting, such as `data.sources.class.generate`."""
    folder: Path
    prompts: tuple[str, ...]
    """Image i is generated from prompt i; after the last comes the first again."""
    count: int
    seed: int

    @property
    def shown(self) -> str:
        """The prompts in short form, for messages."""
        others = f" and {len(self.prompts) - 1} more prompts" if self.prompts[1:] else ""
        return f"{self.prompts[0]!r}{others}"

    @property
    def missing(self) -> int:
        """Images that are still to be generated."""
        return max(0, self.count - images_in(self.folder))


def requests(config: Config) -> list[ClassImageRequest]:
    """Everything that the sources of a recipe ask for."""
    found = []
    for name, source in config.data.named().items():
        if isinstance(source, folder.Settings) and (asked := source.generate) is not None:
            prompt = asked.prompt or source.captions.text
            assert prompt is not None, "the settings have checked it"
            setting = f"data{name and '.sources.' + name}.generate"
            prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
            found.append(ClassImageRequest(setting, Path(source.path).expanduser(), prompts, asked.count, asked.seed))
    return found


def planned(config: Config) -> list[str]:
    """Lines about what would be generated before training."""
    return [
        f"{each.setting}: {each.missing:,} images of {each.shown} are generated into {each.folder} before training"
        for each in requests(config)
        if each.missing
    ]


def generate_missing(config: Config, parts: Components, stop: Callable[[], int]) -> list[str]:
    """Generates what is missing with the net as it is; returns a line for each request.

    UserError if the model cannot generate, or a folder holds images that were generated otherwise. `stop` is asked
    between batches and gives the exit code of a signal, else 0; at a signal this raises `Stopped`.
    """
    check_prediction(config, parts)
    asked, provenance = requests(config), _made_with(config)
    for each in asked:
        _check_same(each, config, provenance)
        if each.missing:
            _check_generates(each, config, parts)
    if any(each.missing for each in asked):
        open_others(config)
    return [_generate(each, config, parts, provenance, stop) for each in asked if each.missing]


def check_prediction(config: Config, parts: Components) -> None:
    """UserError if DreamBooth starts from a UNet that predicts something else: its few updates teach one thing.
    Or if an adapter does, whose few weights teach it little, and which is of no use on a base that predicts another."""
    asked, pretrained = requests(config), parts.family.pretrained
    few = [f"adapters.{name}" for name, own in config.adapters.items() if own.part != "all" or own.separate]
    # Weights of another run, or random ones, have no scheduler beside them that says what they predict.
    if not (asked or few) or config.init_from is not None or pretrained is None:
        return
    if why := compatibility.prediction_warning(pretrained, parts.objective):
        what = f"a DreamBooth run ({asked[0].setting}) is too short" if asked else f"an adapter ({few[0]}) is too small"
        raise UserError(
            f"objective.name={config.objective.name}: {why}. For that {what}: use the objective of the base model, as "
            "in brackets, or set model.scheduler=null to train with another one without this check",
            code="conflict",
            setting="objective.name",
        )


def open_others(config: Config) -> None:
    """Opens the other sources, so that one that cannot be read is refused before minutes of generation."""
    for name, source in config.data.named().items():
        if getattr(source, "generate", None) is None:
            with naming(name, source):
                open_dataset(source, "train")


def _generate(
    each: ClassImageRequest, config: Config, parts: Components, provenance: Mapping[str, Any], stop: Callable[[], int]
) -> str:
    sampling = config.sampling.model_copy(update={"seed": each.seed})
    print(f"{each.setting}: generating {each.missing:,} images of {each.shown} into {each.folder}", flush=True)
    # Monotonic: a clock that is set meanwhile must not make a length negative.
    began = time.monotonic()
    with in_evaluation(parts.net), encoders.present(parts.family):
        filled = fill(
            parts, sampling, each.prompts, each.folder, each.count,
            size_px=image_size(config, "class_image"), provenance=provenance, stop=lambda: bool(stop()),
        )  # fmt: skip
    if filled.missing:
        raise Stopped(
            f"stopped while class images were generated: {each.folder} has {each.count - filled.missing:,} of "
            f"{each.count:,}; run the same command again to generate the others",
            stop() or FAILED,
        )
    took = format_duration(time.monotonic() - began)
    return f"{each.setting}: generated {filled.generated:,} images of {each.shown} (seed {each.seed}) in {took}"


class Filled(NamedTuple):
    """Counts of images."""

    kept: int
    """Images that were there."""
    generated: int
    missing: int
    """Images that are still to be generated, after `stop`."""


def fill(
    parts: Components,
    sampling: SamplingSettings,
    prompts: Sequence[str],
    folder: Path,
    count: int,
    *,
    size_px: tuple[int, int],
    provenance: Mapping[str, Any],
    stop: Callable[[], bool] = lambda: False,
) -> Filled:
    """Brings `folder` to `count` images in all, those of folders inside counted.

    Image i of those that are generated is drawn-0000i.png, of prompt i (after the last comes the first again) and seed
    `sampling.seed` + i; next to it are a .txt with the prompt, which data.source=folder reads, and a .json with
    everything that it depends on and `provenance`. Height and width are `size_px`. The net is used as it is. `stop` is
    asked before each batch.
    """
    files = Files(folder, count, Encoding("png"))
    make_folder(folder)
    asked, scale = [Prompt(text, sampling.negative_prompt) for text in prompts], sampling.guidance_scale
    every = [
        ImageRequest(i, asked[i % len(asked)], sampling.seed + i, size_px, scale, f"drawn-{i:05d}")
        for i in range(count)
    ]
    not_whole = [one for one in every if not files.is_complete(one)]
    # An image without its caption or facts is that of a kill in between: it is generated again.
    kept = images_in(folder) - sum(files.image(one).exists() for one in not_whole)
    missing = max(0, count - kept)

    def write(image: GeneratedImage) -> None:
        # The caption first: an image that is there has one.
        caption = files.image(image.request).with_suffix(".txt")
        write_bytes_atomically(caption, (image.request.prompt.text + "\n").encode())
        files.write(image, {**generate.image_metadata(parts, sampling, image.request), **provenance})

    def counted() -> Iterator[GeneratedImage]:
        for image in generate.generate(parts, sampling, not_whole[:missing], stop):
            generate.check_finite(image)
            counter.add(1)
            yield image

    # Stopping is no error here: the caller reads in `missing` that images are left.
    with Counter("generating images", missing, unit="images") as counter, suppress(generate.Stopped):
        for _ in in_threads(write, counted()):
            pass
    return Filled(kept, counter.done, missing - counter.done)


def images_in(folder: Path) -> int:
    """Images in a folder and in those inside; 0 without the folder."""
    # Hidden names are files that are being written.
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sum(path.suffix.lower() in EXTENSIONS for path in files)


def _made_with(config: Config) -> dict[str, Any]:
    """The model, for the JSON of each image; folders by their absolute paths, wherever the command is given."""
    model = config.model
    found: dict[str, Any] = {
        "base": getattr(model, "pretrained_model_name_or_path", None),
        "revision": getattr(model, "revision", None),
        **{name: value for name, value in model.places.items() if value != BASE},
        "init_from": config.init_from,
    }
    return {
        # By absolute path: the same command from another folder must find its images.
        name: str(Path(value).resolve()) if isinstance(value, str) and Path(value).exists() else value
        for name, value in found.items()
        if value is not None
    }


def _facts(path: Path) -> dict[str, Any]:
    try:
        return documents.read_object(path)
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): delete it and its image, which is then generated again", code="damaged"
        ) from error


def _check_same(each: ClassImageRequest, config: Config, provenance: Mapping[str, Any]) -> None:
    """UserError if the folder's generated images are of other prompts, another size or model."""
    # With the image after the last prompt, so that the end of a longer list is noticed, too.
    # One image of each prompt says enough, as all were made by one command.
    for i, prompt in enumerate([*each.prompts, each.prompts[0]]):
        path = each.folder / f"drawn-{i:05d}.json"
        if path.is_file():
            _check_image(each, config, {"prompt": prompt, **provenance}, _facts(path))


def _check_image(
    each: ClassImageRequest, config: Config, made_with: Mapping[str, Any], before: Mapping[str, Any]
) -> None:
    height, width = image_size(config, "class_image")
    now = {"height": height, "width": width, **made_with}
    no_more = [
        name for name in ("revision", *config.model.networks(), "init_from") if name in before.keys() - now.keys()
    ]
    differs = [name for name in [*now, *no_more] if before.get(name) != now.get(name)]
    if differs:
        listed = ", ".join(f"{name} {before.get(name)!r}, now {now.get(name)!r}" for name in differs)
        raise UserError(
            f"{each.setting}: the images in {each.folder} were generated with other settings ({listed}). Choose "
            "another folder, delete this one to generate them again, or remove the setting to train on them as they "
            "are",
            code="changed",
            setting=each.setting,
        )


def _check_generates(each: ClassImageRequest, config: Config, parts: Components) -> None:
    """UserError if the model that training starts from cannot generate yet."""
    way_out = f"Put {each.count:,} images into {each.folder}, or remove the setting"
    try:
        generate.generative(parts)
    except UserError as error:
        raise UserError(f"{each.setting}: {error}. {way_out}", code=error.code, setting=each.setting) from None
    if config.init_from is not None:
        return
    random = [f"model.{name}" for name, place in config.model.places.items() if not isinstance(place, str)]
    if random:
        why = f"{', '.join(random)} starts from random weights, which give noise"
    elif remarks := parts.family.compatibility_warnings(parts.objective, null=False):
        why = f"this recipe's objective differs from the one of the pretrained weights ({'; '.join(remarks)})"
    else:
        return
    raise UserError(
        f"{each.setting}: class images cannot be generated: {why}. {way_out}",
        code="unsupported",
        setting=each.setting,
    )
